"""What a kernel is compiled again for: not for other counts of heads, samples or tokens.

And that kernels of today compile: the rest is in `test_compile_table.py`.
"""

from __future__ import annotations

import json
import os
import sys
from itertools import product

import pytest
import torch
import triton
from triton.runtime.jit import compute_cache_key

from lit_probattn.attention import FiSHAttention, LinearAttention, MGKAttention, SoftmaxAttention
from lit_probattn.kernels.runtime import Launched, recording
from profiling.kernels.cases import Case
from profiling.kernels.compile import SHARED_LIMIT, compiling_for
from profiling.kernels.parity import heads_and_gradients, make_inputs
from tests.profiling.kernels.test_compile_table import MOST_SPILLED
from tests.support.forks import Forked
from tests.support.fresh import fresh_python

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="other tests compile kernels on a GPU"
)
CASES = {
    "softmax": Case("", SoftmaxAttention, {}, ("causal", "dropout")),
    "mgk": Case("", MGKAttention, {"variance": "paper_main"}, ("key",)),
    "smgk": Case("", MGKAttention, {"shifted_keys": True}, ("causal",)),
    "fish": Case("", FiSHAttention, {"num_global_heads": 2}, ("causal",)),
    "linear": Case("", LinearAttention, {}, ("causal",)),
}
SIZES = ((8, 64), (12, 72), (8, 65), (16, 59))  # heads and tokens


def end_interpreting() -> None:
    """Make the kernels, and Triton's functions that they call, ones that Triton compiles."""
    from triton.runtime.interpreter import InterpretedFunction

    known: dict[int, triton.JITFunction] = {}
    for name, module in list(sys.modules.items()):
        if name.startswith(("lit_probattn.kernels", "triton.language")):
            for key, value in list(vars(module).items()):
                if isinstance(value, InterpretedFunction):
                    if id(value) not in known:
                        known[id(value)] = triton.JITFunction(value.fn, **value.kwargs)
                    setattr(module, key, known[id(value)])


def specialisation(launched: Launched) -> str:
    """Return the key of a launch in Triton's cache, without compiling it."""
    assert isinstance(launched.kernel, triton.JITFunction)
    with compiling_for(90):
        cache = launched.kernel.device_caches[90]
        _, found, options = cache[-1](*launched.args, **launched.options)
    return str(compute_cache_key({}, found, options))


def print_keys() -> int:
    """Print the first sizes of every key under which Triton keeps what it compiled, by kernel."""
    end_interpreting()
    found: dict[str, dict[str, tuple[int, int]]] = {}
    for (name, case), (heads, length) in product(CASES.items(), SIZES):
        layer = case.layer(64, head_dim=64, **{**case.options, "num_heads": heads})
        inputs = make_inputs(layer, case, length, length, torch.bfloat16, seed=0, clear=False)
        with recording() as launches:
            heads_and_gradients(layer, "triton", inputs, torch.bfloat16)
        for launched in launches:
            keys = found.setdefault(f"{name}: {launched.kernel.__name__}", {})
            keys.setdefault(specialisation(launched), (heads, length))
    print(json.dumps({kernel: list(keys.values()) for kernel, keys in found.items()}))
    return 0


def test_other_counts_of_heads_and_tokens_compile_nothing_again(tmp_path):
    """A call may launch a kernel in several forms, but all of them with the first sizes.

    And once more with the first length that 8 does not divide. In a forked process, where no
    kernel is interpreted any more.
    """
    status = Forked(print_keys, os.environ, tmp_path / "log").wait()
    text = (tmp_path / "log").read_text(encoding="utf-8")
    assert status == 0, text
    found = json.loads(text.splitlines()[-1])
    assert {kernel.split(":")[0] for kernel in found} == set(CASES)
    known = [[*SIZES[0]], [*SIZES[2]]]
    again = {kernel: new for kernel, new in found.items() if any(x not in known for x in new)}
    assert again == {}


# Runs in a separate process, where kernels are not interpreted. Operators import Dynamo only to
# mark what is not traced; the import takes seconds, so Dynamo is replaced.
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
    done = fresh_python("-c", CODE, TRITON_INTERPRET=None, TRITON_CACHE_DIR=str(tmp_path))
    (compiled,) = json.loads(done.stdout.splitlines()[-1])
    assert compiled["kernel"] == "forward_kernel"
    assert compiled["spill_bytes"] <= MOST_SPILLED
    assert compiled["shared_bytes"] <= SHARED_LIMIT[90]
    assert compiled["wgmma"]
