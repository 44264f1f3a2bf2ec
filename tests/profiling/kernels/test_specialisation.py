"""What a kernel is compiled again for: not for other counts of heads, samples or tokens.

And that kernels of today compile: the rest is in `test_compile_table.py`.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from itertools import product

import pytest
import torch
import triton

from lit_probattn.attention import FiSHAttention, LinearAttention, MGKAttention, SoftmaxAttention
from lit_probattn.kernels.runtime import recording
from profiling.kernels.cases import Case
from profiling.kernels.compile import SHARED_LIMIT, compile_rows, specialisation
from profiling.kernels.parity import heads_and_gradients, make_inputs
from tests.profiling.kernels.test_compile_table import MOST_SPILLED
from tests.support.forks import Forked

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


def print_keys_and_a_compiled_kernel() -> int:
    """Print the first sizes of every key by kernel, and the row of a kernel that is compiled."""
    end_interpreting()
    found: dict[str, dict[str, tuple[int, int]]] = {}
    for (name, case), (heads, length) in product(CASES.items(), SIZES):
        layer = case.layer(64, head_dim=64, **{**case.options, "num_heads": heads})
        inputs = make_inputs(layer, case, length, length, torch.bfloat16, seed=0, clear=False)
        with recording() as launches:
            heads_and_gradients(layer, "triton", inputs, torch.bfloat16)
        for launched in launches:
            keys = found.setdefault(f"{name}: {launched.kernel.__name__}", {})
            keys.setdefault(specialisation(launched, 90), (heads, length))
    print(json.dumps({kernel: list(keys.values()) for kernel, keys in found.items()}))
    rows = compile_rows([CASES["smgk"]], [16], [90], forward_only=True)
    print(json.dumps([asdict(row) for row in rows if row.kernel == "forward_kernel"]))
    return 0


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """The keys under which Triton keeps what it compiled, and the compiled kernel.

    Of a forked process: no kernel is interpreted there any more.
    """
    folder = tmp_path_factory.mktemp("triton")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(folder / "cache")}
    log = folder / "log"
    status = Forked(print_keys_and_a_compiled_kernel, environment, log).wait()
    text = log.read_text(encoding="utf-8")
    assert status == 0, text
    return [json.loads(line) for line in text.splitlines()[-2:]]


def test_other_counts_of_heads_and_tokens_compile_nothing_again(printed):
    """A call may launch a kernel in several forms, but all of them with the first sizes.

    And once more with the first length that 8 does not divide.
    """
    found = printed[0]
    assert {kernel.split(":")[0] for kernel in found} == set(CASES)
    known = [[*SIZES[0]], [*SIZES[2]]]
    again = {kernel: new for kernel, new in found.items() if any(x not in known for x in new)}
    assert again == {}


def test_a_forward_kernel_compiles(printed):
    (compiled,) = printed[1]
    assert compiled["spill_bytes"] <= MOST_SPILLED
    assert compiled["shared_bytes"] <= SHARED_LIMIT[90]
    assert compiled["wgmma"]
