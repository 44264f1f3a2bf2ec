"""`python -m tests.house.golden`: write the losses that `test_golden_losses.py` compares with.

Run it after a change that is meant to move numbers, and say in the change log which and why.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np

from examples.studies.layouts import BASE, fit_arguments
from lit_probattn.cli.app import main as train
from tests.support.caches import keep_out_of_the_users_cache

STEPS = 20
FILE = Path(__file__).parent / "golden_losses.json"
VARIANTS = (
    *("softmax", "gaussian", "mgk", "mgk_soft_e", "mgk_hard_e", "smgk", "softmax_mgk"),
    *("linear", "favor", "mlk", "fish", "gfish", "mish", "lfish"),
)


def losses(variant: str, folder: Path, *more: str) -> list[float]:
    """Training loss of 20 steps of tiny ListOps on one process, dropout and noise on."""
    quiet = fit_arguments(variant, BASE, STEPS, "32-true", folder)
    status = train([*quiet, "--model.init_args.dropout", "0.1", *more])
    assert status == 0
    found: list[float] = np.load(folder / f"{variant}.npy").tolist()
    return found


def main() -> None:
    """Write the file."""
    keep_out_of_the_users_cache()
    with tempfile.TemporaryDirectory() as folder:
        table = {variant: losses(variant, Path(folder)) for variant in VARIANTS}
    lines = ",\n".join(
        f' "{name}": {json.dumps([round(v, 6) for v in row])}' for name, row in table.items()
    )
    FILE.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main()
