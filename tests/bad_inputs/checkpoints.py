"""Checkpoints that cannot be used."""

from __future__ import annotations

import functools
import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from lit_probattn.training.checkpoints import list_checkpoints
from tests.bad_inputs.cases import Case, command_error, fit, on_folder
from tests.support.caches import scratch_folder
from tests.support.runs import arguments, only_version, run


@functools.cache
def _trained() -> Path:
    """A folder in which the tiny Text task was trained for one step."""
    folder = scratch_folder("bad_inputs_")
    short = ("--trainer.max_steps", "1", "--trainer.limit_val_batches", "0")
    run(arguments("fit", folder, *short))
    return folder


def _checkpoint() -> Path:
    return list_checkpoints(only_version(_trained()) / "checkpoints", "step")[0]


@on_folder
def damaged(folder: Path, change: Callable[[bytes], bytes], command: str = "fit") -> str:
    """A command that starts from a checkpoint of which bytes were changed."""
    path = folder / "step-00000001.ckpt"
    path.write_bytes(change(_checkpoint().read_bytes()))
    return command_error(arguments(command, folder, "--ckpt_path", str(path)))


@on_folder
def sound(folder: Path, *more: str, name: str = "fit") -> str:
    """A command that starts from the sound checkpoint and does not fit it."""
    path = folder / "step-00000001.ckpt"
    shutil.copy(_checkpoint(), path)
    return command_error(arguments(name, folder, "--ckpt_path", str(path), *more))


def _flip(content: bytes) -> bytes:
    """Change one byte of the largest weight."""
    state = torch.load(_checkpoint(), weights_only=True)["state_dict"]
    weight = max(state.values(), key=lambda tensor: tensor.numel())
    place = content.index(weight.numpy().tobytes()) + 101
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


def _with_code(folder: Path) -> str:
    path = folder / "step-00000001.ckpt"
    torch.save({"global_step": 1, "state_dict": {}, "factory": random.Random(0)}, path)
    return command_error(arguments("fit", folder, "--ckpt_path", str(path)))


@on_folder
def _other_content(folder: Path, content: object) -> str:
    path = folder / "step-00000001.ckpt"
    torch.save(content, path)
    return command_error(arguments("test", folder, "--ckpt_path", str(path)))


def _all_damaged(folder: Path) -> str:
    shutil.copytree(_trained() / "runs", folder / "runs")
    checkpoints = only_version(folder) / "checkpoints"
    for path in checkpoints.iterdir():
        path.write_bytes(path.read_bytes()[:-50])
    return command_error(
        arguments("fit", folder, "--ckpt_path", "last", "--trainer.max_steps", "2")
    )


def cases() -> Iterator[Case]:
    """Missing, damaged, of another model."""
    case = partial(Case, "Checkpoints")
    yield case("`test` without `--ckpt_path`", lambda f: command_error(arguments("test", f)))
    yield case("`last`, and there is none", fit("--ckpt_path", "last"))
    yield case(
        "`best`, and there is none",
        lambda f: command_error(arguments("test", f, "--ckpt_path", "best")),
    )
    yield case("a file that is not there", fit("--ckpt_path", "nowhere.ckpt"))
    yield case("a folder", fit("--ckpt_path", "DIR"))
    yield case("an empty `--ckpt_path`", fit("--ckpt_path", ""))
    yield case("`limit_test_batches 0`", sound("--trainer.limit_test_batches", "0", name="test"))
    yield case("an empty file", damaged(lambda content: b""))
    yield case("cut off in the middle", damaged(lambda content: content[: len(content) // 2]))
    yield case("one byte of a weight changed", damaged(_flip))
    yield case("no archive", damaged(lambda content: b"weights"))
    yield case("a plain pickle", damaged(lambda content: pickle.dumps({"state_dict": {}})))
    yield case("it needs code to load", _with_code)
    yield case("all checkpoints of the run are damaged", _all_damaged)
    yield case("a list instead of a checkpoint", _other_content([1, 2]))
    yield case("no weights in it", _other_content({"global_step": 1}))
    yield case("another width", sound("--model.init_args.embed_dim", "24", name="test"))
    yield case("another number of layers", sound("--model.init_args.num_layers", "3", name="test"))
    yield case(
        "other weights: another variant",
        sound(
            "--model.init_args.attention",
            "lit_probattn.attention.MGKAttention",
            "--model.init_args.attention.init_args.num_heads",
            "2",
            name="test",
        ),
    )
    yield case("another accumulation", sound("--trainer.accumulate_grad_batches", "2"))
