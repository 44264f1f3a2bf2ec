"""Effect of `lit_probattn.swap` on each attention layer of a named model."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lit_probattn.attention.core import Core
from lit_probattn.base.errors import ConfigError, nearest
from lit_probattn.interop.swap.door import swap
from lit_probattn.interop.swap.report import LayerReport
from lit_probattn.measure.counters import torch_flops_by_module

LIBRARIES = ("timm", "hf")
# Reduced sizes for models of transformers: their layers are identical, and independent of the
# vocabulary and of the MLP width.
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
_REDUCED = {
    **dict.fromkeys((*_LAYERS, "num_decoder_layers", "encoder_layers", "decoder_layers"), 2),
    **{"vocab_size": 128, "intermediate_size": 64, "n_inner": 64, "d_ff": 64},
}
# Model types that a test swaps; any other is tried, since `swap` finds attention by a run.
TESTED = (
    *(
        "bart",
        "bert",
        "camembert",
        "clip",
        "cohere",
        "deit",
        "dinov2",
        "distilbert",
        "electra",
        "falcon",
        "gpt2",
    ),
    *("llama", "mistral", "qwen2", "roberta", "t5", "vit"),
)


@dataclass(frozen=True)
class Named:
    """A model and an input.

    Args:
        model: model with random weights, without downloads.
        inputs: inputs of one call.
        note: how the model differs from the named one.
    """

    model: nn.Module
    inputs: Any
    note: str


def changes(
    name: str, variant: str, heads: float, seq_len: int
) -> tuple[list[tuple[LayerReport, tuple[int, int]]], str]:
    """Return the effect of a swap on each attention layer, and a remark about the model.

    Multiply-adds of a layer are those of one run of the model, with projections, before and after:
    of all calls, if layers share a module.

    Args:
        name: `timm:NAME` or `hf:TYPE`.
        variant: `mgk`, `smgk` or `softmax`.
        heads: ratio of heads kept.
        seq_len: sequence length for language models.

    Raises:
        ConfigError: the model is unknown or not supported, or its package is missing.
    """
    named = load(name, seq_len)
    try:
        before = _macs(named.model, named.inputs)
    except Exception as error:  # a model of another library may raise any exception
        text = " ".join(str(error).split())[:200]
        given = ", ".join(named.inputs) if isinstance(named.inputs, dict) else "one image"
        raise ConfigError(f"--model {name}: it does not run on {given}: {text}") from error
    torch.manual_seed(0)
    try:
        model, report = swap(named.model, variant, heads=heads, example=named.inputs)
    except ValueError as error:
        raise ConfigError(f"--model {name}: {' '.join(str(error).split())}") from error
    # Leaving training mode also clears what a run left, such as TinyViT's position biases.
    after = _macs(model.eval(), named.inputs)
    found = []
    for layer in report.layers:
        parts = [layer.name, *([layer.output] if layer.output else [])]
        sums = [sum(counts.get(part, 0) for part in parts) for counts in (before, after)]
        found.append((layer, (sums[0], sums[1])))
    return found, named.note


def _macs(model: nn.Module, inputs: Any) -> dict[str, int]:
    """Count the multiply-adds of every module in one call, with attention by its equation.

    On a copy on the meta device; a model that reads values of its inputs is run on zeros instead.
    """

    def count(there: nn.Module, device: str) -> dict[str, int]:
        named = inputs if isinstance(inputs, dict) else {"": inputs}
        given = {key: torch.zeros_like(value, device=device) for key, value in named.items()}

        def call() -> object:
            with torch.no_grad(), torch.device(device):
                return there(*given.values()) if given.keys() == {""} else there(**given)

        return {name: flops // 2 for name, flops in torch_flops_by_module(there, call).items()}

    try:
        return count(_by_equation(model, _without_data(model)), "meta")
    except RuntimeError:
        return count(_by_equation(model, {}), "cpu")


def _without_data(model: nn.Module) -> dict[int, Tensor]:
    """Return parameters and buffers on the meta device by the identities of their originals.

    With them, copying a model copies no weights, which are gigabytes in some models.
    """
    found: dict[int, Tensor] = {id(buffer): buffer.to("meta") for buffer in model.buffers()}
    for weight in model.parameters():
        found[id(weight)] = nn.Parameter(weight.detach().to("meta"), weight.requires_grad)
    return found


def _by_equation(model: nn.Module, copied: dict[int, Tensor]) -> nn.Module:
    """Return a copy for evaluation whose attention computes its equation; see `copy.deepcopy`.

    Without gradients: the counter's hooks fail on a view of a parameter that is a module's input.
    """
    there = copy.deepcopy(model, dict[int, Any](copied)).eval().requires_grad_(False)
    for core in there.modules():
        if isinstance(core, Core):
            core.backend = core.makes.stated_backend
    return there


def load(name: str, seq_len: int) -> Named:
    """Return a model by its name, with random weights.

    Raises:
        ConfigError: see `changes`.
    """
    library, _, rest = name.partition(":")
    makers: dict[str, Callable[[str, int], Named]] = {"timm": _timm, "hf": _transformers}
    if library not in makers or not rest:
        raise ConfigError(
            f"--model {name}: expected timm:NAME or hf:TYPE, such as timm:vit_small_patch16_224 or "
            f"hf:bert{nearest(library, LIBRARIES) if library not in LIBRARIES else ''}"
        )
    return makers[library](rest, seq_len)


def _timm(name: str, seq_len: int) -> Named:
    import timm

    known = timm.list_models()
    if name not in known:
        raise ConfigError(f"--model timm:{name}: unknown model{nearest(name, known, lists=False)}")
    model: Any = timm.create_model(name, pretrained=False)
    size = model.pretrained_cfg.get("input_size", (3, 224, 224))
    inputs = torch.randn(1, *size)
    return Named(model, inputs, f"one image of {size[1]} x {size[2]}")


def _transformers(name: str, seq_len: int) -> Named:
    try:
        from transformers import AutoConfig, AutoModel
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    except ImportError as error:
        raise ConfigError(
            f"--model hf:{name} requires transformers: pip install 'lit-probattn[interop]'"
        ) from error
    kinds = sorted(CONFIG_MAPPING)
    kind = name.removesuffix("-base")
    if kind not in kinds:
        family = kind.partition("-")[0]
        note = (
            f"; did you mean {family!r}?" if family in kinds else nearest(kind, kinds, lists=False)
        )
        raise ConfigError(
            f"--model hf:{name}: unknown model{note or ';'} expected a model type of transformers, "
            f"such as {', '.join(TESTED)}"
        )
    config = AutoConfig.for_model(kind)
    layers = next((getattr(config, k) for k in _LAYERS if hasattr(config, k)), None)
    for key, value in _REDUCED.items():
        if hasattr(config, key):
            setattr(config, key, value)
    for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if isinstance(getattr(config, key, None), int):
            setattr(config, key, 0)
    try:
        model = AutoModel.from_config(config)
    except Exception as error:
        text = " ".join(str(error).split())[:200]
        raise ConfigError(f"--model hf:{name}: cannot build its configuration: {text}") from error
    accepted = inspect.signature(model.forward).parameters
    inputs, parts = {}, []
    side = getattr(getattr(config, "vision_config", config), "image_size", None)
    if "pixel_values" in accepted and side is not None:
        inputs["pixel_values"] = torch.randn(1, 3, side, side)
        parts.append(f"one image of {side} x {side}")
    if "input_ids" in accepted:
        language = getattr(config, "text_config", config)
        length = min(seq_len, getattr(language, "max_position_embeddings", seq_len))
        words = torch.randint(_REDUCED["vocab_size"], (1, length))
        inputs["input_ids"] = words
        if "decoder_input_ids" in accepted and getattr(config, "is_encoder_decoder", False):
            inputs["decoder_input_ids"] = words
        parts.append(f"one sequence of {length} tokens")
    if not inputs:
        raise ConfigError(
            f"--model hf:{name}: supports models of token ids or images; its inputs are "
            f"{', '.join(accepted)}"
        )
    two = "" if layers is None else f"two of its {layers} identical layers; "
    return Named(model, inputs, f"default sizes of {kind}; {two}{' and '.join(parts)}")
