"""Every model type of transformers that can be built small: a swap is exact, or it is refused."""

from __future__ import annotations

import copy
import inspect
import os
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lit_probattn

os.environ["HF_HUB_OFFLINE"] = "1"
pytest.importorskip("transformers", reason="transformers is not installed")
from transformers import AutoConfig, AutoModel
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers")
WIDTHS = ("hidden_size", "n_embd", "d_model", "dim")
HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads", "attention_heads")
HEADS += ("encoder_attention_heads", "decoder_attention_heads")
HIDDEN = ("intermediate_size", "n_inner", "d_ff", "ffn_dim", "hidden_dim")
HIDDEN += ("encoder_ffn_dim", "decoder_ffn_dim", "moe_intermediate_size")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
SMALL: dict[str, int] = {
    **dict.fromkeys((*LAYERS, "num_decoder_layers", "num_key_value_heads"), 2),
    **dict.fromkeys(("num_experts_per_tok", "topk_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(WIDTHS, 32) | dict.fromkeys(HEADS, 4) | dict.fromkeys(HIDDEN, 48),
    **dict.fromkeys(EXPERTS, 4) | {"vocab_size": 64, "head_dim": 8, "d_kv": 8, "n_group": 1},
    **{"max_position_embeddings": 64, "n_positions": 64, "sliding_window": 3, "patch_size": 4},
    **{"image_size": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
PARTS = 6
MOST_WEIGHTS = 30_000_000


def shrink(config: Any, depth: int = 0) -> Any:
    """Set the sizes of a configuration and of those in it."""
    for name, value in list(vars(config).items()):
        if depth < 3 and hasattr(value, "model_type"):
            shrink(value, depth + 1)
        elif name in SMALL and type(value) in (int, float):
            setattr(config, name, SMALL[name])
    if isinstance(getattr(config, "layer_types", None), list):
        config.layer_types = config.layer_types[:2]
    return config


def build(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a model with random weights whose heads differ, and a call with padding."""
    torch.manual_seed(0)
    model: Any = AutoModel.from_config(shrink(AutoConfig.for_model(name))).eval()
    if sum(weight.numel() for weight in model.parameters()) > MOST_WEIGHTS:
        raise NotImplementedError("too large")
    for weight in model.parameters():
        if weight.dim() > 1:
            nn.init.normal_(weight, std=0.2)
    accepted = inspect.signature(model.forward).parameters
    if "input_ids" not in accepted:
        return model, {"pixel_values": torch.randn(2, 3, 16, 16)}
    call = {"input_ids": torch.randint(3, 60, (2, 11))}
    if "attention_mask" in accepted:
        call["attention_mask"] = torch.ones(2, 11, dtype=torch.long)
        call["attention_mask"][1, 7:] = 0
    if "decoder_input_ids" in accepted:
        call["decoder_input_ids"] = torch.randint(3, 60, (2, 5))
    return model, call


def output(model: nn.Module, call: dict[str, Tensor]) -> Tensor:
    """Return the first tensor of an output; zeros for padding."""
    with torch.no_grad():
        out = next(part for part in model(**call).to_tuple() if isinstance(part, Tensor))
    real = call.get("attention_mask")
    return out if real is None or out.shape[:2] != real.shape else out * real[..., None]


def verdict(name: str) -> str:
    """Return what a swap of a type does: `exact`, `refused`, `not built` or the difference."""
    try:
        model, call = build(name)
        expected = output(model, call)
        again = output(model, call)
    except Exception:  # of another library, which may not support these sizes
        return "not built"
    if not torch.equal(again, expected):
        return "random"
    try:
        new, _ = lit_probattn.swap(copy.deepcopy(model), "softmax", example=call, written_out=True)
    except ValueError:
        return "refused"
    difference = (output(new, call) - expected).abs().max() / expected.abs().max()
    return "exact" if difference < 1e-4 else f"differs by {float(difference):.1e}"


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_a_swap_of_any_type_is_exact_or_refused(part):
    found = {name: verdict(name) for name in sorted(MODEL_MAPPING_NAMES)[part::PARTS]}
    counts = Counter(found.values())
    assert counts.keys() <= {"exact", "refused", "not built", "random"}, found
    assert counts["exact"] >= 20
