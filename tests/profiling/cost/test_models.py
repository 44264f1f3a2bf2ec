"""Counts beside closed forms: every variant, backend and mode; published sizes and ratios."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from torch import nn

from lit_probattn.attention import MGKAttention, SoftmaxAttention
from lit_probattn.attention.backends import recorded_choices
from lit_probattn.measure.counters import (
    torch_flops,
    torch_flops_by_module,
    torch_macs,
    torch_train_macs,
)
from lit_probattn.randomness import RandomKey
from profiling.cost.models import LanguageModel
from profiling.sweep.config import SweepConfig
from profiling.sweep.count import attention_layers, require_identical
from profiling.sweep.models import build_model, make_inputs, make_step
from profiling.sweep.plan import make_plan
from profiling.sweep.points import measure_point
from tests.profiling.helpers import count_by_torch_alone
from tests.support.paths import ROOT
from tests.support.slow import mostly_slow

SOFTMAX = "lit_probattn.attention.SoftmaxAttention"
MGK = "lit_probattn.attention.MGKAttention"
LINEAR = "lit_probattn.attention.LinearAttention"
MLK = "lit_probattn.attention.MLKAttention"
FISH = "lit_probattn.attention.FiSHAttention"
LFISH = "lit_probattn.attention.LinearFiSHAttention"
GFISH = {"num_global_heads": 2, "mixer": "mlp", "mixing_bias": "all"}

HEAD = 15  # PyTorch's kernel pads it to 16 on a CPU; with further coordinates it is larger
VARIANTS = {
    "softmax": (SOFTMAX, {}),
    "gaussian": (SOFTMAX, {"score": "gaussian"}),
    "grouped": (SOFTMAX, {"num_kv_heads": 1}),
    "mgk": (MGK, {}),
    "mgk_three": (MGK, {"num_components": 3}),
    "mgk_unequal": (MGK, {"variance": "paper_main"}),
    "mgk_learned_variance": (MGK, {"learn_variance": True}),
    "mgk_dot": (MGK, {"score": "dot"}),
    "mgk_layer_prior": (MGK, {"prior_share": "layer"}),
    "mgk_position_prior": (MGK, {"prior_share": "head_position", "max_positions": 64}),
    "smgk": (MGK, {"shifted_keys": True}),
    "soft_e": (MGK, {"e_step": "soft"}),
    "hard_e": (MGK, {"e_step": "hard"}),
    "multi_query": (MGK, {"num_kv_heads": 1}),
    "rotary": (MGK, {"shifted_keys": True, "rotary_dim": 4}),
}


# What is counted with a backend every time.
FEW = {
    **{"reference": "mgk_three", "sdpa": "grouped", "blockwise": "hard_e"},
    **{"native": "smgk", "auto": "rotary"},
}


def points(variants, backend, mode, **model):
    spec = {"kind": "attention", "head_dim": HEAD, **model}
    config = SweepConfig.model_validate(
        {
            "name": "t",
            "model": spec,
            "variants": {
                name: {"attention": {"class_path": path, "init_args": {"num_heads": 4, **args}}}
                for name, (path, args) in variants.items()
            },
            "grid": {"embed_dim": [24], "seq_len": [40], "batch_size": [2], "mode": [mode]}
            | {"backend": [backend]},
        }
    )
    return make_plan(config, ROOT)


@pytest.mark.parametrize(
    ("backend", "mode"),
    mostly_slow(
        itertools.product(FEW, ["eval", "train"]),
        [
            *[("reference", "train"), ("sdpa", "train"), ("blockwise", "eval")],
            *[("native", "train"), ("auto", "eval")],
        ],
    ),
)
@pytest.mark.parametrize("share", ["one", pytest.param("all", marks=pytest.mark.slow)])
def test_counts_equal_closed_forms(backend, mode, share):
    """Both counters, both modes: equal to the unit, not only within the tolerance."""
    chosen = [FEW[backend]]
    if share == "all":
        chosen = [name for name in VARIANTS if (backend, name) != ("sdpa", "hard_e")]
    for point in points({name: VARIANTS[name] for name in chosen}, backend, mode):
        rows = {row.source: row for row in measure_point(point)}
        measured, exact = rows["measured"], rows["analytic"]
        assert measured.status == "ok", (point.label, measured.reason)
        assert measured.macs == exact.macs, point.label
        assert measured.num_parameters == exact.num_parameters, point.label
        assert measured.backend_note is not None


@pytest.mark.parametrize(
    ("backend", "mode"),
    mostly_slow(
        itertools.product(["reference", "blockwise"], ["eval", "train"]),
        [("reference", "eval"), ("blockwise", "train")],
    ),
)
def test_linear_family_equals_what_it_states(backend, mode):
    variants = {"smlk": (MLK, {"shifted_keys": True}), "linear": (LINEAR, {}), "mlk": (MLK, {})}
    if backend == "reference":  # it states nothing of any of them
        del variants["smlk"], variants["mlk"]
    for point in points(variants, backend, mode):
        rows = {row.source: row for row in measure_point(point)}
        assert rows["measured"].status == "ok", rows["measured"].reason
        if backend == "blockwise":
            assert rows["measured"].macs == rows["analytic"].macs
        else:
            assert rows["analytic"].macs is None
            assert "no closed form" in str(rows["analytic"].reason)


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("variant", ["smgk", "fish"])
def test_auto_is_counted_as_it_runs(variant, mode):
    """On a CPU; on meta tensors it would select PyTorch's attention for FiSH."""
    kind = VARIANTS["smgk"] if variant == "smgk" else (FISH, {"num_global_heads": 2})
    (point,) = points({"it": kind}, "auto", mode)
    measured, exact = measure_point(point)
    model = build_model(point)
    inputs = make_inputs(point, "cpu")
    count = torch_train_macs if mode == "train" else torch_macs
    assert measured.macs == exact.macs == count(model, inputs).products
    *_, ran = recorded_choices().values()
    assert measured.backend_note.startswith(f"auto ({ran}): ")


def test_a_measured_step_runs_the_counted_products():
    """In training with the gradient of the inputs."""
    for mode in ("eval", "train"):
        (point,) = points({"mgk": VARIANTS["mgk"]}, "reference", mode)
        step, _ = make_step(point, torch.device("cpu"))
        assert torch_flops(step) == 2 * measure_point(point)[0].macs


class LearnedBias(SoftmaxAttention):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.offset = nn.Parameter(torch.zeros(1, self.num_heads, 1, 1))

    def forward(self, query, **kwargs):
        num_tokens = query.shape[1]
        return super().forward(query, bias=self.offset.expand(-1, -1, num_tokens, num_tokens))

    def cost(self, seq_len):
        raise NotImplementedError


def test_auto_is_counted_with_the_gradient_of_a_bias():
    """PyTorch's attention, which evaluation selects, does not give it."""
    kind = f"{__name__}.LearnedBias", {}
    (point,) = points({"it": kind}, "auto", "train")
    (measured, *_) = measure_point(point)
    count = torch_train_macs(build_model(point), make_inputs(point, "cpu"))
    assert measured.macs == count.products, measured.reason
    assert "native" in measured.backend_note


def test_random_features_have_one_product_per_query_and_key():
    """The divisor of the keys is computed from the same products as their features."""
    favor = {"favor": (LINEAR, {"feature_map": "favor"})}
    normalised = {"normalised": (LINEAR, {"feature_map": "favor", "feature_norm": "sum"})}
    mixture = {"mixture": (MLK, {"feature_map": "favor"})}
    for mode in ("eval", "train"):
        for point in points({**favor, **normalised, **mixture}, "blockwise", mode):
            rows = {row.source: row for row in measure_point(point)}
            assert rows["measured"].status == "ok", rows["measured"].reason
            assert rows["measured"].macs == rows["analytic"].macs, point.label


def test_noise_is_counted_with_the_selected_backend():
    """Draws have no products, also where they are one operator."""
    for cls in (FISH, LFISH):
        noisy, quiet = (
            measure_point(
                *points({"it": (cls, {"num_global_heads": 2, "noise": noise})}, "auto", "train")
            )[0]
            for noise in ("global", "none")
        )
        assert noisy.status == "ok", noisy.reason
        assert quiet.macs <= noisy.macs <= 2 * quiet.macs


SIZES = {"mlp_dim": 20, "vocab_size": 50}
IN_MODELS = {"mgk": (MGK, {}), "softmax": (SOFTMAX, {}), "gfish": (FISH, GFISH)}


def model_point(kind, mode, variant, backend="reference", **more):
    classes = {"num_classes": 4} if kind.endswith("classifier") else {}
    sizes = {"kind": kind, "num_layers": 3, **SIZES, **classes, **more}
    (point,) = points({variant: IN_MODELS[variant]}, backend, mode, **sizes)
    return point


@functools.cache
def rows_of_model(kind, mode, variant, backend):
    """The rows of a model by scope and source, which several tests ask for."""
    rows = measure_point(model_point(kind, mode, variant, backend))
    return {(row.scope, row.source): row for row in rows}


@pytest.mark.parametrize(
    ("kind", "mode", "variant"),
    mostly_slow(
        itertools.product(
            ["classifier", "pair_classifier", "language_model", "encoder_decoder"],
            ["eval", "train"],
            IN_MODELS,
        ),
        [
            ("classifier", "train", "gfish"),
            ("encoder_decoder", "eval", "softmax"),
            ("language_model", "eval", "mgk"),
        ],
    ),
)
def test_models_equal_closed_forms(kind, mode, variant):
    by = rows_of_model(kind, mode, variant, "reference")
    assert [row.status for row in by.values()] == ["ok"] * 6
    for scope in ("attention", "layers", "model"):
        measured, exact = by[scope, "measured"], by[scope, "analytic"]
        assert measured.macs == exact.macs
        assert measured.num_parameters == exact.num_parameters
        assert measured.fvcore_operations == exact.fvcore_operations
    whole = by["model", "measured"]
    assert whole.num_parameters_non_embedding == (
        by["model", "analytic"].num_parameters_non_embedding
    )


@pytest.mark.parametrize(
    "kind", mostly_slow(["language_model", "encoder_decoder"], ["language_model"])
)
def test_multiplying_one_block_equals_counting_all(kind):
    point = model_point(kind, "eval", "mgk")
    with torch.device("meta"):
        model = build_model(point)
    model.is_causal = False
    counted = torch_macs(model, make_inputs(point, "meta")).products
    assert rows_of_model(kind, "eval", "mgk", "reference")["model", "measured"].macs == counted


@pytest.mark.parametrize("backend", mostly_slow(["reference", "blockwise"], ["reference"]))
def test_all_three_attentions_of_an_encoder_decoder_are_counted(backend):
    """By module, and by hand: two self-attentions and a cross-attention of pairs N x N."""
    point = model_point("encoder_decoder", "eval", "softmax", backend)
    with torch.device("meta"):
        model = build_model(point)
        model.is_causal = False
        inputs = make_inputs(point, "meta")
        with torch.no_grad():
            counts = torch_flops_by_module(model, lambda: model(inputs))
    calls, n, c, width = 2, 40, 24, 4 * HEAD
    by_hand = calls * (4 * n * c * width + 2 * n * n * width)
    layers = {name: m for name, m in model.named_modules() if isinstance(m, SoftmaxAttention)}
    assert len(layers) == 9
    assert {name: counts[name] // 2 for name in layers} == dict.fromkeys(layers, by_hand)
    by = rows_of_model("encoder_decoder", "eval", "softmax", backend)
    assert by["attention", "measured"].macs == 9 * by_hand
    assert by["layers", "measured"].macs == 9 * by_hand + 6 * calls * 2 * n * c * 20
    assert by["model", "measured"].macs == by["layers", "measured"].macs + calls * n * c * 50


def test_a_causal_encoder_decoder_is_that_of_translation():
    """What is timed masks the future of the target; what is counted leaves the mask out."""
    point = model_point("encoder_decoder", "eval", "softmax", num_layers=1, is_causal=True)
    model = build_model(point)
    inputs = make_inputs(point, "cpu")
    source, target = inputs.unbind(1)
    expected = model.model.logits(model.model(source, target, rng=RandomKey(0)))
    torch.testing.assert_close(model(inputs), expected)
    model.is_causal = False
    assert (model(inputs) - expected)[:, 0].abs().max() > 1e-3


def test_unlike_blocks_are_refused():
    blocks = nn.ModuleList([nn.Linear(2, 3), nn.Linear(2, 3), nn.Linear(2, 4)])
    with pytest.raises(ValueError, match="block 2 differs"):
        require_identical(blocks)
    require_identical(blocks[:2])


def test_the_language_model_has_the_published_words():
    """Other published sizes: tests/models/test_language_model.py."""
    attention = functools.partial(SoftmaxAttention, num_heads=8, bias=False)
    with torch.device("meta"):
        model = LanguageModel(attention, embed_dim=128, head_dim=16, max_seq_len=256)
    assert sum(p.numel() for p in model.parameters()) == 44_018_394


@pytest.mark.parametrize(
    ("width", "length"),
    mostly_slow(itertools.product([256, 4096], [128, 8192]), [(256, 128)]),
)
def test_published_ratios_of_figure_3(width, length, monkeypatch):
    """Layers only, which are alike, with d_inner 2048."""
    count_by_torch_alone(monkeypatch)
    expected = {(256, 128): 0.917, (256, 8192): 0.792, (4096, 128): 0.701, (4096, 8192): 0.722}
    config = SweepConfig.model_validate(
        {
            "name": "t",
            "model": {"kind": "language_model", "head_dim_divisor": 8, "mlp_dim": 2048}
            | {"num_layers": 1, "vocab_size": 50},
            "variants": {
                name: {
                    "attention": {
                        "class_path": path,
                        "init_args": {"num_heads": heads, "bias": False},
                    }
                }
                for name, path, heads in (("softmax", SOFTMAX, 8), ("mgk", MGK, 4))
            },
            "grid": {"embed_dim": [width], "seq_len": [length]},
        }
    )
    softmax, mgk = (
        next(r.macs for r in measure_point(point) if (r.scope, r.source) == ("layers", "measured"))
        for point in make_plan(config, ROOT)
    )
    assert mgk / softmax == pytest.approx(expected[width, length], abs=5e-4)


@pytest.mark.parametrize(
    ("k", "shifted"), [(1, False), (2, False), (3, False), (2, True), (3, True)]
)
def test_terms_lead_from_macs_to_the_papers_count(k, shifted):
    n, h, e, c = 32, 3, 8, 40
    layer = (
        SoftmaxAttention(c, h, head_dim=e, bias=False)
        if k == 1
        else MGKAttention(c, h, head_dim=e, bias=False, num_components=k, shifted_keys=shifted)
    )
    cost = layer.cost(n)
    terms = cost.terms
    assert terms[0].operations == 2 * cost.macs
    totals = [t.operations for t in terms if t.is_total]
    assert totals[1] == cost.paper_flops
    assert totals[-1] == (cost.paper_flops_printed or cost.paper_flops)
    assert sum(t.operations for t in terms if not t.is_total) == totals[-1] - totals[0]


def test_attention_layers_in_order():
    model = nn.Sequential(
        SoftmaxAttention(8, 1, head_dim=4), nn.Linear(8, 8), MGKAttention(8, 1, head_dim=4)
    )
    assert [type(m) for m in attention_layers(model)] == [SoftmaxAttention, MGKAttention]
