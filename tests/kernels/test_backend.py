"""How layers come to the kernels: who is chosen, who refuses, what a failed self-test does."""

from __future__ import annotations

import itertools
import sys
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from lit_probattn.attention import (
    FiSHAttention,
    MGKAttention,
    ReleasedMGKAttention,
    SoftmaxAttention,
)
from lit_probattn.attention.call import outline
from lit_probattn.kernels import runtime, selftest
from lit_probattn.kernels.runtime import launch
from lit_probattn.randomness import RandomKey
from tests.conftest import late_choice
from tests.support.slow import mostly_slow

B, N, C, E = 2, 13, 11, 7
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def on_cuda(layer, dropout=True):
    sizes = {"device": "cuda", "dtype": torch.bfloat16, "dropout": dropout}
    return outline(layer.layout, 2, 4096, 4096, **sizes)


LAYERS = {
    "softmax": lambda **options: SoftmaxAttention(C, 2, head_dim=E, **options),
    "mgk": lambda **options: MGKAttention(C, 2, head_dim=E, **options),
    "mgk-hard": lambda **options: MGKAttention(C, 2, head_dim=E, e_step="hard", **options),
    "mgk-soft": lambda **options: MGKAttention(C, 2, head_dim=E, e_step="soft", **options),
    "smgk": lambda **options: MGKAttention(C, 2, head_dim=E, shifted_keys=True, **options),
    "smgk-grouped": lambda **options: MGKAttention(
        C, 4, head_dim=E, shifted_keys=True, num_kv_heads=2, **options
    ),
    "smgk-rotary": lambda **options: MGKAttention(
        C, 2, head_dim=E, shifted_keys=True, rotary_dim=4, **options
    ),
    "smgk-rotary-after": lambda **options: MGKAttention(
        C, 2, head_dim=E, shifted_keys=True, rotary_dim=4, rotary_shift="after", **options
    ),
    "mgk-norms": lambda **options: MGKAttention(
        C, 2, head_dim=E, key_norm_weight=0.4, learn_variance=True, **options
    ),
    "mgk-dot": lambda **options: MGKAttention(
        C, 2, head_dim=E, score="dot", include_log_det=True, learn_variance=True, **options
    ),
    "smgk-norms": lambda **options: MGKAttention(
        C, 2, head_dim=E, key_norm_weight=0.4, shifted_keys=True, **options
    ),
}
# One product and several, the statistics of the M-step, norms of keys, learned variances.
FAST = ["mgk-hard", "smgk", "mgk-norms", "mgk-dot"]


@pytest.mark.parametrize("name", mostly_slow(LAYERS, FAST))
def test_layers_give_the_same_through_the_kernel(name):
    """The whole layer, training, with padding, dropout and a causal mask; setting B gathers."""
    torch.manual_seed(3)
    layer = LAYERS[name](dropout=0.3).to(DEVICE)
    x = torch.randn(B, N, C, device=DEVICE)
    mask = torch.arange(N, device=DEVICE) < torch.tensor([[N], [9]], device=DEVICE)
    found = {}
    for backend in ("reference", "triton"):
        layer.backend = backend
        layer.zero_grad()
        rng = RandomKey(5, sample_ids=torch.tensor([8, 3], device=DEVICE))
        out = layer(x, key_mask=mask, is_causal=True, rng=rng)
        out.square().sum().backward()
        grads = {n: p.grad.clone() for n, p in layer.named_parameters()}
        statistics = layer.core.prior_statistics() if isinstance(layer, MGKAttention) else None
        if statistics is not None:
            grads["statistics"] = statistics.clone()
            layer.core.apply_prior_update(torch.zeros_like(statistics))
        found[backend] = (out.detach(), grads)
    torch.testing.assert_close(found["triton"][0], found["reference"][0], atol=1e-5, rtol=1e-5)
    for key, expected in found["reference"][1].items():
        torch.testing.assert_close(found["triton"][1][key], expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", mostly_slow(["mgk", "smgk"], ["smgk"]))
def test_decoding_through_the_kernel_equals_the_whole_sequence(name):
    layer = LAYERS[name]().to(DEVICE).eval()
    layer.backend = "triton"
    x = torch.randn(B, N, C, device=DEVICE)
    whole = layer(x, is_causal=True)
    cache = layer.new_cache()
    steps = [layer(x[:, i : i + 7], is_causal=True, cache=cache) for i in range(0, N, 7)]
    torch.testing.assert_close(torch.cat(steps, 1), whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SoftmaxAttention(C, 2, head_dim=E).double(), "float64"),
        (lambda: SoftmaxAttention(C, 2, head_dim=160), "head_dim <= 128"),
        (lambda: ReleasedMGKAttention(C, 2, head_dim=E, row_eps=1e-6), "row_eps"),
    ],
)
def test_what_a_kernel_cannot_do_is_refused_with_what_would_work(make, words):
    layer = make()
    layer.backend = "triton"
    x = torch.randn(B, N, C, dtype=next(layer.parameters()).dtype)
    with pytest.raises(NotImplementedError, match=words) as error:
        layer(x)
    assert "use one of: auto" in str(error.value)
    layer.backend = "auto"
    layer(x)


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_without_a_gpu_an_explicit_kernel_says_what_is_missing(monkeypatch):
    monkeypatch.delenv(runtime.INTERPRET_VARIABLE)
    layer = MGKAttention(8, 2, head_dim=4, backend="triton")
    with pytest.raises(NotImplementedError) as caught:
        layer(torch.zeros(1, 3, 8))
    message = str(caught.value)
    assert "cannot run on the CPU" in message
    assert "TRITON_INTERPRET=1" in message
    assert "use one of: auto, reference, sdpa, " in message
    assert ", blockwise" in message
    layer.backend = "auto"
    assert layer(torch.zeros(1, 3, 8)).shape == (1, 3, 8)


def test_triton_without_its_interpreter_ends_the_run_by_one_line():
    compiled = SimpleNamespace(cdiv=len)
    message = late_choice(compiled)
    assert message.startswith("tests/conftest.py: Triton was imported before its interpreter")
    assert "set TRITON_INTERPRET=1" in message
    assert "\n" not in message
    assert late_choice(None) is None
    if not torch.cuda.is_available():
        assert late_choice(sys.modules["triton.language"]) is None


@pytest.fixture
def pretend_gpu(monkeypatch):
    """A GPU by name; self-tests run on the device that is there."""
    monkeypatch.setattr(selftest, "_results", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "pretended")
    real = selftest.run
    monkeypatch.setattr(selftest, "run", lambda f, _, dtype, sizes: real(f, DEVICE, dtype, sizes))
    calls = []
    module = type("Family", (), {})()
    monkeypatch.setattr(selftest, "import_module", lambda name: module)
    ones = torch.ones(3)

    def self_test(family, device, dtype, head_dims):
        calls.append((family, dtype, head_dims))
        return [(ones, ones), (ones * module.factor, ones)]

    module.self_test, module.factor, module.calls = self_test, 1.0, calls
    return module


def choice(layer, backend):
    layer.backend = backend
    return layer.core.pick(on_cuda(layer))


def test_auto_takes_a_kernel_that_passes_its_self_test_once_per_kind(pretend_gpu):
    layer = MGKAttention(C, 2, head_dim=E)
    assert choice(layer, "auto") == choice(layer, "auto") == choice(layer, "triton") == "triton"
    assert pretend_gpu.calls == [("mgk", torch.bfloat16, (E, E))]
    assert choice(MGKAttention(C, 2, head_dim=16, shifted_keys=True), "auto") == "triton"
    assert pretend_gpu.calls[1:] == [("smgk", torch.bfloat16, (16, 16))]


def test_auto_leaves_plain_softmax_to_pytorch_and_takes_the_kernel_for_dropout(pretend_gpu):
    layer = SoftmaxAttention(C, 2, head_dim=E)
    assert choice(layer, "auto") == "triton"
    assert layer.core.pick(on_cuda(layer, dropout=False)) == "sdpa"
    assert choice(MGKAttention(C, 2, head_dim=E, e_step="hard"), "auto") == "triton"


@pytest.mark.parametrize(
    ("options", "outlined", "expected"),
    [
        ({}, {}, "sdpa"),
        ({}, {"num_keys": 1024}, "triton"),
        ({}, {"key_mask": True}, "triton"),
        ({}, {"dtype": torch.float32}, "triton"),
        ({"num_global_heads": 4}, {}, "sdpa"),
        ({"num_global_heads": 8}, {}, "triton"),
        ({"noise": "global"}, {}, "triton"),
    ],
)
@pytest.mark.usefixtures("pretend_gpu")
def test_auto_concatenates_long_unmasked_heads_of_hard_fish(options, outlined, expected):
    """As measured: to heads of 256 at most, from about 2048 keys on."""
    options = {"num_global_heads": 2, "noise": "none", **options}
    layer = FiSHAttention(64, 8, head_dim=64, dropout=0.0, **options)
    keys = outlined.get("num_keys", 4096)
    dtype = outlined.get("dtype", torch.bfloat16)
    call = outline(layer.layout, 2, keys, keys, device="cuda", dtype=dtype)
    if "key_mask" in outlined:
        real = torch.ones(2, keys, dtype=torch.bool, device="meta")
        call = replace(call, masks=replace(call.masks, key_mask=real))
    assert layer.core.pick(call) == expected


@pytest.mark.parametrize(
    ("shape", "requires_grad", "expected"),
    [
        ((1, 8, 1, 130), True, "blockwise"),
        ((1, 8, 130, 1), True, "blockwise"),
        ((1, 8, 130, 130), True, "triton"),
        ((1, 8, 1, 130), False, "triton"),
    ],
)
@pytest.mark.usefixtures("pretend_gpu")
def test_auto_leaves_gradients_of_broadcast_biases_of_mixed_maps_to_blocks(
    shape, requires_grad, expected
):
    layer = FiSHAttention(64, 8, head_dim=64, num_global_heads=2, noise="global")
    call = outline(layer.layout, 2, 130, 130, device="cuda", dtype=torch.bfloat16)
    bias = torch.empty(shape, device="meta", requires_grad=requires_grad)
    call = replace(call, masks=replace(call.masks, bias=bias))
    assert layer.core.pick(call) == expected


@pytest.mark.parametrize("factor", [1.5, float("nan")])
def test_a_kernel_that_fails_its_self_test_is_left_out_with_one_warning(pretend_gpu, factor):
    pretend_gpu.factor = factor
    layer = MGKAttention(C, 2, head_dim=E)
    with pytest.warns(UserWarning, match="mgk: failed its self-test.*not used"):
        assert choice(layer, "auto") == "blockwise"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choice(layer, "auto") == "blockwise"
    with pytest.raises(NotImplementedError, match="failed its self-test"):
        choice(layer, "triton")


@pytest.mark.usefixtures("one_sample")
@pytest.mark.parametrize(
    "family", mostly_slow(["dense/softmax", "dense/mgk", "dense/smgk"], ["dense/softmax"])
)
def test_self_tests_pass_here_and_see_a_wrong_kernel(family, monkeypatch):
    """In inference mode, as in Lightning's sanity check: the first call decides for the process."""
    from lit_probattn.kernels.dense import selftest as dense_selftest

    by_terms = family == "dense/softmax"
    compared = dense_selftest.compare if by_terms else dense_selftest.compare_points
    monkeypatch.setattr(compared, "__defaults__", ((21, 35), *compared.__defaults__[1:]))
    with torch.inference_mode():
        assert selftest.run(family, DEVICE, torch.float32, (8, 8)) is None
        assert torch.is_inference_mode_enabled()
    plain = "plain_attention" if by_terms else "plain_points"
    monkeypatch.setattr(dense_selftest, plain, _scaled(getattr(dense_selftest, plain)))
    assert "relative error" in selftest.run(family, DEVICE, torch.float32, (8, 8))


def test_rounding_selects_no_other_component_in_the_hard_self_test():
    """Kernels round keys after a translation: near a tie, the gradient would go elsewhere."""
    from lit_probattn.kernels.dense.selftest import without_ties

    like = {"device": DEVICE, "dtype": torch.bfloat16}
    drawn = (
        selftest.random_tensor(2, 4, 149, 64, seed=10, **like),
        selftest.random_tensor(2, 4, 2, 167, 64, seed=11, **like),
    )
    found = {}
    for name, (query, key) in {"drawn": drawn, "separated": without_ties(*drawn)}.items():
        centre = key[:, :, 0].double().mean(2, keepdim=True)
        moved = [x.double() - c for x, c in ((query, centre), (key, centre[:, :, None]))]
        chosen = [
            torch.cdist(q[:, :, None], k).argmin(2)
            for q, k in (moved, [x.bfloat16().double() for x in moved])
        ]
        found[name] = int((chosen[0] != chosen[1]).sum())
        assert 0.4 < chosen[0].double().mean() < 0.6
    assert found["drawn"] > 0
    assert found["separated"] == 0


WITHOUT = {
    "the mask of keys": lambda x: x._replace(key_mask=None),
    "the mask of pairs": lambda x: x._replace(pair_mask=None),
    "causal masks": lambda x: x._replace(is_causal=False),
    "dropout": lambda x: x._replace(draw=None),
    "whose key is whose": lambda x: x._replace(key=x.key.flip(1)),
}


@pytest.mark.usefixtures("one_sample")
@pytest.mark.parametrize("lost", mostly_slow(WITHOUT, ["the mask of pairs"]))
def test_self_tests_see_what_a_kernel_ignores(lost, monkeypatch):
    from lit_probattn.kernels.dense import selftest as dense_selftest

    def careless(*args):
        return real(*WITHOUT[lost](dense_selftest.MixtureInputs(*args)))

    real = dense_selftest.mixture_attention
    monkeypatch.setattr(dense_selftest.compare, "__defaults__", ((21, 35),))
    monkeypatch.setattr(dense_selftest, "mixture_attention", careless)
    message = selftest.run("dense/softmax", DEVICE, torch.float32, (8, 5))
    assert "with heads of 8 and 5: relative error" in message


@pytest.mark.usefixtures("one_sample")
@pytest.mark.parametrize(
    ("name", "lost"),
    mostly_slow(
        itertools.product(["fish", "gfish"], ["key_mask", "pair_mask", "draw"]),
        [("fish", "draw")],
    ),
)
def test_self_tests_of_fish_see_what_a_kernel_ignores(name, lost, monkeypatch):
    from lit_probattn.kernels.fish import selftest as fish_selftest

    real = fish_selftest.fish_attention
    monkeypatch.setattr(
        fish_selftest, "fish_attention", lambda *args, **rest: real(*args, **{**rest, lost: None})
    )
    monkeypatch.setattr(fish_selftest.self_test, "__defaults__", ((17, 21),))
    message = selftest.run(f"fish/{name}", DEVICE, torch.float32, (8, 5))
    assert "with heads of 8 and 5: relative error" in message


def test_self_tests_are_kept_per_size_of_query_and_value_heads(pretend_gpu):
    choice(MGKAttention(C, 2, head_dim=E), "auto")
    choice(MGKAttention(C, 2, head_dim=E, value_head_dim=5), "auto")
    assert [sizes for *_, sizes in pretend_gpu.calls] == [(E, E), (E, 5)]


def _scaled(function):
    return lambda *args: function(*args) * 1.001


def test_a_kernel_that_raises_has_failed(monkeypatch):
    from lit_probattn.kernels.dense import selftest as dense_selftest

    def broken(*args):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(dense_selftest, "mixture_attention", broken)
    message = selftest.run("dense/softmax", DEVICE, torch.float32, (8, 8))
    assert "RuntimeError: no such instruction" in message


def test_launching_on_a_wrong_tensor_is_refused():
    with pytest.raises(ValueError, match="cannot compute in float64"):
        launch(None, 1, (torch.zeros(3, dtype=torch.float64),), {})
