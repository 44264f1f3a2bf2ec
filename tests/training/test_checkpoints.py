"""Checkpoint files: whole or absent, damage is seen, the previous one is used."""

from __future__ import annotations

import errno
import os
import pickle
import random
import sys
import zipfile

import pytest
import torch
from safetensors.torch import load_file

from lit_probattn.convert.__main__ import main as convert
from lit_probattn.tasks import SequenceClassifier
from lit_probattn.training import checkpoints
from lit_probattn.training.checkpoints import (
    CheckpointError,
    check_checkpoint,
    checkpoint_path,
    export_safetensors,
    find_file,
    list_checkpoints,
    load_checkpoint,
    newest_good_checkpoint,
    save_checkpoint,
    step_of,
)
from lit_probattn.training.run_record import read_starts
from tests.support.helpers import error_of
from tests.support.runs import in_child, only_version, rewound, stateful
from tests.support.slow import mostly_slow


def export(words: list[str]) -> int:
    """Run the command that writes weights as safetensors."""
    return convert([*words, "--to", "safetensors"])


def content(step: int = 7) -> dict:
    generator = torch.Generator().manual_seed(step)
    weights = {"model.w": torch.randn(53, 11, generator=generator), "eval.n": torch.tensor(3)}
    return {"global_step": step, "state_dict": weights}


@pytest.fixture
def saved(tmp_path):
    path = checkpoint_path(tmp_path, "step", 7)
    save_checkpoint(content(), path)
    return path


def test_round_trip_and_names(saved):
    assert saved.name == "step-00000007.ckpt"
    assert torch.equal(
        load_checkpoint(saved)["state_dict"]["model.w"], content()["state_dict"]["model.w"]
    )
    assert step_of(saved) == 7
    renamed = saved.rename(saved.with_name("mine.ckpt"))
    assert step_of(renamed) == 7
    assert [path.name for path in saved.parent.iterdir()] == ["mine.ckpt"]


def test_a_file_takes_its_name_by_a_rename(tmp_path):
    """Not by a copy: whoever opens the name finds a whole file, old or new, at every moment."""
    path = checkpoint_path(tmp_path, "step", 7)
    for step in (1, 2):
        with checkpoints.replacing(path) as file:
            file.write(b"content of step %d" % step)
            number = os.fstat(file.fileno()).st_ino
        assert path.stat().st_ino == number
        assert path.read_bytes() == b"content of step %d" % step
    save_checkpoint(content(), path)
    before = path.read_bytes()
    with path.open("rb") as reader:
        save_checkpoint(content(8), path)
        assert reader.read() == before != path.read_bytes()


@pytest.mark.parametrize("raised", ["from", "during"])
def test_a_checkpoint_that_cannot_be_written_names_the_cause(raised, tmp_path, monkeypatch):
    """PyTorch's writer raises another error while the file's error is handled."""
    cause = OSError(errno.EFBIG, "File too large")

    def save(content, file):
        file.write(b"half")
        try:
            raise cause
        except OSError as error:
            if raised == "from":
                raise RuntimeError("unexpected pos 64 vs 0") from error
            raise RuntimeError("unexpected pos 64 vs 0")  # noqa: B904

    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(CheckpointError, match=r"step-00000007\.ckpt: .*File too large"):
        save_checkpoint(content(), checkpoint_path(tmp_path, "step", 7))
    assert list(tmp_path.iterdir()) == []


def test_list_is_newest_first_and_by_kind(tmp_path):
    for kind, step in (("step", 20), ("step", 100), ("best", 40), ("step", 3)):
        save_checkpoint(content(step), checkpoint_path(tmp_path, kind, step))
    (tmp_path / "step-00000500.ckpt.tmp").touch()
    assert [step_of(p) for p in list_checkpoints(tmp_path, "step")] == [100, 20, 3]
    assert [step_of(p) for p in list_checkpoints(tmp_path, "best")] == [40]


@pytest.mark.parametrize("part", [i / 20 for i in range(20)])
def test_truncation_is_seen(saved, part):
    saved.write_bytes(saved.read_bytes()[: int(part * saved.stat().st_size)])
    with pytest.raises(CheckpointError, match=saved.name):
        load_checkpoint(saved)


def test_one_flipped_byte_in_a_weight_is_seen(saved):
    with zipfile.ZipFile(saved) as archive:
        member = next(m for m in archive.infolist() if m.filename.endswith("/data/0"))
    data = bytearray(saved.read_bytes())
    where = data.index(content()["state_dict"]["model.w"].numpy().tobytes()) + 1001
    assert member.file_size > 1001
    data[where] ^= 1
    saved.write_bytes(data)
    torch.load(saved, weights_only=True)  # torch alone does not notice
    with pytest.raises(CheckpointError, match=r"step-00000007.ckpt is corrupt: checksum"):
        load_checkpoint(saved)


def test_one_flipped_byte_that_no_checksum_of_the_archive_covers_is_seen(saved):
    """The time of the first entry."""
    data = bytearray(saved.read_bytes())
    assert data[:4] == b"PK\x03\x04"
    data[10] ^= 1
    saved.write_bytes(data)
    with zipfile.ZipFile(saved) as archive:
        assert archive.testzip() is None
    with pytest.raises(CheckpointError, match=r"checksum of the file is wrong"):
        load_checkpoint(saved)


def test_no_flipped_byte_changes_a_weight_unseen(saved):
    good = saved.read_bytes()
    expected = content()["state_dict"]["model.w"]
    generator = random.Random(0)
    for where in generator.sample(range(len(good)), 60):
        data = bytearray(good)
        data[where] ^= 1 << generator.randrange(8)
        saved.write_bytes(data)
        try:
            loaded = load_checkpoint(saved)
        except CheckpointError:
            continue
        assert torch.equal(loaded["state_dict"]["model.w"], expected), f"byte {where}"


def test_objects_that_need_code_are_refused(tmp_path):
    path = tmp_path / "step-00000001.ckpt"
    save_checkpoint({"state_dict": {}, "factory": random.Random(0)}, path)
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load_checkpoint(path)


class Runs:
    """Unpickled, it calls a function."""

    def __init__(self, function, *given):
        self.given = function, given

    def __reduce__(self):
        return self.given


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (Runs(os.system, "true"), "system"),
        (Runs(eval, "1"), "eval"),
        (random.Random(0), "random.Random"),
        (torch.nn.Linear(1, 1), "Linear"),
    ],
)
def test_code_is_named_and_nobody_is_advised_to_run_it(tmp_path, value, name):
    path = tmp_path / "step-00000001.ckpt"
    save_checkpoint({"state_dict": {}, "factory": value}, path)
    with pytest.raises(CheckpointError, match=name) as told:
        load_checkpoint(path)
    assert str(path) in str(told.value)
    assert "likely succeed" not in str(told.value)
    assert "Re-running" not in str(told.value)


def test_of_several_lines_about_what_is_no_plain_value_the_reason_is_told(saved, monkeypatch):
    lines = [
        "Weights only load failed.",
        "(1) Re-running it will likely succeed",
        "Bad operand 149",
    ]

    def load(*_, **options):
        raise pickle.UnpicklingError("\n".join([*lines, "Check the documentation of torch.load."]))

    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(CheckpointError, match=r"plain values \(Bad operand 149\)"):
        load_checkpoint(saved)


@pytest.mark.parametrize("key", ["_instantiator", "_class_path"])
def test_a_crafted_checkpoint_runs_no_code(newest, tmp_path, monkeypatch, key):
    """Hyperparameters that name code: releases of Lightning before 2.6.6 import and call it."""
    mark = tmp_path / "mark"
    body = (
        f"open({str(mark)!r}, 'w').close()\ndef run(*a, **k): raise SystemExit\nclass Run: pass\n"
    )
    (tmp_path / "crafted_code.py").write_text(body)
    monkeypatch.syspath_prepend(str(tmp_path))
    loaded = load_checkpoint(newest)
    crafted = {"_instantiator": "crafted_code.run"}
    if key == "_class_path":
        crafted = {
            "_instantiator": "lightning.pytorch.cli.instantiate_module",
            "_class_path": "crafted_code.Run",
        }
    loaded["hyper_parameters"] = {**loaded["hyper_parameters"], **crafted}
    save_checkpoint(loaded, tmp_path / "crafted.ckpt")
    with pytest.raises(Exception, match=r"crafted_code|instantiator"):
        SequenceClassifier.load_from_checkpoint(tmp_path / "crafted.ckpt", weights_only=True)
    assert not mark.exists()
    assert "crafted_code" not in sys.modules


@pytest.mark.parametrize("command", mostly_slow(["fit", "test", "validate", "predict"], ["fit"]))
def test_weights_that_are_nan_are_refused(trained, newest, tmp_path, command):
    broken = load_checkpoint(newest)
    name = next(n for n in broken["state_dict"] if n.endswith("out_proj.weight"))
    broken["state_dict"][name][1, 0] = torch.nan
    save_checkpoint(broken, tmp_path / "broken.ckpt")
    before = sorted(trained.rglob("*"))
    more = ("--ckpt_path", str(tmp_path / "broken.ckpt"))
    assert f"broken.ckpt: {name} contains NaN" in error_of(stateful(command, tmp_path, *more))
    assert sorted(trained.rglob("*")) == before
    assert only_version(tmp_path) == trained


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"state_dict": {3: torch.zeros(2)}}, "state_dict has the key 3, expected a name"),
        ({"state_dict": {"w": "x"}}, "state_dict has a str as w, expected a tensor"),
        ({"state_dict": {"w": torch.eye(2).to_sparse()}}, "w is sparse, expected a dense tensor"),
        ({"state_dict": [1]}, "state_dict is a list, expected tensors by name"),
        ({"global_step": "five"}, "global_step is 'five', expected a number"),
    ],
)
@pytest.mark.parametrize("name", ["mine.ckpt", "step-00000007.ckpt"])
def test_contents_of_another_form_are_named(tmp_path, name, more, message):
    torch.save({**content(), **more}, tmp_path / name)
    line = error_of([str(tmp_path / name), str(tmp_path / "w.safetensors")], export)
    assert f"{name}: {message}" in line
    with pytest.raises(CheckpointError, match=name):
        load_checkpoint(tmp_path / name)


def test_a_name_that_says_another_step_is_refused(saved):
    other = saved.rename(saved.with_name("step-00000099.ckpt"))
    with pytest.raises(CheckpointError, match=r"step-00000099.ckpt contains step 7.*99"):
        load_checkpoint(other)


def test_damaged_newest_falls_back_with_a_warning(tmp_path):
    for step in (1, 2, 3):
        save_checkpoint(content(step), checkpoint_path(tmp_path, "step", step))
    checkpoint_path(tmp_path, "step", 3).write_bytes(b"PK")
    with pytest.warns(UserWarning, match=r"step-00000003.ckpt is corrupt.*step-00000002"):
        assert step_of(newest_good_checkpoint(tmp_path, "step")) == 2
    for step in (1, 2):
        checkpoint_path(tmp_path, "step", step).write_bytes(b"")
    with pytest.raises(CheckpointError, match="no intact checkpoint"):
        newest_good_checkpoint(tmp_path, "step")
    assert newest_good_checkpoint(tmp_path, "best") is None


def test_failure_to_write_is_an_error_and_keeps_what_was_there(saved, monkeypatch):
    def full(value, file):
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoints.torch, "save", full)
    with pytest.raises(CheckpointError, match=r"cannot write .*step-00000007.*No space left"):
        save_checkpoint(content(8), saved)
    check_checkpoint(saved)
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


def test_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot write"):
        save_checkpoint(content(), tmp_path / "file" / "step-00000001.ckpt")


@pytest.fixture
def trained(uninterrupted, tmp_path):
    """A run folder of six steps that a test may change."""
    return rewound(uninterrupted, 6, tmp_path)


@pytest.fixture
def newest(uninterrupted):
    """The newest checkpoint of a run."""
    return list_checkpoints(uninterrupted / "checkpoints", "step")[0]


def test_two_steps_and_the_best_are_kept(uninterrupted):
    best, *steps = sorted(p.name for p in (uninterrupted / "checkpoints").iterdir())
    assert best.startswith("best-")
    assert steps == ["step-00000004.ckpt", "step-00000006.ckpt"]
    (start,) = read_starts(uninterrupted)
    assert start["saved"] is True


def test_checkpoint_needs_no_code_to_load(newest):
    """In a process in which importing this package or Lightning fails."""

    def load() -> int:
        for name in list(sys.modules):
            if name.partition(".")[0] in ("lit_probattn", "lightning", "datamodules"):
                sys.modules[name] = None
        found = torch.load(newest, weights_only=True)["hyper_parameters"]["attention"]["class_path"]
        return 0 if found == "lit_probattn.attention.MGKAttention" else 1

    assert in_child(load) == 0


def test_load_from_checkpoint_builds_the_same_model(newest):
    model = SequenceClassifier.load_from_checkpoint(newest, weights_only=True)
    saved = load_checkpoint(newest)["state_dict"]
    assert saved.keys() == model.state_dict().keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in model.state_dict().items())


def test_the_moving_average_is_exported(saved, tmp_path):
    """The weights whose scores selected the checkpoint."""
    average = torch.full((53, 11), 3.0)
    found = content()
    found["state_dict"] |= {"ema.module.w": average}
    save_checkpoint(found, saved)
    assert export([str(saved), str(tmp_path / "w.safetensors")]) == 0
    (weights,) = load_file(tmp_path / "w.safetensors").values()
    assert torch.equal(weights, average)


def test_export_to_safetensors(newest, tmp_path):
    count = export_safetensors(newest, tmp_path / "w.safetensors")
    weights = load_file(tmp_path / "w.safetensors")
    saved = load_checkpoint(newest)["state_dict"]
    assert count == len(weights) == len([k for k in saved if k.startswith("model.")])
    assert all(torch.equal(saved[f"model.{name}"], tensor) for name, tensor in weights.items())


def test_export_replaces_nothing(newest, tmp_path, capsys):
    before = newest.read_bytes()
    note = tmp_path / "note.txt"
    note.write_text("mine")
    folder = tmp_path / "taken"
    folder.mkdir()
    for output in (newest, note, folder):
        assert export([str(newest), str(output)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line == f"error: {output} exists: choose another name, or remove it"
    assert newest.read_bytes() == before
    assert note.read_text(encoding="utf-8") == "mine"
    line = error_of([str(newest), str(note / "w.safetensors")], export)
    assert f"error: cannot write {note / 'w.safetensors'}: " in line
    assert sorted(p.name for p in tmp_path.iterdir()) == ["note.txt", "taken"]


def test_a_run_folder_stands_for_its_checkpoints(tmp_path):
    folder = tmp_path / "0/checkpoints"
    for kind, step in (("best", 40), ("step", 60), ("step", 80)):
        save_checkpoint(content(step), checkpoint_path(folder, kind, step))
    best, last = folder / "best-00000040.ckpt", folder / "step-00000080.ckpt"
    run_folder = tmp_path / "0"
    for asked in (run_folder, folder, run_folder / "best", folder / "best", best):
        assert find_file(asked) == best
    for asked in (run_folder / "last", folder / "last", last):
        assert find_file(asked) == last
    assert export([str(run_folder), str(tmp_path / "w.safetensors")]) == 0
    best.unlink()
    assert find_file(run_folder) == last


def test_a_checkpoint_that_is_not_there_names_those_that_are(tmp_path):
    folder = tmp_path / "0/checkpoints"
    save_checkpoint(content(40), checkpoint_path(folder, "best", 40))
    for check in (find_file, check_checkpoint, load_checkpoint):
        with pytest.raises(CheckpointError, match=rf"in {folder} there are best-00000040.ckpt$"):
            check(folder / "best-00000600.ckpt")
    with pytest.raises(CheckpointError, match=r"not found: .+/nowhere/best$"):
        find_file(tmp_path / "nowhere/best")


def test_a_folder_in_the_place_of_a_checkpoint(tmp_path):
    """It is not taken for one, and not said to be a full disk."""
    save_checkpoint(content(7), checkpoint_path(tmp_path, "step", 7))
    taken = checkpoint_path(tmp_path, "step", 8)
    taken.mkdir()
    assert [step_of(path) for path in list_checkpoints(tmp_path, "step")] == [7]
    with pytest.raises(CheckpointError, match=r"a folder with that name exists"):
        save_checkpoint(content(8), taken)
