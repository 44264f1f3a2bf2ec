"""State dicts of layers elsewhere in ours: outputs, and gradients of inputs and of every weight."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import elu, linear

from lit_probattn.attention import (
    FiSHAttention,
    LinearAttention,
    MGKAttention,
    ReleasedLinearAttention,
    ReleasedMGKAttention,
    ReleasedMLKAttention,
    SoftmaxAttention,
)
from lit_probattn.base.errors import ConfigError
from lit_probattn.convert.layer_names import LAYOUTS, layer_state, load_layer
from tests.convert.released_modules import (
    FiSHLanguageModel,
    FiSHMixture,
    FiSHTranslation,
    FiSHWindows,
    LanguageModel,
    LinearLanguageModel,
    LongRangeArena,
    Translation,
)

B, N, C, E, H = 2, 7, 12, 3, 4
CLOSE = {"rtol": 1e-10, "atol": 1e-11}
RELEASED = {"prior_share": "head_position", "max_positions": N, "prior_floor": 1e-30}
LM = {"bias": False, "variance": "code_lm"}
LINEAR = {"feature_norm": "sum", "eps": 1e-5, "output_scale": "inv_sqrt_head_dim", "bias": False}
LRA = {"prior_share": "layer", "prior_floor": 1e-30}
SUMS = {"row_eps": 1e-6}
SHIFTS = {"shifted_keys": True}
HARD = {"num_global_heads": 2, "noise": "none"}
TWO = {**HARD, "mixer": "mlp", "mixing_bias": "all"}

# Layout, their module, our class and options, masked causally.
CASES = {
    "lra": ("lra", partial(LongRangeArena, "softmax"), SoftmaxAttention, {}, False),
    "lra linear": (
        *("lra", partial(LongRangeArena, "linear"), ReleasedLinearAttention),
        *({"denominator": "sqrt_len"}, False),
    ),
    "lra mgk": (
        *("lra_mgk", partial(LongRangeArena, "softmax", "key2"), ReleasedMGKAttention),
        *(LRA, False),
    ),
    "lra mgk, M-step": (
        *("lra_mgk", partial(LongRangeArena, "softmax", "key2", em="soft"), ReleasedMGKAttention),
        *({**RELEASED, "e_step": "soft", "em_code_parity": "lra"}, False),
    ),
    "lra mgk, hard": (
        *("lra_mgk", partial(LongRangeArena, "softmax", "key2", em="hard"), MGKAttention),
        *({"e_step": "hard"}, False),
    ),
    "lra mlk": (
        *("lra_mgk", partial(LongRangeArena, "linear", "key2"), ReleasedMLKAttention),
        *({"mix": "before", "prior_share": "layer", "denominator": "sqrt_len"}, False),
    ),
    "lra smgk": (
        *("lra_smgk", partial(LongRangeArena, "softmax", "multi_gauss"), ReleasedMGKAttention),
        *({**LRA, **SHIFTS}, False),
    ),
    "lra smlk": (
        *("lra_smlk", partial(LongRangeArena, "linear", "multi_gauss"), ReleasedMLKAttention),
        *({"mix": "before", "prior_share": "layer", "denominator": "sqrt_len", **SHIFTS}, False),
    ),
    "lm": ("lm", partial(LanguageModel, "softmax"), SoftmaxAttention, {"bias": False}, True),
    "lm mgk": (
        *("lm_mgk", partial(LanguageModel, "rbf2keys"), ReleasedMGKAttention),
        *({**LM, **RELEASED, **SUMS}, True),
    ),
    "lm mgk, hard": (
        *("lm_mgk", partial(LanguageModel, "hard2keys"), ReleasedMGKAttention),
        *({**LM, "e_step": "hard"}, True),
    ),
    "lm smgk": (
        *("lm_smgk", partial(LanguageModel, "rbf"), ReleasedMGKAttention),
        *({**LM, **RELEASED, **SUMS, **SHIFTS}, True),
    ),
    "lm smgk, M-step": (
        *("lm_smgk", partial(LanguageModel, "soft"), ReleasedMGKAttention),
        *({**LM, **RELEASED, **SUMS, **SHIFTS, "e_step": "soft", "em_code_parity": "lm"}, True),
    ),
    "lm linear": (
        *("lm_linear", partial(LinearLanguageModel, ""), ReleasedLinearAttention),
        *(LINEAR, True),
    ),
    "lm mlk": (
        *("lm_mlk", partial(LinearLanguageModel, "rbf2keys"), ReleasedMLKAttention),
        *({**LINEAR, "prior_share": "head_position", "max_positions": N}, True),
    ),
    "lm mlk, scaled": (
        *("lm_mlk", partial(LinearLanguageModel, "rbf2keys", scale_w=1.7), ReleasedMLKAttention),
        *(
            {**LINEAR, "prior_share": "head_position", "max_positions": N, "second_scale": 1.7},
            True,
        ),
    ),
    "lm smlk": (
        *("lm_smlk", partial(LinearLanguageModel, "rbf"), ReleasedMLKAttention),
        *({**LINEAR, "prior_share": "head_position", "max_positions": N, **SHIFTS}, True),
    ),
    "translation mgk": (
        *("translation_mgk", partial(Translation, False), ReleasedMGKAttention),
        *({"variance": "code_lm", "magnitude_prior": True, **SUMS}, True),
    ),
    "translation smgk": (
        *("translation_smgk", partial(Translation, True), ReleasedMGKAttention),
        *(
            {"variance": "code_lm", "magnitude_prior": True, "value_bias": "cross", **SUMS}
            | SHIFTS,
            True,
        ),
    ),
    "fish lm": ("fish_lm", FiSHLanguageModel, FiSHAttention, {**TWO, "bias": False}, True),
    "fish lm, mixture": (
        *("fish_lm_mish", FiSHMixture, FiSHAttention),
        *({**HARD, "mixer": "shared", "bias": False}, True),
    ),
    **{
        f"fish translation {mode}": (
            *("fish_translation", partial(FiSHTranslation, mode), FiSHAttention),
            *({**TWO, **options}, True),
        )
        for mode, options in {
            "q": {"mix_on": "query"},
            "k": {"mix_on": "key"},
            "qk": {"scale_position": "before"},
        }.items()
    },
    **{
        f"fish windows {mode}, {count} layers": (
            *("fish_swin" if count == 2 else "fish_swin_linear",),
            *(partial(FiSHWindows, mode, count), FiSHAttention),
            *(
                {
                    **(TWO if count == 2 else {**HARD, "mixing_bias": "all"}),
                    **options,
                },
                False,
            ),
        )
        for mode, options in {
            "q": {"mix_on": "query"},
            "k": {"mix_on": "key"},
            "qk": {"scale_position": "before"},
        }.items()
        for count in (1, 2)
    },
}


def randomised(module):
    with torch.no_grad():
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            tensor.normal_(std=0.6)
            if name.split(".")[-1].startswith("pi"):
                tensor.uniform_(0.2, 0.8)
    return module


def compare(layout, theirs, ours, call, ours_call, x):
    """Load, compare outputs, then gradients: of x, and theirs, by names, against ours."""
    state = {k: v.detach().clone() for k, v in theirs.state_dict().items()}
    load_layer(layout, state, ours)
    expected, found = call(x), ours_call(x)
    torch.testing.assert_close(found, expected, **CLOSE)
    weight = torch.randn_like(found)
    learned = {k: p for k, p in theirs.named_parameters(remove_duplicate=False) if k in state}
    wanted = torch.autograd.grad(
        (expected * weight).sum(), [x, *learned.values()], materialize_grads=True
    )
    mine = dict(ours.named_parameters())
    got = torch.autograd.grad((found * weight).sum(), [x, *mine.values()], materialize_grads=True)
    torch.testing.assert_close(got[0], wanted[0], **CLOSE)
    gradients = {**state, **dict(zip(learned, wanted[1:], strict=True))}
    named = layer_state(layout, gradients, ours)
    for name, gradient in zip(mine, got[1:], strict=True):
        torch.testing.assert_close(
            gradient, named[name], **CLOSE, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("name", CASES)
def test_released_modules(name):
    layout, make, cls, options, causal = CASES[name]
    torch.manual_seed(3)
    theirs = randomised(make(C, H, E, N).double())
    ours = cls(C, H, head_dim=E, **options).double().eval()
    x = torch.randn(B, N, C, dtype=torch.float64, requires_grad=True)
    compare(layout, theirs, ours, theirs, partial(ours, is_causal=causal), x)


@pytest.mark.parametrize("bias", [True, False])
def test_torch(bias):
    theirs = randomised(nn.MultiheadAttention(C, H, bias=bias, batch_first=True).double())
    ours = SoftmaxAttention(C, H, bias=bias).double()
    x = torch.randn(B, N, C, dtype=torch.float64, requires_grad=True)
    compare("torch", theirs, ours, lambda x: theirs(x, x, x)[0], ours, x)


def test_torch_with_keys_of_another_width():
    theirs = nn.MultiheadAttention(C, H, kdim=5, vdim=5, batch_first=True).double()
    randomised(theirs)
    ours = SoftmaxAttention(C, H, key_embed_dim=5).double()
    x = torch.randn(B, N, C, dtype=torch.float64, requires_grad=True)
    memory = torch.randn(B, 6, 5, dtype=torch.float64)
    compare(
        *("torch", theirs, ours, lambda x: theirs(x, memory, memory)[0]),
        *(lambda x: ours(x, memory), x),
    )


def test_timm():
    attention = pytest.importorskip("timm.layers.attention")
    theirs = randomised(attention.Attention(C, num_heads=H, qkv_bias=True).double())
    ours = SoftmaxAttention(C, H).double()
    x = torch.randn(B, N, C, dtype=torch.float64, requires_grad=True)
    compare("timm", theirs, ours, theirs, ours, x)


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_bert_and_roberta(family):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": C, "num_attention_heads": H, "num_hidden_layers": 1}
    sizes |= {"intermediate_size": 8, "vocab_size": 9, "hidden_dropout_prob": 0.0}
    name = family.capitalize()
    config = getattr(transformers, f"{name}Config")(**sizes, attention_probs_dropout_prob=0.0)
    model = getattr(transformers, f"{name}Model")(config).double().eval()
    theirs = randomised(model.encoder.layer[0].attention)
    ours = SoftmaxAttention(C, H).double()

    def alone(x):  # without the residual path and its norm
        inner = theirs.self(x)[0]
        return theirs.output.dense(inner)

    x = torch.randn(B, N, C, dtype=torch.float64, requires_grad=True)
    compare(family, theirs, ours, alone, ours, x)


def test_gpt2():
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": C, "n_head": H, "n_layer": 1, "n_positions": N, "vocab_size": 9}
    off = {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
    config = transformers.GPT2Config(**sizes, **off, attn_implementation="sdpa")
    theirs = transformers.GPT2Model(config).double().eval().h[0].attn
    randomised(theirs)
    ours = SoftmaxAttention(C, H).double()
    x = torch.randn(B, N, C, dtype=torch.float64, requires_grad=True)
    compare("gpt2", theirs, ours, lambda x: theirs(x)[0], partial(ours, is_causal=True), x)


def test_every_layout_is_tested():
    others = {"torch", "timm", "bert", "roberta", "gpt2"}
    assert set(LAYOUTS) == others | {layout for layout, *_ in CASES.values()}


@pytest.mark.parametrize(
    ("layout", "change", "layer", "message"),
    [
        ("lra_mkg", {}, {}, "unknown layout 'lra_mkg'; did you mean 'lra_mgk'"),
        ("lra_mgk", {"attn.pi": None}, {}, "missing: attn.pi"),
        ("lra_mgk", {"W_k3.weight": 1}, {}, "unexpected: W_k3.weight"),
        ("lra_mgk", {}, {"head_dim": 5}, r"for query_proj.weight, received \(12, 12\)"),
        (
            "lra_mgk",
            {},
            {"prior_share": "head"},
            r"attn.pi: .* for core.prior.value, received \(2,\)",
        ),
        ("lra", {}, {}, "layout lra .* has no source for core.prior.value of ReleasedMGKAttention"),
    ],
)
def test_what_does_not_fit_is_named(layout, change, layer, message):
    state = LongRangeArena("softmax", "key2", C, H, E, N).state_dict()
    for name, value in change.items():
        state.pop(name) if value is None else state.update({name: torch.ones(2)})
    ours = ReleasedMGKAttention(C, H, **{"head_dim": E, **LRA, **layer})
    with pytest.raises(ConfigError, match=message):
        load_layer(layout, state, ours)


def test_a_joint_projection_of_other_heads_is_named():
    state = nn.MultiheadAttention(C, H).state_dict()
    with pytest.raises(ConfigError, match=r"has 36 rows, expected 12 \+ 6 \+ 6"):
        load_layer("torch", state, SoftmaxAttention(C, H, num_kv_heads=2))


def test_plain_linear_attention_takes_the_names_too():
    theirs = randomised(LongRangeArena("softmax", "", C, H, E, N).double())
    ours = LinearAttention(C, H, head_dim=E).double()
    load_layer("lra", theirs.state_dict(), ours)
    x = torch.randn(B, N, C, dtype=torch.float64)
    q, k, v = (
        linear(x, p.weight, p.bias).unflatten(-1, (H, E)).transpose(1, 2)
        for p in (theirs.W_q, theirs.W_k, theirs.W_v)
    )
    kernel = (elu(q) + 1) @ (elu(k) + 1).mT
    out = (kernel / kernel.sum(-1, keepdim=True) @ v).transpose(1, 2).flatten(2)
    torch.testing.assert_close(ours(x), theirs.ff(out), **CLOSE)


def test_scales_of_noise_are_the_roots_that_the_code_squares():
    theirs = FiSHLanguageModel(C, H, E, N).double()
    state = {**theirs.state_dict(), "sigma_noise": torch.tensor([0.3, 0.7], dtype=torch.float64)}
    options = {"num_global_heads": 2, "mixer": "mlp", "mixing_bias": "all", "bias": False}
    ours = FiSHAttention(C, H, head_dim=E, **options).double()
    load_layer("fish_lm", state, ours)
    expected = torch.tensor([0.09, 0.49], dtype=torch.float64)
    torch.testing.assert_close(ours.core.noise_scale(), expected)
