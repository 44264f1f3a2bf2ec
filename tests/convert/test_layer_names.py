"""State dicts of layers elsewhere in ours: outputs, and gradients of inputs and of every weight."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import elu, linear

from lit_probattn.attention import (
    LinearAttention,
    ReleasedMGKAttention,
    SoftmaxAttention,
)
from lit_probattn.attention.own.contract import backends_for
from lit_probattn.base.config_files import run_stem
from lit_probattn.base.errors import ConfigError
from lit_probattn.configs import attention_entry, class_of
from lit_probattn.convert.layer_names import LAYOUTS, layer_state, load_layer
from lit_probattn.randomness import RandomKey, normal_noise
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
from tests.support.paths import shipped

B, N, C, E, H = 2, 7, 12, 3, 4
CLOSE = {"rtol": 1e-10, "atol": 1e-11}
PRESETS = {run_stem(path): path for path in shipped("attention")}
AS_RELEASED = {name for name, path in PRESETS.items() if "as_released" in path.parts}
# Constant over the keys of a row, or left out by sMGK in translation.
WITHOUT_GRADIENT = {"core.mixing.last_bias", "key_proj.bias", "value_proj.bias"}

LRA, LM, LINEAR_LM = LongRangeArena, LanguageModel, LinearLanguageModel
FISH_LM, WINDOWS = FiSHLanguageModel, FiSHWindows
# Layout, their module and our preset.
CASES = [
    ("lra", partial(LRA, "softmax"), "softmax"),
    ("lra", partial(LRA, "linear"), "code_lra_linear"),
    ("lra_mgk", partial(LRA, "softmax", "key2"), "code_lra_mgk"),
    ("lra_mgk", partial(LRA, "softmax", "key2", em="soft"), "code_lra_mgk_soft_e"),
    ("lra_mgk", partial(LRA, "softmax", "key2", em="hard"), "code_lra_mgk_hard_e"),
    ("lra_mgk", partial(LRA, "linear", "key2"), "code_lra_mlk"),
    ("lra_smgk", partial(LRA, "softmax", "multi_gauss"), "code_lra_smgk"),
    ("lra_smgk", partial(LRA, "softmax", "multi_gauss", em="soft"), "code_lra_smgk_soft_e"),
    ("lra_smgk", partial(LRA, "softmax", "multi_gauss", em="hard"), "code_lra_smgk_hard_e"),
    ("lra_smlk", partial(LRA, "linear", "multi_gauss"), "code_lra_smlk"),
    ("lm", partial(LM, "softmax"), "softmax"),
    ("lm_mgk", partial(LM, "rbf2keys"), "code_lm_intended_mgk"),
    ("lm_mgk", partial(LM, "soft2keys"), "code_lm_intended_mgk_soft_e"),
    ("lm_mgk", partial(LM, "hard2keys"), "code_lm_intended_mgk_hard_e"),
    ("lm_smgk", partial(LM, "rbf"), "code_lm_intended_smgk"),
    ("lm_smgk", partial(LM, "soft"), "code_lm_intended_smgk_soft_e"),
    ("lm_smgk", partial(LM, "hard"), "code_lm_as_released_mgk"),
    ("lm_linear", partial(LINEAR_LM, ""), "code_lm_linear"),
    ("lm_mlk", partial(LINEAR_LM, "rbf2keys"), "code_lm_intended_mlk"),
    ("lm_mlk", partial(LINEAR_LM, "rbf2keys"), "code_lm_as_released_mlk"),
    ("lm_mlk", partial(LINEAR_LM, "rbf2keys", scale_w=2.0), "code_lm_intended_mlk_scaled"),
    ("lm_smlk", partial(LINEAR_LM, "rbf"), "code_lm_intended_smlk"),
    ("translation_mgk", partial(Translation, False), "translation_mgk"),
    ("translation_smgk", partial(Translation, True), "translation_smgk"),
    ("fish_lm", FISH_LM, "lm_hard_gfish"),
    ("fish_lm", partial(FISH_LM, scales=2), "lm_gfish"),
    ("fish_lm", partial(FISH_LM, layers=1, bias=False), "lm_hard_fish"),
    ("fish_lm", partial(FISH_LM, layers=1, bias=False, scales=2), "lm_fish"),
    ("fish_lm_mish", FiSHMixture, "lm_mish"),
    ("fish_translation", partial(FiSHTranslation, "q"), "translation_gfish_query"),
    ("fish_translation", partial(FiSHTranslation, "k"), "translation_gfish_key"),
    ("fish_translation", partial(FiSHTranslation, "qk"), "translation_hard_gfish"),
    ("fish_translation", partial(FiSHTranslation, "gqk"), "translation_gfish"),
    ("fish_swin", partial(WINDOWS, "q"), "swin_query"),
    ("fish_swin", partial(WINDOWS, "k"), "swin_key"),
    ("fish_swin", partial(WINDOWS, "qk"), "swin_hard_gfish"),
    ("fish_swin_linear", partial(WINDOWS, "qk", layers=1), "swin_affine"),
    ("fish_swin_linear", partial(WINDOWS, "qk", layers=1, bias=False), "swin_hard_fish"),
]
# What the modules leave out: the draws of the mixture (tests/attention/fish/test_as_released.py).
CHANGES = {"lm_mish": {"noise": "none", "noise_at_eval": False, "sigma_shape": "per_global"}}


def make(preset, **options):
    """Return the layer of a preset, on small sizes in float64."""
    entry = attention_entry(PRESETS[preset])
    given = {**entry["init_args"], "num_heads": H, **CHANGES.get(preset, {}), **options}
    if "max_positions" in given:
        given["max_positions"] = N
    return class_of(entry["class_path"])(C, head_dim=E, **given).double().eval()


# Priors of the code, which clamps them to [0, 1] or, in translation, magnitudes to [1e-6, 2]. None
# is a bound, where the gradient of `clamp` is 1 in PyTorch 2.11 and 0 in 2.15.
RAW = torch.tensor([0.4, 1.3, 2.7, -1e-9, 3e-7, -1.9, -2.4, 0.7])


def randomised(module):
    with torch.no_grad():
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            tensor.normal_(std=0.6)
            if name.split(".")[-1].startswith("pi"):
                tensor.uniform_(0.2, 0.8)
                if isinstance(tensor, nn.Parameter):
                    tensor.view(-1)[: len(RAW)] = RAW[: tensor.numel()]
    return module


def compare(layout, theirs, ours, call, ours_call, *given):
    """Load, compare outputs, then gradients: of inputs, and theirs, by names, against ours."""
    state = {k: v.detach().clone() for k, v in theirs.state_dict().items()}
    load_layer(layout, state, ours)
    expected, found = call(*given), ours_call(*given)
    torch.testing.assert_close(found, expected, **CLOSE)
    weight = torch.randn_like(found)
    learned = {k: p for k, p in theirs.named_parameters(remove_duplicate=False) if k in state}
    mine = dict(ours.named_parameters())
    wanted, got = (
        torch.autograd.grad((out * weight).sum(), [*given, *leaves], materialize_grads=True)
        for out, leaves in ((expected, learned.values()), (found, mine.values()))
    )
    gradients = {**state, **dict(zip(learned, wanted[len(given) :], strict=True))}
    named = layer_state(layout, gradients, ours)
    for name, gradient in zip((*range(len(given)), *mine), got, strict=True):
        other = wanted[name] if isinstance(name, int) else named[name]
        torch.testing.assert_close(gradient, other, **CLOSE, msg=lambda m, n=name: f"{n}: {m}")
        assert other.abs().max() > 1e-9 or name in WITHOUT_GRADIENT, "zeros compare with nothing"


def draw():
    """Return tokens, a mask with padding at the end, and the pairs that are visible with it."""
    x, mask = torch.randn(B, N, C, dtype=torch.float64), torch.ones(B, N, dtype=torch.bool)
    mask[1, 5:] = False
    return (1.5 * x).requires_grad_(), mask, mask[:, None, None].double().expand(B, 1, N, N)


@pytest.mark.parametrize(("layout", "module", "preset"), CASES)
def test_presets_compute_what_the_released_modules_do(layout, module, preset):
    """On every backend, with padding; causally in language models and decoders."""
    torch.manual_seed(3)
    theirs = randomised(module(C, H, E, N).double())
    ours = make(preset, **({"bias": False} if layout == "lm" else {}))
    x, mask, visible = draw()
    rng, bias = RandomKey(5, step=3), {}
    if getattr(theirs, "sigma_noise", None) is not None:
        sizes = B, 2, range(N), range(N), x.device
        theirs.draw = normal_noise(RandomKey(5), *sizes, torch.float64)
    if layout.startswith("fish_swin"):
        bias = {"bias": torch.randn(1, H, N, N, dtype=torch.float64)}
    in_encoders, in_decoders = "lm" not in layout, not layout.startswith(("lra", "fish_swin"))
    for is_causal in (*[False] * in_encoders, *[True] * in_decoders):
        call = {"key_mask": mask, "is_causal": is_causal, "rng": rng, **bias}
        allowed = visible.tril() if is_causal else visible
        backends = backends_for(ours, x, **call)
        assert {*backends} >= {"reference", "blockwise"} or getattr(ours.core, "row_eps", 0.0)
        for backend in backends:
            ours.backend = backend
            compare(
                *(layout, theirs, ours),
                *(partial(theirs, visible=allowed, **bias), partial(ours, **call), x),
            )
        if hasattr(theirs, "maps"):  # for analysis, whatever the denominator
            torch.testing.assert_close(ours.weights(x, **call), theirs.maps, **CLOSE)


@pytest.mark.parametrize("shifted", [False, True])
def test_presets_of_translation_read_a_memory_as_the_released_modules(shifted):
    name = f"translation_{'s' * shifted}mgk"
    theirs, ours = randomised(Translation(shifted, C, H, E, N).double()), make(name)
    x, memory = (torch.randn(B, n, C, dtype=torch.float64, requires_grad=True) for n in (5, N))
    _, mask, visible = draw()
    compare(
        *(name, theirs, ours),
        lambda x, memory: theirs(x, visible[:, :, :5], memory),
        lambda x, memory: ours(x, memory, key_mask=mask),
        *(x, memory),
    )


def test_every_layout_and_every_preset_of_released_code_is_tested():
    others = {"torch", "timm", "bert", "roberta", "gpt2"}
    assert set(LAYOUTS) == others | {layout for layout, *_ in CASES}
    assert {preset for *_, preset in CASES} == AS_RELEASED | {"softmax"}


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
    ours = ReleasedMGKAttention(C, H, **{"head_dim": E, "prior_share": "layer", **layer})
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
