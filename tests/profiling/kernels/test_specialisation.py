"""What a kernel is compiled again for: not for other counts of heads, samples or tokens.

And that kernels of today compile: the rest is in `test_compile_table.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton

from lit_probattn.attention import FiSHAttention, LinearAttention, MGKAttention, SoftmaxAttention
from lit_probattn.kernels.runtime import Launched, recording
from profiling.kernels.cases import Case
from profiling.kernels.compile import SHARED_LIMIT, specialisation
from profiling.kernels.parity import heads_and_gradients, make_inputs
from tests.profiling.kernels.test_compile_table import MOST_SPILLED
from tests.support.paths import ROOT

CASES = {
    "softmax": Case("", SoftmaxAttention, {}, ("causal", "dropout")),
    "mgk": Case("", MGKAttention, {"variance": "paper_main"}, ("key",)),
    "smgk": Case("", MGKAttention, {"shifted_keys": True}, ("causal",)),
    "fish": Case("", FiSHAttention, {"num_global_heads": 2}, ("causal",)),
    "linear": Case("", LinearAttention, {}, ("causal",)),
}


def as_compiled(launched: Launched, known: dict[Any, triton.JITFunction]) -> Launched:
    """Return a launch whose kernel is one that Triton would compile, also in the interpreter."""
    kernel = launched.kernel
    if isinstance(kernel, triton.JITFunction):
        return launched
    if kernel not in known:
        known[kernel] = triton.JITFunction(kernel.fn, **kernel.kwargs)
    return replace(launched, kernel=known[kernel])


@pytest.mark.usefixtures("kernels_on_cpu")
@pytest.mark.parametrize("name", CASES)
def test_other_counts_of_heads_and_tokens_compile_nothing_again(name):
    """The keys under which Triton keeps what it compiled, for a call of one size and for others.

    A call may launch a kernel in several forms, but all of them with the first sizes; and once more
    with the first length that 8 does not divide.
    """
    case, known, found = CASES[name], {}, {}
    for heads, length in ((8, 64), (12, 72), (8, 65), (16, 59)):
        layer = case.layer(64, head_dim=64, **{**case.options, "num_heads": heads})
        inputs = make_inputs(layer, case, length, length, torch.bfloat16, seed=0, clear=False)
        with recording() as launches:
            heads_and_gradients(layer, "triton", inputs, torch.bfloat16)
        assert launches
        for launched in launches:
            key = specialisation(as_compiled(launched, known), 90)
            found.setdefault((launched.kernel.__name__, key), (heads, length))
    assert set(found.values()) <= {(8, 64), (8, 65)}


# In a process of its own, where kernels are not interpreted. Dynamo, which every operator imports
# for seconds only to mark what is not traced, is replaced.
CODE = """
import json, sys, torch
from types import ModuleType
torch._dynamo = sys.modules["torch._dynamo"] = ModuleType("torch._dynamo")
torch._dynamo.disable = lambda function, *_, **__: function
from dataclasses import asdict
from lit_probattn.attention import SoftmaxAttention
from profiling.kernels.cases import Case
from profiling.kernels.compile import compile_rows

rows = compile_rows([Case("", SoftmaxAttention, {}, ("causal",))], [16], [90], forward_only=True)
print(json.dumps([asdict(row) for row in rows]))
"""


@pytest.mark.timeout(600)
def test_the_forward_kernel_compiles(tmp_path):
    """Of softmax, which has the least to compile; all others are in slow tests."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        **{"env": environment, "cwd": ROOT},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (compiled,) = json.loads(done.stdout.splitlines()[-1])
    assert compiled["kernel"] == "forward_kernel"
    assert compiled["spill_bytes"] <= MOST_SPILLED
    assert compiled["shared_bytes"] <= SHARED_LIMIT[90]
    assert compiled["wgmma"]
