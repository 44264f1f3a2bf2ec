"""What runs between x and y: `python -m tests.attention.engines.reading [--show NAME]`.

For layers in evaluation on a CPU, and in training with attention dropout: files of attention/ in
which a function is called, these functions, and their lines (from the first of a function to its
last, docstrings included). The second call is traced, because the first one opens libraries.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from types import CodeType, FrameType

import torch
from torch import Tensor
from torch.nn.functional import normalize

from lit_probattn.attention import Attention
from tests.attention.variants import shipped_variants
from tests.support.paths import ROOT

FOLDER = f"{ROOT}/lit_probattn/attention/"
EMBED, HEADS, HEAD = 32, 4, 8
NAMES = ("smgk", "fish", "mlk", "ast")  # of configurations; a copy may lack one


class Cosines(Attention):
    """A user's class: scores and nothing else."""

    def reference_scores(self, query: Tensor, key: Tensor) -> Tensor:
        """Return ten cosines."""
        return 10.0 * normalize(query, dim=-1) @ normalize(key, dim=-1).mT


def layers() -> dict[str, tuple[type[Attention], dict[str, object]]]:
    """Return class and options of the layers that are traced."""
    shipped = shipped_variants()
    found = {name: shipped[name] for name in NAMES if name in shipped}
    return found | {"a user's class": (Cosines, {})}


def functions_called(run: Callable[[], object]) -> list[CodeType]:
    """Return the functions of attention/ that `run` calls, each once, in order."""
    called: dict[CodeType, None] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(FOLDER):
            called.setdefault(code)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return [code for code in called if not code.co_name.startswith("<")]


def path(name: str, dropout: float) -> list[CodeType]:
    """Return the functions between input and output of a layer, with dropout in training."""
    cls, options = layers()[name]
    options = {**options, "num_heads": HEADS, "head_dim": HEAD, "dropout": dropout}
    layer = cls(EMBED, **options).train(dropout > 0.0)
    x = torch.randn(2, 24, EMBED)

    def run() -> None:
        with torch.set_grad_enabled(layer.training):
            layer(x)

    run()
    return functions_called(run)


def file_of(code: CodeType) -> str:
    """Return the file of a function below attention/."""
    return code.co_filename.removeprefix(FOLDER)


def num_lines(code: CodeType) -> int:
    """Return the lines of a function, from the first to the last."""
    lines = [line for *_, line in code.co_lines() if line is not None]
    return max(lines) - code.co_firstlineno + 1


def main() -> None:
    """Print a row per layer, and with `--show NAME` its functions."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--show", default="", choices=["", *layers()])
    shown = parser.parse_args().show
    print("| x to y | evaluation: files / functions / lines | training with dropout |")
    print("| --- | --- | --- |")
    for name in layers():
        cells = []
        for dropout in (0.0, 0.1):
            found = path(name, dropout)
            numbers = len({file_of(c) for c in found}), len(found), sum(map(num_lines, found))
            cells.append(" / ".join(map(str, numbers)))
        print(f"| {name} | " + " | ".join(cells) + " |")
    if shown:
        for code in path(shown, 0.0):
            print(f"{file_of(code):28} {code.co_qualname:40} {num_lines(code)}")


if __name__ == "__main__":
    main()
