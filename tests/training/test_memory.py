"""Out of memory: one line that says what to lower, and `ask` at the sizes of the model."""

from __future__ import annotations

import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lit_probattn.attention import MGKAttention, SoftmaxAttention
from lit_probattn.commands.ask.command import main as ask
from lit_probattn.training.memory import (
    MemoryAdvice,
    describe,
    is_out_of_memory,
    out_of_memory_line,
)
from tests.support.paths import ROOT
from tests.support.runs import arguments, write_attention
from tests.tasks.tiny import LENGTH, data, task, trainer

# Long sequences, so that the N x N maps of the reference are what does not fit.
LONG = (
    *("--data.init_args.num_train", "16", "--data.init_args.num_val", "2"),
    *("--data.init_args.min_length", "1000", "--data.init_args.max_length", "1024"),
    *("--trainer.max_steps", "1", "--trainer.val_check_interval", "4"),
    *("--model.init_args.warmup_steps", "0", "--trainer.num_sanity_val_steps", "0"),
)

LIMITED = """
import resource, sys
import lit_probattn.measure.memory  # loaded before the limit, as a GPU would find it
from lit_probattn.cli.app import main
with open("/proc/self/status") as file:
    used = next(int(line.split()[1]) for line in file if line.startswith("VmData"))
limit = used * 1024 + int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
sys.exit(main(sys.argv[2:]))
"""


def limited(command, extra_bytes):
    """Run a command in a new process that may allocate so many more bytes; return its end."""
    words = [sys.executable, "-c", LIMITED, str(extra_bytes), *command]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
@pytest.mark.slow
def test_a_real_limit_is_one_line(tmp_path):
    reference = write_attention(tmp_path, "SoftmaxAttention", backend="reference")
    done = limited(arguments("fit", tmp_path, *LONG, attention=reference), 1 << 28)
    assert done.returncode == 2
    (line,) = [text for text in done.stderr.splitlines() if text.startswith("error: ")]
    assert "out of memory on cpu in training at step 0: a micro-batch of 8 samples" in line


ERRORS = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    MemoryError("Unable to allocate 3.7 TiB for an array"),
)


def line_of(layer, batch) -> str:
    """The line about a training step with this layer."""
    trainer: Any = SimpleNamespace(
        strategy=SimpleNamespace(root_device="cpu"),
        state=SimpleNamespace(stage="train"),
        training=True,
        global_step=4,
        accumulate_grad_batches=1,
    )
    return describe(trainer, layer, batch)


@pytest.mark.parametrize(
    ("layer", "heads"),
    [
        (SoftmaxAttention(16, 2), "2"),
        (MGKAttention(16, 2, head_dim=4), "4"),  # half as many as softmax attention
        (SoftmaxAttention(16, 2, head_dim=4), "4"),
        (SoftmaxAttention(16, 8, head_dim=8), None),  # heads wider together than the layer
        (SoftmaxAttention(16, 2, head_dim=3), None),
    ],
)
def test_ask_is_named_for_the_head_size_of_the_layer_or_not_at_all(layer, heads):
    """Its softmax heads have size E = C / H."""
    batch = {"inputs": torch.zeros(3, 20, dtype=torch.int64), "sample_ids": torch.arange(3)}
    line = line_of(layer, batch)
    found = re.search(r"ask --embed_dim 16 --num_heads (\d+) --seq_len 20 --batch 3$", line)
    assert (found and found[1]) == heads
    assert ("lit-probattn ask" in line) is (heads is not None)


def test_packed_samples_are_named_with_the_length_of_the_longest():
    batch = {
        "inputs": torch.zeros(1, 20, dtype=torch.int64),
        "sample_ids": torch.arange(3),
        "cu_seqlens": torch.tensor([0, 5, 17, 20], dtype=torch.int32),
    }
    line = line_of(SoftmaxAttention(16, 2), batch)
    assert "at step 4: a micro-batch of 3 samples packed into 20 tokens" in line
    assert line.endswith("--seq_len 12 --batch 3")


def advice(module) -> str:
    """The line about a training that runs out of memory."""
    run = trainer(1, val_check_interval=1, callbacks=[MemoryAdvice()])
    with pytest.raises(MemoryError) as told:
        run.fit(module, data(min_length=LENGTH, eval_batch_size=5))
    return out_of_memory_line(told.value)


def fails(*_):
    raise MemoryError


def test_a_failed_allocation_is_told():
    """That commands have the advice: test_peers.py."""
    module = task()
    module.training_step = fails
    line = advice(module)
    assert "in training at step 0: a micro-batch of 8 samples of size 23" in line
    assert "--trainer.accumulate_grad_batches 2" in line
    assert "--data.init_args.batch_size" in line
    command = re.search(r"lit-probattn ask (.*--seq_len 23 --batch 8)$", line)[1]
    assert ask([*command.split(), "--attention", "softmax"]) == 0


def test_in_validation_the_batch_of_validation_is_named():
    module = task()
    module.validation_step = fails
    line = advice(module)
    assert "in validation: a micro-batch of 5 samples of size 23;" in line
    assert "--data.init_args.eval_batch_size, with the same results" in line


def test_before_the_first_batch():
    module = task()
    module.configure_optimizers = fails
    assert re.search(r"before the first batch: lower the model's [\d,]+ parameters", advice(module))


def test_every_kind_of_failed_allocation_is_known_and_no_other_error():
    assert all(is_out_of_memory(error) for error in ERRORS)
    assert not is_out_of_memory(RuntimeError("shape mismatch"))
    assert not is_out_of_memory(ValueError("out of memory"))
    assert "lower data.init_args.batch_size" in out_of_memory_line(MemoryError("x"))
