"""Hosts of every kind with small random weights, and what a swap of each must keep.

    python -m tests.interop.swap.table [NAME…] [-COLUMN…]

prints a row for each: how heads are handed over, and the largest difference, or what was refused;
and writes them into the table in docs/swap.md.
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lit_probattn
from tests.support.paths import ROOT

os.environ.setdefault("HF_HUB_OFFLINE", "1")


# ---- hosts ---------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Host:
    """A model in float32, evaluated, and how it is called.

    Args:
        model: the model.
        example: what `swap` runs.
        output: returns one tensor of a model.
        prompt: token ids for `generate`. None means it cannot.
        options: of `swap`.
        refused: what a refusal must say; empty if it is swapped.
    """

    model: nn.Module
    example: Any
    output: Callable[[nn.Module], Tensor]
    prompt: Tensor | None = None
    options: dict[str, Any] = field(default_factory=dict)
    refused: str = ""


SIZES = {
    **{"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48},
    **{"num_attention_heads": 4, "max_position_embeddings": 64},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
WINDOWS = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}


def words(left: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 60, (2, 9), generator=generator)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, :3] = 0
    if not left:
        mask = mask.flip(1)
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


def encoder(kind: str, **options: Any) -> Host:
    """An encoder of transformers that fills in words, padded on the right."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **options})
    model = getattr(transformers, f"{kind}ForMaskedLM")(config).eval()
    given = words(left=False)
    real = given["attention_mask"].bool()
    return Host(model, given, lambda m: m(**given).logits[real])


def writer(kind: str, more: dict[str, Any] | None = None, **options: Any) -> Host:
    """A decoder of transformers that writes, padded on the left."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(**options)
    named = {"Gemma3Text": "Gemma3ForCausalLM", "GPT2": "GPT2LMHeadModel"}
    model = getattr(transformers, named.get(kind, f"{kind}ForCausalLM"))(config).eval()
    given = words(left=True)
    real = given["attention_mask"].bool()
    prompt = given["input_ids"][:, 3:]
    return Host(model, given, lambda m: m(**given).logits[real], prompt, **(more or {}))


def translator(kind: str, **options: Any) -> Host:
    """An encoder and a decoder of transformers."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(**options)
    return with_memory(getattr(transformers, f"{kind}ForConditionalGeneration")(config))


def with_memory(model: nn.Module) -> Host:
    # Fewer words than are remembered, none of them padding.
    given = {**words(left=False), "decoder_input_ids": words(left=True)["input_ids"][:, 3:]}
    prompt = given["input_ids"]
    return Host(model.eval(), given, lambda m: m(**given).logits, prompt)


def pictures(side: int, seed: int = 0) -> Tensor:
    return torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(seed))


def seeing(kind: str, side: int = 16, **options: Any) -> Host:
    import transformers

    config = getattr(transformers, f"{kind}Config")(image_size=side, patch_size=4, **options)
    model = getattr(transformers, f"{kind}Model")(config).eval()
    given = {"pixel_values": pictures(side)}
    return Host(model, given, lambda m: m(**given).last_hidden_state)


def both(kind: str) -> Host:
    """Text and pictures."""
    import transformers

    text = {k: v for k, v in SIZES.items() if k != "max_position_embeddings"}
    vision = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    vision |= {"intermediate_size": 48, "image_size": 16, "patch_size": 4}
    config = getattr(transformers, f"{kind}Config")(
        text_config={**text, "max_position_embeddings": 9, "projection_dim": 16},
        vision_config={**vision, "projection_dim": 16},
    )
    model = getattr(transformers, f"{kind}Model")(config).eval()
    given = {**words(left=False), "pixel_values": pictures(16)}

    def output(m: nn.Module) -> Tensor:
        out = m(**given)
        return torch.cat([out.text_embeds, out.image_embeds])

    return Host(model, given, output)


def whisper() -> Host:
    import transformers

    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 64}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    widths = {"encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_mel_bins": 8}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    places = {"max_source_positions": 10, "max_target_positions": 32}
    config = transformers.WhisperConfig(**sizes, **heads, **widths, **ids, **places)
    model = transformers.WhisperForConditionalGeneration(config).eval()
    sound = torch.randn(2, 8, 20, generator=torch.Generator().manual_seed(0))
    given = {"input_features": sound, "decoder_input_ids": words(left=True)["input_ids"]}
    return Host(model, given, lambda m: m(**given).logits)


def wav2vec2() -> Host:
    import transformers

    sizes = {k: v for k, v in SIZES.items() if k != "max_position_embeddings"}
    convolutions = {"conv_dim": (16,), "conv_stride": (5,), "conv_kernel": (10,)}
    places = {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2}
    config = transformers.Wav2Vec2Config(**sizes, **convolutions, **places)
    model = transformers.Wav2Vec2Model(config).eval()
    sound = torch.randn(2, 100, generator=torch.Generator().manual_seed(0))
    return Host(model, sound, lambda m: m(sound).last_hidden_state)


def timm_host(
    name: str, side: int, refused: str = "", keep: tuple[str, ...] = (), **options: Any
) -> Host:
    import timm

    sizes = {"img_size": side, "num_classes": 5, **options}
    model = timm.create_model(name, **sizes).eval()
    image = pictures(side)
    more = {"keep": keep} if keep else {}
    return Host(model, image, lambda m: m(image), options=more, refused=refused)


class SelfAndCross(nn.Module):
    """`nn.MultiheadAttention` of one sequence, and of two with other widths."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.MultiheadAttention(32, 4, batch_first=True)
        self.other = nn.MultiheadAttention(32, 4, kdim=11, vdim=13)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = x + self.own(x, x, x, need_weights=False)[0]
        rows, memory = x.transpose(0, 1), memory.transpose(0, 1)
        return self.other(rows, memory, torch.cat([memory, memory[..., :2]], -1))[0]


class TwoCalls(nn.Module):
    """Attends twice in one forward, the second time with another scale."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 96), nn.Linear(32, 96)
        self.out = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        for linear, scale in ((self.first, None), (self.second, 0.2)):
            q, k, v = linear(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
            heads = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
            x = x + self.out(heads.transpose(1, 2).flatten(2))
        return x


class Windows(nn.Module):
    """Heads with five dimensions: windows between the batch and the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            self.qkv(x.unflatten(1, (3, 4))).unflatten(-1, (3, 4, 8)).permute(3, 0, 1, 4, 2, 5)
        )
        heads = F.scaled_dot_product_attention(q, k, v)
        return self.out(heads.transpose(2, 3).flatten(3)).flatten(1, 2)


class HeadsAsBatch(Windows):
    """Heads before the positions, in one dimension with the batch."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4).flatten(1, 2)
        heads = F.scaled_dot_product_attention(q, k, v)
        return self.out(heads.unflatten(0, (-1, 4)).transpose(1, 2).flatten(2))


class Repeating(TwoCalls):
    """A checkpoint inside of the forward that attends."""

    def attend(self, x: Tensor) -> Tensor:
        return super().forward(x)

    def forward(self, x: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        return checkpoint(self.attend, x, use_reentrant=False)


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def by_hand(kind: type[nn.Module], refused: str = "") -> Host:
    x = tokens(2, 12, 32)
    return Host(nn.Sequential(kind(), nn.ReLU(), kind()).eval(), x, lambda m: m(x), refused=refused)


def self_and_cross() -> Host:
    given = tokens(2, 7, 32), tokens(2, 5, 11)
    return Host(SelfAndCross().eval(), given, lambda m: m(*given))


def transformer() -> Host:
    model = nn.Transformer(32, 4, 2, 2, 48, dropout=0.1, batch_first=True).eval()
    given = tokens(2, 7, 32), tokens(2, 5, 32, seed=1)
    hidden = torch.arange(7)[None] >= torch.tensor([[7], [4]])
    causal = nn.Transformer.generate_square_subsequent_mask(5)
    options = {"tgt_mask": causal, "tgt_is_causal": True}
    masks = {"src_key_padding_mask": hidden, "memory_key_padding_mask": hidden}
    return Host(
        model, lambda m: m(*given, **options, **masks), lambda m: m(*given, **options, **masks)
    )


def encoder_of_torch() -> Host:
    layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2).eval(), tokens(2, 7, 32)
    return Host(model, x, lambda m: m(x))


T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
T5 |= {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 2}
BART = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 64}
BART |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 64}
BART |= {"encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "decoder_start_token_id": 1}
BART |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "forced_eos_token_id": None}
FALCON = {k: v for k, v in SIZES.items() if k != "intermediate_size"}
STAGES = {"embed_dim": 16, "depths": (1, 2, 1, 1), "num_heads": (2, 2, 4, 4)}
VIT = {"num_heads": 4, "embed_dim": 32, "depth": 2}
HF_VIT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
HF_VIT |= {"intermediate_size": 48}
WRITTEN = {"options": {"written_out": True}}

HOSTS: dict[str, Callable[[], Host]] = {
    "BERT": lambda: encoder("Bert"),
    "RoBERTa": lambda: encoder("Roberta"),
    "XLM-RoBERTa": lambda: encoder("XLMRoberta"),
    "ModernBERT": lambda: encoder("ModernBert", local_attention=4, cls_token_id=1, sep_token_id=2),
    "DistilBERT": lambda: encoder("DistilBert", dim=32, n_layers=2, n_heads=4, hidden_dim=48),
    "ELECTRA": lambda: encoder("Electra", embedding_size=32),
    "ALBERT": lambda: encoder("Albert", embedding_size=16, num_hidden_groups=1),
    "DeBERTa-v2": lambda: _with(
        encoder("DebertaV2", relative_attention=True, pos_att_type=["c2p", "p2c"]), WRITTEN
    ),
    "Whisper": whisper,
    "wav2vec 2": wav2vec2,
    "CLIP": lambda: both("CLIP"),
    "SigLIP": lambda: both("Siglip"),
    "Gemma 2": lambda: writer("Gemma2", {"refused": "soft cap"}, **GROUPED, **WINDOWS),
    "Gemma 2, no soft cap": lambda: writer(
        "Gemma2", attn_logit_softcapping=None, **GROUPED, **WINDOWS
    ),
    "Gemma 3": lambda: writer("Gemma3Text", **{**GROUPED, **WINDOWS}),
    "Llama": lambda: writer("Llama", **GROUPED),
    "Qwen 2": lambda: writer("Qwen2", **GROUPED),
    "Qwen 3": lambda: writer("Qwen3", **GROUPED),
    "Mistral": lambda: writer("Mistral", sliding_window=4, **GROUPED),
    "Phi-3": lambda: writer("Phi3", sliding_window=4, **SIZES, num_key_value_heads=2),
    "OLMo 2": lambda: writer("Olmo2", **GROUPED),
    "Cohere": lambda: writer("Cohere", **GROUPED),
    "GPT-NeoX": lambda: writer("GPTNeoX", **SIZES),
    "GPT-2": lambda: writer("GPT2", **SIZES),
    "GPT-OSS": lambda: writer(
        "GptOss", {"refused": "attention sinks"}, **GROUPED, **WINDOWS, num_local_experts=4
    ),
    "Falcon, rotary": lambda: writer("Falcon", **FALCON),
    "Falcon, ALiBi": lambda: writer("Falcon", **FALCON, alibi=True),
    "OPT": lambda: writer("OPT", **SIZES, ffn_dim=48, word_embed_proj_dim=32),
    "BLOOM": lambda: writer("Bloom", WRITTEN, **SIZES),
    "T5": lambda: translator("T5", **T5),
    "BART": lambda: translator("Bart", **BART),
    "transformers ViT": lambda: seeing("ViT", **HF_VIT),
    "transformers DINOv2": lambda: seeing("Dinov2", **HF_VIT),
    "transformers Swin": lambda: seeing(
        "Swin", 32, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=2
    ),
    "timm ViT": lambda: timm_host("vit_tiny_patch16_224", 32, **VIT),
    "timm EVA02": lambda: timm_host("eva02_tiny_patch14_224", 28, **VIT),
    "timm BEiT": lambda: timm_host("beit_base_patch16_224", 32, **VIT),
    "timm DINOv3": lambda: timm_host("vit_small_patch16_dinov3", 32, **VIT),
    "timm Swin": lambda: timm_host("swin_tiny_patch4_window7_224", 64, window_size=4, **STAGES),
    "timm Swin 2": lambda: _with(timm_host("swinv2_tiny_window8_256", 64, **STAGES), WRITTEN),
    "timm MaxViT, rmlp": lambda: timm_host("maxvit_rmlp_pico_rw_256", 64),
    "timm MaxViT, tf": lambda: timm_host("maxvit_tiny_tf_224", 64),
    "timm CoAtNet": lambda: timm_host("coatnet_nano_rw_224", 64),
    "timm ConViT": lambda: _with(
        timm_host("convit_tiny", 32, **{**VIT, "depth": 3}, local_up_to_layer=2), WRITTEN
    ),
    "timm CaiT": lambda: timm_host(
        "cait_xxs24_224", 32, "softmax is written out", embed_dim=32, depth=2, num_heads=4
    ),
    "timm XCiT": lambda: timm_host(
        "xcit_nano_12_p16_224", 32, "between channels", embed_dim=32, depth=2, num_heads=4
    ),
    "torch MHA, self and cross": self_and_cross,
    "nn.Transformer": transformer,
    "nn.TransformerEncoder": encoder_of_torch,
    "by hand, two calls": lambda: by_hand(TwoCalls),
    "by hand, windows": lambda: by_hand(Windows),
    "by hand, heads as batch": lambda: by_hand(HeadsAsBatch, "heads into the batch"),
    "by hand, own checkpoint": lambda: by_hand(Repeating, "inside a checkpoint"),
}  # fmt: skip


def _with(host: Host, more: dict[str, Any]) -> Host:
    return Host(**{**vars(host), **more})


def host_of(name: str) -> Host:
    torch.manual_seed(0)
    host = HOSTS[name]()
    with torch.no_grad():
        for parameter in host.model.parameters():  # no weight stays at zero, no bias without effect
            if parameter.dim() == 1 or not bool(parameter.any()):
                parameter.add_(0.1 * torch.randn_like(parameter))
    return host


# ---- what is kept --------------------------------------------------------------------------------
def swapped(host: Host, variant: str, **options: Any) -> Any:
    """A swapped copy, and the report."""
    model = copy.deepcopy(host.model)
    return lit_probattn.swap(model, variant, example=host.example, **host.options, **options)


def identity(host: Host) -> float:
    """The largest difference of outputs with the softmax, in units of the largest output."""
    new, report = swapped(host, "softmax")
    assert all(layer.swapped for layer in report.layers) or "keep" in host.options
    with torch.no_grad():
        before, after = host.output(host.model), host.output(new)
    return float((after - before).abs().max()) / float(before.abs().max())


def gradient(host: Host) -> float:
    """The largest difference of gradients of all the host's parameters, each relative."""
    found = []
    for model in (host.model, swapped(host, "softmax")[0]):
        model.zero_grad()
        host.output(model).sin().sum().backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        found.append(grads)
    before, after = found
    assert before.keys() <= after.keys()
    largest = max(float(g.abs().max()) for g in before.values())
    return max(
        float((after[n] - g).abs().max()) / (float(g.abs().max()) + 1e-2 * largest)
        for n, g in before.items()
    )


def generate(host: Host, variant: str = "softmax", **options: Any) -> str:
    """Whether words are the host's, with a dynamic and a static cache; or those without a cache."""
    if host.prompt is None:
        return ""
    new, _ = swapped(host, variant, **options)
    lengths = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}

    def write(model: Any, **options: Any) -> Tensor:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            return model.generate(host.prompt, **lengths, **options)

    expected = write(host.model) if variant == "softmax" else write(new, use_cache=False)
    assert torch.equal(write(new), expected), "dynamic cache"
    try:
        write(host.model, cache_implementation="static")
    except Exception:
        return "dynamic; the host has no static"
    assert torch.equal(write(new, cache_implementation="static"), expected), "static cache"
    return "equal"


def variant(host: Host, name: str, **options: Any) -> str:
    """Gradients reach every parameter of the cores, and generation with a cache is that without."""
    new, _ = swapped(host, name, **options)
    own = {n: p for n, p in new.named_parameters() if ".cores." in f".{n}"}
    host.output(new).sin().sum().backward()
    for parameter_name, parameter in own.items():
        assert parameter.grad is not None, parameter_name
        assert bool(parameter.grad.isfinite().all()), parameter_name
        assert bool(parameter.grad.any()), f"{parameter_name} without a gradient"
    new.zero_grad()
    if name != "fish" and host.prompt is not None:
        generate(host, name, **options)
    return "ok"


def restored(host: Host, **options: Any) -> str:
    """State dict with recipe, copy and pickle give the same model: sMGK, and half the heads."""
    done = []
    for name, more in (("smgk", {}), ("mgk", {"heads": 0.5})):
        try:
            new, report = swapped(host, name, **more)
        except ValueError:
            if name == "smgk":
                raise
            continue  # its own column says why
        with torch.no_grad():
            for parameter in new.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))
            expected = host.output(new)
            fresh, _ = lit_probattn.swap(
                copy.deepcopy(host.model), json.loads(json.dumps(report.recipe))
            )
            fresh.load_state_dict(new.state_dict())
            assert torch.equal(host.output(fresh), expected), f"{name}: recipe and state dict"
            assert torch.equal(host.output(copy.deepcopy(new)), expected), f"{name}: copy"
            if can_pickle(host.model):
                again = pickle.loads(pickle.dumps(new))
                assert torch.equal(host.output(again), expected), f"{name}: pickle"
        done.append(name)
    found = "ok" if len(done) == 2 else "ok (sMGK)"
    return found if can_pickle(host.model) else f"{found}; the host cannot be pickled"


def can_pickle(model: nn.Module) -> bool:
    """Whether a host can be pickled before a swap; parametrised modules cannot."""
    try:
        pickle.dumps(model)
    except RuntimeError:
        return False
    return True


def compiled(host: Host) -> str:
    """One graph where the host is one, whose output and gradients are those of eager calls."""
    original = copy.deepcopy(host.model)
    new = [swapped(host, "smgk")[0], swapped(host, "fish", noise="none")[0]]
    for model in (original, *new):
        torch.compiler.reset()
        found = []
        for call in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
            model.zero_grad()
            try:
                out = host.output(call)
            except Exception:
                if model is original:
                    return "the host is not one graph"
                raise
            out.sin().sum().backward()
            # Parameters that do not reach the output: no gradient in eager calls, zeros in a graph.
            none = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
            gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
            found.append((out.detach(), none | {n: g.clone() for n, g in gradients.items()}))
        torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
    return "ok"


CHECKS: dict[str, Callable[[Host], Any]] = {
    "identity": identity,
    "gradient": gradient,
    "generate": generate,
    "state dict": restored,
    "compile": compiled,
    "sMGK": lambda host: variant(host, "smgk"),
    "FiSH, G = H": lambda host: variant(host, "fish", noise="none"),
    "heads = 1/2": lambda host: variant(host, "mgk", heads=0.5),
}
PAGE = ROOT / "docs" / "swap.md"
BEGIN, END = "<!-- made by tests.interop.swap.table -->", "<!-- end -->"
MADE_WITH = "Made with "


def row(name: str, checks: dict[str, Callable[[Host], Any]]) -> dict[str, str]:
    """Cells of a host: what each check found, or in short why it failed."""
    host = host_of(name)
    if host.refused:
        with pytest.raises(ValueError, match=host.refused) as error:
            swapped(host, "softmax")
        line = str(error.value).splitlines()[1]
        return {"calls": f"rejected: {line.partition('): ')[2]}"}
    _, report = swapped(host, "softmax")
    ways = sorted({call["way"] for x in report.recipe["layers"].values() for call in x["calls"]})
    cells = {"calls": f"{', '.join(ways)}: {len(report.swapped)}"}
    for title, check in checks.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = check(host)
        except Exception as error:
            text = " ".join(str(error).split())
            reason = text.rpartition("): ")[2].partition(" `keep`")[0]
            found = reason[:110] if "cannot be swapped" in text else f"FAILED {text[:110]}"
        cells[title] = f"{found:.0e}" if isinstance(found, float) else str(found)
    return cells


def read(table: str) -> tuple[dict[str, dict[str, str]], set[str]]:
    """The rows of a table by their hosts, and the versions that it was made with."""
    lines = table.splitlines()
    cells = [[x.strip() for x in line.split("|")[1:-1]] for line in lines if line[:1] == "|"]
    (_, *titles), _, *rows = cells
    found = {name: dict(zip(titles, values, strict=True)) for name, *values in rows}
    (made,) = (line for line in lines if line.startswith(MADE_WITH))
    return found, set(made.removeprefix(MADE_WITH).removesuffix(".").split("; "))


def written(rows: dict[str, dict[str, str]], versions: set[str]) -> str:
    """The table of all rows in Markdown, and the versions that it was made with."""
    titles = ["calls", *CHECKS]
    lines = ["| " + " | ".join(("host", *titles)) + " |", "|" + " --- |" * (len(titles) + 1)]
    for name in HOSTS:
        if name in rows:
            cells = [rows[name].get(title, "").replace("|", "/") for title in titles]
            lines.append("| " + " | ".join((name, *cells)) + " |")
    return "\n".join([*lines, "", f"{MADE_WITH}{'; '.join(sorted(versions))}."])


def main(arguments: list[str]) -> None:
    """Run hosts (all that are not named otherwise), note their rows, and write the docs' table."""
    import timm
    import transformers

    unknown = [a for a in arguments if a not in HOSTS and a.removeprefix("-") not in CHECKS]
    if unknown:
        raise SystemExit(
            f"unknown: {', '.join(unknown)}; expected names of hosts ({', '.join(HOSTS)}), or "
            f"-CHECK to leave one out ({', '.join(CHECKS)})"
        )
    versions = f"torch {torch.__version__}, timm {timm.__version__}, "
    versions += f"transformers {transformers.__version__}"
    checks = {n: c for n, c in CHECKS.items() if f"-{n}" not in arguments}
    names = [a for a in arguments if not a.startswith("-")] or list(HOSTS)
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    table, _, after = rest.partition(END)
    rows, made_with = read(table)
    made_with = made_with | {versions} if arguments else {versions}
    for name in names:
        start = time.perf_counter()
        cells = row(name, checks)
        seconds = time.perf_counter() - start
        print("|".join(["", name, *cells.values(), f"{seconds:.1f} s", ""]), flush=True)
        rows[name] = {**(rows.get(name, {}) if len(checks) < len(CHECKS) else {}), **cells}
        PAGE.write_text(f"{before}{BEGIN}\n{written(rows, made_with)}\n{END}{after}")


if __name__ == "__main__":
    main(sys.argv[1:])
