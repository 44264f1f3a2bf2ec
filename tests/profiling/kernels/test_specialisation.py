"""What a kernel is compiled again for: not for other counts of heads, samples or tokens.

And that kernels of today compile: the rest is in `test_compile_table.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from profiling.kernels.compile import SHARED_LIMIT
from tests.profiling.kernels.test_compile_table import MOST_SPILLED
from tests.support.paths import ROOT

# In a process of its own, where kernels are not interpreted: the keys under which Triton's launcher
# keeps what it compiled, by kernel, for a call of one size and for others; and a compiled kernel.
# Dynamo, which every operator imports for seconds only to mark what is not traced, is replaced.
CODE = """
import json, sys, torch
from types import ModuleType
torch._dynamo = sys.modules["torch._dynamo"] = ModuleType("torch._dynamo")
torch._dynamo.disable = lambda function, *_, **__: function
from dataclasses import asdict
from itertools import product
from lit_probattn.attention import FiSHAttention, LinearAttention, MGKAttention, SoftmaxAttention
from lit_probattn.kernels.runtime import recording
from profiling.kernels.cases import Case
from profiling.kernels.compile import compile_rows, specialisation
from profiling.kernels.parity import heads_and_gradients, make_inputs

LAYERS = {
    "softmax": Case("", SoftmaxAttention, {}, ("causal", "dropout")),
    "mgk": Case("", MGKAttention, {"variance": "paper_main"}, ("key",)),
    "smgk": Case("", MGKAttention, {"shifted_keys": True}, ("causal",)),
    "fish": Case("", FiSHAttention, {"num_global_heads": 2}, ("causal",)),
    "linear": Case("", LinearAttention, {}, ("causal",)),
}
found = {}
for (name, case), (heads, length) in product(LAYERS.items(), json.loads(sys.argv[1])):
    layer = case.layer(64, head_dim=64, **{**case.options, "num_heads": heads})
    inputs = make_inputs(layer, case, length, length, torch.bfloat16, seed=0, clear=False)
    with recording() as launches:
        heads_and_gradients(layer, "triton", inputs, torch.bfloat16)
    for launched in launches:
        key = specialisation(launched, 90)
        kernel = f"{name}: {launched.kernel.__name__}"
        found.setdefault(kernel, {}).setdefault(key, (heads, length))
rows = compile_rows([LAYERS["smgk"]], [16], [90], forward_only=True)
(compiled,) = (asdict(row) for row in rows if row.kernel == "forward_kernel")
print(json.dumps(compiled))
print(json.dumps({kernel: list(keys.values()) for kernel, keys in found.items()}))
"""


@pytest.mark.timeout(600)
def test_other_counts_of_heads_and_tokens_compile_nothing_again(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(CODE)
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)}
    sizes = [[8, 64], [12, 72], [8, 65], [16, 59]]
    done = subprocess.run(
        [sys.executable, script, json.dumps(sizes)],
        **{"env": environment, "cwd": ROOT},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    compiled, found = map(json.loads, done.stdout.splitlines()[-2:])
    assert compiled["spill_bytes"] <= MOST_SPILLED
    assert compiled["shared_bytes"] <= SHARED_LIMIT[90]
    assert compiled["wgmma"]
    assert {kernel.split(":")[0] for kernel in found} == {
        "softmax",
        "mgk",
        "smgk",
        "fish",
        "linear",
    }
    # A call may launch a kernel in several forms, but all of them with the first sizes; and once
    # more with the first length that 8 does not divide.
    known = [sizes[0], sizes[2]]
    again = {kernel: new for kernel, new in found.items() if any(x not in known for x in new)}
    assert again == {}
