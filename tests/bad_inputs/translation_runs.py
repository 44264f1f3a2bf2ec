"""Translation models: what they cannot be built of, checkpoints of other words, wrong lines."""

from __future__ import annotations

import functools
import io
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import yaml

from lit_probattn.configs import read_yaml
from tests.bad_inputs.cases import Case, command_error, on_folder
from tests.support.caches import scratch_folder
from tests.support.paths import ROOT
from tests.support.runs import arguments, only_version, run, write_attention

TEXT = str(ROOT / "configs/tasks/tiny/lra_text.yaml")


def _words(folder: Path, *more: str, **attention: int) -> list[str]:
    given = {"attention": write_attention(folder, **attention), "cache_dir": _cache()}
    return arguments("fit", folder, *more, task="tiny/translation", **given)


@functools.cache
def _cache() -> Path:
    return scratch_folder("bad_inputs_")


@functools.cache
def _trained() -> Path:
    """A run folder in which the tiny task was trained for one step."""
    folder = scratch_folder("bad_inputs_")
    run(_words(folder, "--trainer.max_steps", "1", "--trainer.limit_val_batches", "0"))
    return only_version(folder)


def _fit(*more: str, **attention: int) -> Callable[[Path], str]:
    return lambda folder: command_error(_words(folder, *more, **attention))


@on_folder
def _test(_: Path, *more: str) -> str:
    """A test of the trained run with other settings."""
    config = ("test", "--config", str(_trained() / "config.yaml"), "--ckpt_path")
    return command_error([*config, *(more or ("last",))]).replace(str(_trained()), "RUN")


@on_folder
def _translate(folder: Path, lines: bytes, *more: str) -> str:
    """Lines that are given to the trained run."""
    given = SimpleNamespace(buffer=io.BytesIO(lines))
    with mock.patch.object(sys, "stdin", given):
        words = ["translate", str(_trained()), "--device", "cpu", *more]
        return command_error(words).replace(str(_trained()), "RUN")


def _other_data(folder: Path) -> str:
    """The task of translation on labelled texts."""
    config = read_yaml(TEXT)
    config["model"] = {"class_path": "lit_probattn.tasks.Translation"}
    (folder / "task.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    files = ["--config", str(folder / "task.yaml"), "--config", write_attention(folder)]
    return command_error(["fit", *files])


def _copied(folder: Path) -> Path:
    """A copy of the trained run."""
    return Path(shutil.copytree(_trained(), folder / "copied" / "0"))


def _without_curves(folder: Path) -> Path:
    copy = _copied(folder)
    (copy / "metrics.csv").unlink()
    return copy


def _of_other_pairs(folder: Path) -> Path:
    copy = _copied(folder)
    config = yaml.safe_load((copy / "config.yaml").read_text(encoding="utf-8"))
    config["data"]["init_args"]["num_test"] = 9
    (copy / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return copy


@on_folder
def _compared(folder: Path, make: Callable[[Path], Path]) -> str:
    """The trained run beside one that is made of it."""
    runs = [f"a={_trained()}", f"b={make(folder)}"]
    words = ["analyse", "translations", "--runs", *runs, "--out", str(folder / "out")]
    told = command_error([*words, "--device", "cpu"])
    return told.replace(str(_trained()), "RUN")


def cases() -> Iterator[Case]:
    """Every case of this file."""
    case = partial(Case, "Translation models")
    yield case("an attention that cannot be a cross-attention", _fit(rotary_dim=4))
    yield case("`share: all` of two vocabularies", _fit("--model.init_args.share", "all"))
    yield case("`bleu: mixed`", _fit("--model.init_args.bleu", "mixed"))
    yield case("`label_smoothing: 1`", _fit("--model.init_args.label_smoothing", "1"))
    yield case("more hypotheses than the beam has", _fit("--model.init_args.n_best", "4"))
    yield case("data of one language", _other_data)
    case = partial(Case, "Translation: checkpoints and lines")
    yield case(
        "data of another vocabulary",
        lambda folder: _test("last", "--data.init_args.num_words", "9")(folder),
    )
    yield case("the mean of more checkpoints than there are", lambda f: _test("average-5")(f))
    yield case("`translate`, data of another vocabulary", _translate(b"n1", "--data.num_words=9"))
    yield case("a line that is longer than the model", _translate(b"n0\n" + b"n1 " * 40))
    yield case("a line that is not UTF-8", _translate(b"n0\nn\xe4\n"))
    yield case("`--n_best` above the beam", _translate(b"n0", "--n_best", "9"))
    yield case("`--top_k` without a temperature", _translate(b"n0", "--top_k", "3"))
    case = partial(Case, "Translation: models side by side")
    yield case("a run without `metrics.csv`", _compared(_without_curves))
    yield case("runs of different test sets", _compared(_of_other_pairs))
