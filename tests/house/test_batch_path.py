"""One batch, from the task to its loss: the files that it passes, in order, few of them twice."""

from __future__ import annotations

import re
import sys
from functools import partial
from types import FrameType
from unittest.mock import MagicMock

import torch

from lit_probattn.attention import MGKAttention
from lit_probattn.tasks import SequenceClassifier
from tests.attention.engines.reading import file_of, path
from tests.support.helpers import skip_without_library
from tests.support.paths import ROOT

PACKAGE = f"{ROOT}/lit_probattn/"
# Small mathematics that every file uses.
EVERYWHERE = {
    *("attention/masks.py", "attention/numerics.py", "attention/call.py"),
    *("attention/draws.py", "base/memory.py", "base/graphs.py", "base/torch_internals.py"),
    "randomness.py",
}
MOST_FILES = 16
# Asked what it is by the choice, and told to lower by the engine.
AGAIN = {"attention/mgk/functions.py", "attention/variant.py"}


def our_file(frame: FrameType | None) -> str | None:
    path = "" if frame is None else frame.f_code.co_filename
    return path.removeprefix(PACKAGE) if path.startswith(PACKAGE) else None


def files_entered(run) -> list[str]:
    """Return the files that `run` calls into, one entry per calling function, in order."""
    entries: list[tuple[object, str]] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        file = our_file(frame)
        if event != "call" or file is None:
            return
        caller = frame.f_back
        while caller is not None and our_file(caller) is None:
            caller = caller.f_back
        entry = (None if caller is None else caller.f_code, file)
        if our_file(caller) != file and entry not in entries:
            entries.append(entry)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    # Draws may come from the C library of the CPU.
    drawing = ("kernels/cpu/", "records/")
    return [f for _, f in entries if f not in EVERYWHERE and not f.startswith(drawing)]


def smgk_on_listops(dropout: float) -> list[str]:
    attention = partial(MGKAttention, num_heads=4, shifted_keys=True, dropout=dropout)
    sizes = {"vocab_size": 18, "num_classes": 10, "max_seq_len": 32}
    model = {"embed_dim": 16, "head_dim": 8, "num_layers": 1, "mlp_dim": 32}
    task = SequenceClassifier(attention, **sizes, **model)
    task._trainer = MagicMock(global_step=0)
    batch = {
        "inputs": torch.randint(18, (4, 16)),
        "key_mask": torch.ones(4, 16, dtype=torch.bool),
        "target": torch.randint(10, (4,)),
        "sample_ids": torch.arange(4),
    }
    task.log = lambda *_, **__: None
    return files_entered(lambda: task.batch_loss(batch))


def test_a_batch_passes_few_files_and_each_once(monkeypatch):
    """Where the C library of the CPU is not; it has a way of its own."""
    refusal = "lit_probattn.attention.engines.native.native_refusal"
    monkeypatch.setattr(refusal, lambda device: "cannot be found")
    smgk_on_listops(0.1)  # the first use of the C library, for draws, opens it under a lock
    for dropout in (0.0, 0.1):
        files = smgk_on_listops(dropout)
        assert len(set(files)) <= MOST_FILES, files
        again = {file for file in files if files.count(file) > 1}
        assert again <= AGAIN, f"entered again: {again}"
        assert not any(file.startswith("kernels/") for file in files)


def test_few_files_of_attention_lie_between_x_and_y():
    """Those of `EVERYWHERE` count here."""
    for name, most in (("smgk", 10), ("fish", 12), ("mlk", 12), ("a user's class", 9)):
        files = {file_of(function) for function in path(name, 0.0)}
        assert len(files) <= most, (name, sorted(files))


def test_tiles_in_c_stand_where_fused_attention_does():
    skip_without_library("native")
    without, found = (
        [f for f in dict.fromkeys(smgk_on_listops(p)) if not f.startswith("kernels/")]
        for p in (0.0, 0.1)
    )
    assert [f.replace("native.py", "sdpa.py") for f in found] == without


def test_the_drawing_in_contributing_names_these_files_in_order():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    drawing = text.split("## The path of one batch")[1].split("```")[1]
    drawn = re.findall(r"^\s*([\w/]+\.py)", drawing, re.MULTILINE)
    assert drawn == list(dict.fromkeys(smgk_on_listops(0.0)))


def test_the_count_sees_a_climb():
    """The counter is not blind: a function that calls back into its caller's file is seen."""

    def run():
        layer = MGKAttention(8, 2)
        call = layer.call(torch.zeros(1, 3, 8))
        layer.core.pick(call)
        layer.core(call)

    files = files_entered(run)
    assert files.count("attention/core.py") > 1
