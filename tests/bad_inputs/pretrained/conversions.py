"""Attention that cannot be converted or annealed as asked."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from tests.bad_inputs.cases import Case, command_error, fit, on_folder
from tests.bad_inputs.values import variant
from tests.convert.test_to_mgk import make_run

_STEPS = "--model.init_args.norm_annealing_steps"


@on_folder
def _convert(folder: Path, flags: str) -> str:
    """A conversion of a sound run."""
    make_run(folder / "run")
    command = ["convert", str(folder / "run"), str(folder / "out.ckpt"), *flags.split()]
    return command_error(command)


@on_folder
def _prune(folder: Path, attention: str, flags: str) -> str:
    """Pruning of a sound run."""
    torch.manual_seed(0)  # the message has a number of the weights
    make_run(folder / "run", attention)
    place = [str(folder / "run"), str(folder / "out.ckpt")]
    return command_error(["convert", "prune", *place, *flags.split()])


def cases() -> Iterator[Case]:
    """Flags of conversions, then of annealing."""
    case = partial(Case, "Converting attention")
    for flags in (
        "--to fish --num_components 2",
        "--to mgk --spread 0.2",
        "--to smgk --num_global_heads 2",
        "--to smgk --score dot",
        "--anneal 100",
        "--to smgk --old_heads 3",
        "--to smgk --old_heads 4",
        "--to fish --num_global_heads 5",
    ):
        yield case(f"`convert {flags}` of 4 heads", _convert(flags))
    mgk = "MGKAttention"
    yield case("`convert prune` of softmax", _prune("SoftmaxAttention", ""))
    yield case("`convert prune` of components in use", _prune(mgk, "--threshold 0.001"))
    yield case("`convert prune --threshold 2`", _prune(mgk, "--threshold 2"))
    yield case("`norm_annealing_steps 5` of softmax", fit(_STEPS, "5"))
    yield case("`norm_annealing_steps 0`", fit(_STEPS, "0"))
    yield case("`key_norm_weight 2`", variant(mgk, key_norm_weight=2.0))
    dot = variant(mgk, key_norm_weight=1.0, score="dot")
    yield case("`key_norm_weight` of dot products", dot)
