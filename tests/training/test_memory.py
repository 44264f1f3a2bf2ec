"""Out of memory: one line that says what to lower, with numbers that hold."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import partial

import pytest
import torch

from lit_probattn.training.memory import (
    Step,
    is_out_of_memory,
    predicted_step_bytes,
    told_out_of_memory,
)
from profiling.measure.memory import measured_cpu_bytes
from tests.support.paths import ROOT
from tests.support.runs import arguments, error_of, write_attention
from tests.tasks.tiny import data, task, trainer

GIB = 1 << 30
# Long sequences, so that the N x N maps of the reference are what does not fit.
LONG = (
    *("--data.init_args.num_train", "16", "--data.init_args.num_val", "2"),
    *("--data.init_args.min_length", "1000", "--data.init_args.max_length", "1024"),
    *("--trainer.max_steps", "1", "--trainer.val_check_interval", "4"),
    *("--model.init_args.warmup_steps", "0", "--trainer.num_sanity_val_steps", "0"),
)


def next_step(module, loader, run):
    """The step that would follow on a run that has ended."""
    run.fit(module, loader)
    module.trainer = run
    batch = next(iter(loader.train_dataloader()))
    return Step(module, batch, True, "32-true")


@pytest.mark.parametrize("rows", [8, 4])
def test_prediction_is_what_the_step_takes(rows):
    # Heads of 16: where smaller ones are padded, PyTorch's kernel copies the gradient of its
    # output, whose dimensions are in another order, and fake tensors do not see such copies.
    module, run = task(head_dim=16), trainer(1)
    step = next_step(module, data(), run)
    part = {name: value[:rows] for name, value in step.batch.items()}

    def build():
        def compute():
            module.model.zero_grad(set_to_none=True)
            module.batch_loss(part).backward()

        module.model.zero_grad(set_to_none=True)
        return compute, list(part.values())

    peak, inputs = measured_cpu_bytes(build)
    weights = sum(p.numel() * p.element_size() for p in module.model.parameters())
    buffers = sum(b.numel() * b.element_size() for b in module.model.buffers())
    expected = peak + inputs + 3 * weights + buffers  # weights and two averages of AdamW
    assert predicted_step_bytes(step, rows, None) == pytest.approx(expected, abs=4096)  # scalars


LIMITED = """
import resource, sys
import profiling.measure.memory  # loaded before the limit, as a GPU would find it
from lit_probattn.cli.app import main
with open("/proc/self/status") as file:
    used = next(int(line.split()[1]) for line in file if line.startswith("VmData"))
limit = used * 1024 + int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
sys.exit(main(sys.argv[2:]))
"""


def limited(command, extra_bytes):
    """Run a command in a process that may allocate so many more bytes; return what became of it.

    The process is a new one: a forked one cannot predict where autograd has threads.
    """
    words = [sys.executable, "-c", LIMITED, str(extra_bytes), *command]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
@pytest.mark.slow
def test_advice_is_one_line_and_taking_it_helps(tmp_path):
    reference = write_attention(tmp_path, "SoftmaxAttention", backend="reference")
    command = partial(arguments, "fit", tmp_path, *LONG, attention=reference)
    done = limited(command(), GIB // 4)
    assert done.returncode == 2
    (line,) = [text for text in done.stderr.splitlines() if text.startswith("error: ")]
    assert "out of memory on cpu in training at step 0: a micro-batch of 8 samples" in line
    needed = float(re.search(r"predicted to need ([\d.]+) GiB", line)[1])
    assert 0.25 < needed < 4
    scale = {"GiB": 1.0, "MiB": 1 / 1024}
    advised = {k: (value, float(n) * scale[unit]) for k, value, n, unit in ADVICE.findall(line)}
    assert advised["trainer.accumulate_grad_batches"][0] == "2"
    assert advised["data.init_args.batch_size"][0] == "4"
    assert advised["trainer.accumulate_grad_batches"][1] == pytest.approx(needed / 2, rel=0.1)
    backend, size = advised["model.init_args.attention.init_args.backend"]
    assert backend in ("blockwise", "sdpa")
    assert size < 0.1
    more = ("--model.init_args.attention.init_args.backend", backend)
    done = limited(command(*more), GIB // 4)
    assert done.returncode == 0, done.stderr


ADVICE = re.compile(
    r"--([\w.]+) (\w+)(?:, with the same results| for the same step)? \(([\d.]+) ([GM]iB)\)"
)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        pytest.param(
            RuntimeError(
                "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
            ),
            marks=pytest.mark.slow,
        ),
        MemoryError("Unable to allocate 3.7 TiB for an array"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_every_kind_of_failed_allocation_is_told(error, tmp_path, monkeypatch, capsys):
    def fails(self, batch, batch_idx):
        raise error

    monkeypatch.setattr("lit_probattn.tasks.SequenceClassifier.training_step", fails)
    line = error_of(arguments("fit", tmp_path), capsys)
    assert "out of memory on cpu in training at step 0" in line
    assert "--trainer.accumulate_grad_batches 2 for the same step (0." in line


def test_in_validation_the_batch_of_validation_is_named(tmp_path, monkeypatch, capsys):
    def fails(self, batch, batch_idx):
        raise MemoryError

    monkeypatch.setattr("lit_probattn.tasks.SequenceClassifier.validation_step", fails)
    line = error_of(arguments("fit", tmp_path), capsys)
    assert "in validation: a micro-batch of 8 samples of size 48" in line
    assert "--data.init_args.eval_batch_size 4, with the same results" in line


def test_before_the_first_batch(tmp_path, monkeypatch, capsys):
    def fails(self):
        raise MemoryError

    monkeypatch.setattr("lit_probattn.tasks.SequenceClassifier.configure_optimizers", fails)
    line = error_of(arguments("fit", tmp_path), capsys)
    assert "before the first batch: weights, gradients and AdamW's state of" in line


def test_other_errors_are_not_taken_for_it():
    assert not is_out_of_memory(RuntimeError("shape mismatch"))
    assert not is_out_of_memory(ValueError("out of memory"))
    assert "lower data.init_args.batch_size" in told_out_of_memory(MemoryError("x"))
