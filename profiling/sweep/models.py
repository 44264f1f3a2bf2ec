"""The model of a point, its inputs, its sizes, and one step of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lit_probattn.attention import AttentionFactory
from lit_probattn.base.memory import Resident, StepFunction
from lit_probattn.configs import attention_factory
from profiling.cost.exact import ModelShape
from profiling.cost.models import (
    AttentionOnly,
    LanguageModel,
    PairModel,
    SequenceModel,
    TranslationModel,
)
from profiling.sweep.config import UNUSED, ModelKind
from profiling.sweep.plan import Point

MODELS: dict[ModelKind, Callable[..., nn.Module]] = {
    "attention": AttentionOnly.build,
    "language_model": LanguageModel,
    "classifier": SequenceModel,
    "pair_classifier": PairModel,
    "encoder_decoder": TranslationModel,
}
_FACTORIES: dict[str, AttentionFactory] = {}


def _factory(class_path: str, arguments: Mapping[str, Any]) -> AttentionFactory:
    """Return the factory of an attention; parsing its arguments takes longer than a small model."""
    key = f"{class_path} {json.dumps(arguments, sort_keys=True, default=str)}"
    if key not in _FACTORIES:
        _FACTORIES[key] = attention_factory(class_path, arguments)
    return _FACTORIES[key]


def build_model(point: Point) -> nn.Module:
    """Return the point's model on the current default device, in the point's mode.

    Raises:
        ConfigError, ValueError: the attention layer rejects its arguments or sizes.
    """
    arguments = {**point.init_args, "backend": point.backend}
    attention = _factory(point.class_path, arguments)
    sizes = {name: v for name, v in point.sizes.items() if name not in UNUSED[point.model]}
    sizes["embed_dim"] = point.embed_dim
    if point.model != "attention":
        sizes["max_seq_len"] = point.seq_len
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, point.dtype))
    try:
        model = MODELS[point.model](attention, **sizes)
    finally:
        torch.set_default_dtype(before)
    return model.train(point.mode == "train")


def make_inputs(point: Point, device: torch.device | str) -> Tensor:
    """Return random inputs: features (B, N, C), tokens (B, N), or pairs of texts (B, 2, N).

    A pair is the two inputs of a pair classifier, or source and target.
    """
    shape: tuple[int, ...] = (point.batch_size, point.seq_len)
    if point.model == "attention":
        dtype = getattr(torch, point.dtype)
        return torch.randn(*shape, point.embed_dim, dtype=dtype, device=device)
    if point.model in ("pair_classifier", "encoder_decoder"):
        shape = (point.batch_size, 2, point.seq_len)
    return torch.randint(point.sizes["vocab_size"], shape, device=device)


def model_shape(point: Point) -> ModelShape | None:
    """Return the sizes for the closed forms of the model; None for a single attention layer."""
    if point.model == "attention":
        return None
    sizes, c = point.sizes, point.embed_dim
    vocab, hidden = sizes["vocab_size"], sizes["mlp_dim"]
    num_sequences, norm_first, has_decoder = 1, True, point.model == "encoder_decoder"
    if has_decoder:  # the output layer is tied to the target embedding
        embedding, head_parameters, norm_first = 2 * vocab * c, 0, False
        head_macs = point.seq_len * c * vocab if sizes["include_output_layer"] else 0
    elif point.model == "language_model":
        clusters = sum(c < vocab for c in (20000, 40000, 200000))
        embedding = vocab * c + vocab + clusters * (c + 1)
        head_parameters, norm_first = 0, False
        head_macs = point.seq_len * c * (vocab + clusters) if sizes["include_output_layer"] else 0
    else:
        num_sequences = 2 if point.model == "pair_classifier" else 1
        width = 4 * c if point.model == "pair_classifier" else c
        classes = sizes["num_classes"]
        embedding = (vocab + point.seq_len) * c
        head_parameters = width * hidden + hidden + hidden * classes + classes
        head_macs = width * hidden + hidden * classes
    return ModelShape(
        num_layers=sizes["num_layers"],
        embed_dim=c,
        mlp_dim=hidden,
        seq_len=point.seq_len,
        num_sequences=num_sequences,
        batch_size=point.batch_size,
        norm_first=norm_first,
        embedding_parameters=embedding,
        head_parameters=head_parameters,
        head_macs=head_macs,
        has_decoder=has_decoder,
    )


def make_step(point: Point, device: torch.device) -> tuple[StepFunction, Resident]:
    """Return a function that runs one step, in training with backward, and the resident memory.

    Backward includes the gradient of a layer's inputs, as for a layer within a model.
    """
    with torch.device(device):
        model = build_model(point)
        inputs = make_inputs(point, device)
    inputs.requires_grad_(point.mode == "train" and inputs.is_floating_point())

    def step() -> None:
        if point.mode == "eval":
            with torch.no_grad():
                model(inputs)
            return
        out = model(inputs)
        out.backward(torch.ones_like(out))  # dense, like the gradient of a loss
        model.zero_grad(set_to_none=True)
        inputs.grad = None

    return step, (model, inputs)
