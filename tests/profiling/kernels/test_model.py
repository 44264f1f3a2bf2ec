"""The model of costs against cases worked by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lit_probattn.attention import FiSHAttention, MGKAttention, SoftmaxAttention
from lit_probattn.attention.call import outline
from lit_probattn.kernels import selftest
from lit_probattn.kernels.runtime import Launch, forced
from profiling.kernels import model
from profiling.kernels.model import Units, Work, narrow_factor, recorded, units, work_of


def works(layer, options, head_dim, launch=None):
    """Work of the launches over pairs, by kernel."""
    if launch is None:
        passes = recorded(layer, options, head_dim)
    else:
        with forced(launch):
            passes = recorded(layer, options, head_dim)
    found = [work_of(launched) for part in passes for launched in part]
    return {work.kernel: work for work in found if work is not None}


@pytest.mark.parametrize(("columns", "factor"), [(128, 1), (64, 1), (32, 1.5), (16, 2.5), (8, 4.5)])
def test_narrow_products_take_longer(columns, factor):
    assert narrow_factor(columns) == factor


def test_units_of_a_kernel_by_hand():
    """Two products at 2.5 and one fed; three exponentials of 2 units; eight operations of 1/4."""
    work = Work("x", shared=2, columns=16, fed=1, exponentials=3, operations=8)
    assert units(work, 64) == Units(2 * 2.5 + 1, 3 * 2, 8 / 4)
    assert units(work, 128) == Units(6, 3, 1)
    # Two warps per row: all but the fed product twice.
    assert units(replace(work, repeats=2.0), 64) == Units(2 * 2 * 2.5 + 1, 12, 4)


def test_softmax_by_hand():
    """Forward S and PV; queries S, dP, dQ; keys S, dP, dK, dV: 2, 3 and 4 products."""
    found = works(SoftmaxAttention, {"num_heads": 5}, 64, Launch(64, 64, num_warps=4))
    products = {name: (x.shared, x.fed, x.exponentials) for name, x in found.items()}
    assert products == {
        "forward_kernel": (5, 5, 5),
        "grad_query_kernel": (10, 5, 5),
        "grad_key_kernel": (10, 10, 5),
    }
    forward = found["forward_kernel"]
    assert (forward.columns, forward.repeats) == (64, 1)
    # The maximum, a multiply-add that scales and subtracts it, the sum, half a conversion.
    assert forward.operations == 5 * 3.5


def test_mixtures_by_hand():
    launch = Launch(64, 32, num_warps=8)
    soft = works(MGKAttention, {"num_heads": 3, "num_components": 2}, 64, launch)
    forward = soft["forward_kernel"]
    assert (forward.shared, forward.fed, forward.exponentials) == (6, 3, 6)
    assert (forward.columns, forward.repeats) == (32, 2)  # 64 rows for 8 warps
    keys = soft["grad_key_kernel"]
    assert (keys.shared, keys.fed) == (9, 9)
    assert (keys.columns, keys.repeats) == (64, 4)  # transposed: 32 rows
    hard = works(MGKAttention, {"num_heads": 3, "e_step": "hard"}, 64, launch)
    assert hard["forward_kernel"].exponentials == 3
    shifted = works(MGKAttention, {"num_heads": 3, "shifted_keys": True}, 64, launch)
    assert shifted["forward_kernel"].shared == shifted["forward_kernel"].exponentials == 3


def test_head_groups_of_fish_compute_their_maps_again():
    """Two of eight at 64: HG = 4, so 2 groups of 2 maps; a group of two heads has 4 of them."""
    options = {"num_heads": 8, "num_global_heads": 2, "noise": "none"}
    found = works(FiSHAttention, options, 64)
    forward, query = found["fish_forward_kernel"], found["fish_query_gradient_kernel"]
    assert (forward.shared, forward.fed, forward.exponentials) == (4, 8, 8)
    assert (query.shared, query.fed) == (4 + 8, 4)


def test_ratios_are_one_for_softmax_and_below_it_for_half_the_heads():
    found = {row["attention"]: row for row in model.ratio_rows([64])}
    assert found[model.BASELINE]["both"] == "1.00 – 1.00"
    for name in ("MGK soft, 4 heads", "MGK hard, 4 heads", "sMGK, 4 heads"):
        low, high = (float(x) for x in found[name]["both"].split(" – "))
        assert 0.4 < low <= high < 1.0, found[name]


@pytest.mark.parametrize(("maps", "head_dim"), [(2, 64), (4, 128)])
def test_auto_takes_what_the_model_calls_fastest(maps, head_dim, monkeypatch):
    monkeypatch.setattr(selftest, "_results", {})
    monkeypatch.setattr(selftest, "run", lambda *args: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "pretended")
    layer = FiSHAttention(8, 8, num_global_heads=maps, noise="none", head_dim=head_dim)
    call = outline(layer.layout, 8, 4096, 4096, device="cuda", dtype=torch.bfloat16)
    assert layer.core.pick(call) == model.fastest(maps, 8, head_dim)
    monkeypatch.setattr(model, "RATES", (1.0, 1.0))  # if PyTorch's kernels never waited
    assert model.fastest(maps, 8, head_dim) == "sdpa"
