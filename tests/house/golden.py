"""`python -m tests.house.golden`: write the losses that `test_golden_losses.py` compares with.

Run it after a change that is meant to move numbers, and say in the change log which and why.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import lightning.pytorch as pl
import numpy as np

from examples.studies.layouts import BASE, StepLosses, fit_arguments
from lit_probattn.base.config_files import named_files
from lit_probattn.cli.app import main as train
from lit_probattn.configs import compose, instantiate, link_sizes
from tests.support.caches import keep_out_of_the_users_cache

STEPS = 20
FILE = Path(__file__).parent / "golden_losses.json"
VARIANTS = (
    *("softmax", "gaussian", "mgk", "mgk_soft_e", "mgk_hard_e", "smgk", "softmax_mgk"),
    *("linear", "favor", "mlk", "fish", "gfish", "mish", "lfish"),
)


def losses_of_the_command(variant: str, folder: Path) -> list[float]:
    """Training loss of 20 steps of tiny ListOps on one process, dropout and noise on."""
    quiet = fit_arguments(variant, BASE, STEPS, "32-true", folder)
    status = train([*quiet, "--model.init_args.dropout", "0.1"])
    assert status == 0
    found: list[float] = np.load(folder / f"{variant}.npy").tolist()
    return found


def losses(variant: str, folder: Path, seed: int = 0, steps: int = STEPS) -> list[float]:
    """The first of these losses without the command line, which takes most of the time."""
    config = compose(
        [named_files("task")["tiny/lra_listops"], named_files("attention")[variant]],
        {
            **{"model.init_args.schedule_steps": STEPS, "model.init_args.dropout": 0.1},
            "model.init_args.attention.init_args.dropout": 0.1,
            **{"model.init_args.seed": seed, "data.init_args.seed": seed},
            "data.init_args.data_dir": str(folder / "data"),
        },
    )
    pl.seed_everything(seed)
    data = instantiate(pl.LightningDataModule, config["data"])
    link_sizes(config["model"], data)
    model = instantiate(pl.LightningModule, config["model"])
    seen = StepLosses(str(folder / f"{variant}.npy"))
    trainer = pl.Trainer(
        **{"accelerator": "cpu", "devices": 1, "limit_val_batches": 0, "logger": False},
        **dict.fromkeys(("enable_checkpointing", "enable_progress_bar"), False),
        **dict.fromkeys(("enable_model_summary", "use_distributed_sampler"), False),
        **{"max_steps": steps, "check_val_every_n_epoch": None, "callbacks": [seen]},
    )
    trainer.fit(model, data)
    return [float(loss) for loss in seen.rows]


def main() -> None:
    """Write the file."""
    keep_out_of_the_users_cache()
    with tempfile.TemporaryDirectory() as folder:
        table = {variant: losses_of_the_command(variant, Path(folder)) for variant in VARIANTS}
    lines = ",\n".join(
        f' "{name}": {json.dumps([round(v, 6) for v in row])}' for name, row in table.items()
    )
    FILE.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main()
