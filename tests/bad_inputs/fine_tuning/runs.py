"""Weights to begin with that do not fit; options of fine-tuning without use."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from lit_probattn.training.checkpoints import load_checkpoint, save_checkpoint
from tests.bad_inputs.cases import Case, command_error, on_folder
from tests.datamodules.text.fine_tuning import made
from tests.support.caches import scratch_folder
from tests.support.runs import arguments, only_version, run


@functools.cache
def _place() -> Path:
    folder = scratch_folder("bad_inputs_")
    made.write_mnli(folder / "mnli")
    made.write_squad(folder / "squad")
    return folder


def _words(command: str, folder: Path, *more: str, task: str = "mnli") -> list[str]:
    given = {"path": _place() / task, "cache_dir": _place() / "cache"}
    return arguments(command, folder, *more, task=f"tiny/{task}", **given)


@functools.cache
def _trained() -> Path:
    """A run folder in which the tiny MultiNLI was trained for one step."""
    folder = scratch_folder("bad_inputs_")
    run(_words("fit", folder, "--trainer.max_steps", "1", "--trainer.limit_val_batches", "0"))
    return only_version(folder)


@on_folder
def _fit(folder: Path, *more: str, task: str = "mnli") -> str:
    return _told(_words("fit", folder, *more, task=task))


def _told(words: list[str]) -> str:
    told = command_error(words).replace(str(_place()), "DATA")
    return told.replace(str(_trained()), "RUN") if _trained.cache_info().currsize else told


def _from_run(*more: str, task: str = "mnli") -> Callable[[Path], str]:
    return lambda folder: _fit("--init_from", str(_trained()), *more, task=task)(folder)


def _from_file(folder: Path, content: bytes) -> str:
    (folder / "x.ckpt").write_bytes(content)
    return _fit("--init_from", str(folder / "x.ckpt"))(folder)


def _other_entries(folder: Path) -> str:
    save_checkpoint({"state_dict": {"weight": torch.zeros(2)}}, folder / "x.ckpt")
    return _fit("--init_from", str(folder / "x.ckpt"))(folder)


def _positions(folder: Path) -> str:
    """The run's own weights, without a word of its tokeniser."""
    (place,) = (_trained() / "checkpoints").glob("step-*.ckpt")
    state = load_checkpoint(place)["state_dict"]
    save_checkpoint({"state_dict": state}, folder / "x.ckpt")
    more = ("--init_from", str(folder / "x.ckpt"), "--data.init_args.max_positions", "32")
    return _fit(*more)(folder)


def _beside_checkpoint(folder: Path) -> str:
    run(_words("fit", folder, "--trainer.max_steps", "1", "--trainer.limit_val_batches", "0"))
    words = _words("fit", folder, "--init_from", str(_trained()), "--trainer.max_steps", "2")
    return _told([*words, "--ckpt_path", str(only_version(folder))]).replace(str(folder), "DIR")


def cases() -> Iterator[Case]:
    """All of them."""
    case = partial(Case, "Weights to begin with")
    yield case("a file that is not there", _fit("--init_from", "nowhere.ckpt"))
    yield case("no name", _fit("--init_from="))
    yield case("no checkpoint", lambda folder: _from_file(folder, b"weights"))
    yield case("a checkpoint of another model", _other_entries)
    yield case("another tokeniser", _from_run(task="squad"))
    yield case("another number of positions", _positions)
    yield case("another width", _from_run("--model.init_args.embed_dim", "32"))
    yield case("a checkpoint to go on from beside it", _beside_checkpoint)
    yield case(
        "in a test", lambda f: _told(_words("test", f, "--init_from", "x", "--ckpt_path", "last"))
    )
    case = partial(Case, "Fine-tuning")
    yield case(
        "a threshold for questions that all have answers",
        _fit("--model.init_args.null_threshold", "1.0", task="squad"),
    )
    yield case(
        "fewer token types than the tokeniser's",
        _fit("--model.init_args.num_token_types", "1", task="squad"),
    )
    yield case("no answers kept", _fit("--model.init_args.n_best", "0", task="squad"))
