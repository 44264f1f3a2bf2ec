"""Convert a text encoder of this package to a BERT or RoBERTa of transformers.

    lit-probattn convert to_transformers runs/masked_lm-bert/0 my_bert/

Writes `config.json` and `model.safetensors`, which `from_pretrained` of transformers loads without
missing or unexpected names. The model must have dot-product softmax attention with biases, and
post-norm blocks. Tokeniser files are not written; copy them yourself.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_probattn.attention import Attention, SoftmaxAttention
from lit_probattn.base.allowed_code import add_flag
from lit_probattn.base.arguments import Parser
from lit_probattn.base.errors import ConfigError
from lit_probattn.configs import attention_entry, build_attention
from lit_probattn.convert.files import attention_file, find_layers
from lit_probattn.convert.from_transformers import ACTIVATIONS, HEAD_DROPOUT, first_row
from lit_probattn.convert.transformers_files import write_model
from lit_probattn.convert.transformers_names import FAMILIES, Family, Layout, Part, require_names
from lit_probattn.training.checkpoints import (
    find_file,
    load_checkpoint,
    of_model,
)

# The weight that identifies each part.
_MARKS: dict[Part, str] = {
    "pooler": "pooler.weight",
    "words": "head.0.weight",
    "next_sentence": "next_sentence.weight",
    "spans": "spans.weight",
    "labels": "classifier.weight",
}
# Special tokens in config.json, for models that were not converted from transformers.
_OWN_TOKENS: dict[Family, dict[str, int]] = {
    "bert": {"pad_token_id": 0},
    "roberta": {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2},
}
_TOKEN_TYPES: dict[Family, int] = {"bert": 2, "roberta": 1}


def require_attention(layer: Attention) -> None:
    """Raise a ConfigError for an attention layer that transformers' models do not support."""
    problems = []
    if type(layer) is not SoftmaxAttention:
        problems.append(f"the attention is {type(layer).__name__}")
    else:
        if layer.core.score != "dot":
            problems.append(f"score is {layer.core.score}")
        if layer.rotary is not None:
            problems.append("positions are rotary")
        if layer.num_kv_heads != layer.num_heads:
            problems.append(f"num_kv_heads is {layer.num_kv_heads}")
        if layer.value_head_dim != layer.head_dim:
            problems.append(f"value_head_dim is {layer.value_head_dim}")
        if not layer.use_bias:
            problems.append("bias is false")
        if layer.num_heads * layer.head_dim != layer.embed_dim:
            problems.append(
                f"{layer.num_heads} heads of size {layer.head_dim} do not add up to the width "
                f"{layer.embed_dim}"
            )
    if problems:
        raise ConfigError(
            f"{', '.join(problems)}: expected SoftmaxAttention with score dot, biases, and heads "
            "that add up to the width"
        )


def export_model(
    state: Mapping[str, Tensor],
    sizes: Mapping[str, Any],
    num_heads: int,
    family: Family,
    config: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return config.json and the state dict of a model for transformers.

    Args:
        state: state dict of the model.
        sizes: arguments of the model, as returned by `read_sizes`; shapes are read from `state`.
        config: config.json that the model was converted from, or an empty mapping.

    Raises:
        ConfigError: an option is not supported; the message names it.
    """
    parts = _parts_of(state, family)
    bare = not parts - {"pooler"}  # transformers writes headless models without the prefix
    layout = Layout(family, len(find_layers(dict(state))), parts, bare)
    if sizes.get("share_layers", False):
        raise ConfigError(
            "share_layers is true: transformers' models have separate weights per layer and do not "
            "support shared blocks"
        )
    if sizes.get("norm_first", False):
        raise ConfigError("norm_first is true: only post-norm blocks are supported")
    activation = sizes.get("activation", "gelu")
    if activation not in ACTIVATIONS or ("words" in layout.parts and activation != "gelu"):
        raise ConfigError(f"activation {activation!r} is not supported with this head")
    tensors = dict(state)
    if "token_types.weight" not in tensors:  # zeros for the types that tokenisers return
        width = tensors["tokens.weight"].shape[1]
        count = _TOKEN_TYPES[family]
        tensors["token_types.weight"] = tensors["tokens.weight"].new_zeros(count, width)
    names = layout.names()
    require_names(tensors, names)
    config = {**_OWN_TOKENS[family], **config}
    first = first_row(family, config)
    if first:
        table = tensors["positions.offsets.weight"]
        unused = table.new_zeros(first, table.shape[1])
        tensors["positions.offsets.weight"] = torch.cat([unused, table])
    written: dict[str, Any] = {
        "architectures": [layout.architecture],
        "model_type": family,
        "vocab_size": len(tensors["tokens.weight"]),
        "hidden_size": tensors["tokens.weight"].shape[1],
        "num_hidden_layers": layout.num_layers,
        "num_attention_heads": num_heads,
        "intermediate_size": len(tensors["encoder.blocks.0.mlp.fc1.weight"]),
        "hidden_act": activation,
        "hidden_dropout_prob": sizes.get("dropout", 0.0),
        "attention_probs_dropout_prob": sizes.get("attention_dropout") or 0.0,
        "max_position_embeddings": len(tensors["positions.offsets.weight"]),
        "type_vocab_size": len(tensors["token_types.weight"]),
        "layer_norm_eps": sizes.get("norm_eps", 1e-5),
        "tie_word_embeddings": True,
        "is_decoder": False,
    }
    if "labels" in layout.parts:
        count = len(tensors["classifier.weight"])
        written["classifier_dropout"] = sizes.get("head_dropout", HEAD_DROPOUT)
        if len(config.get("id2label") or ()) != count:
            written["id2label"] = {str(i): f"LABEL_{i}" for i in range(count)}
            written["label2id"] = {f"LABEL_{i}": i for i in range(count)}
    return {**config, **written}, {names[ours]: tensors[ours] for ours in names}


def _parts_of(state: Mapping[str, Tensor], family: Family) -> frozenset[Part]:
    """Return the parts of the model that the weights belong to."""
    parts = frozenset(part for part, mark in _MARKS.items() if mark in state)
    if family == "roberta" and "next_sentence" in parts:
        raise ConfigError("RoBERTa does not support next_sentence: pass --model_type bert")
    if family == "roberta" and "labels" in parts:
        parts -= {"pooler"}  # part of the classifier there
    return parts


def run(options: argparse.Namespace) -> list[str]:
    """Write `options.checkpoint` to `options.folder`; return the lines to print.

    Raises:
        ConfigError: BERT and RoBERTa do not support the model, or its configuration sets no
            attention.
        CheckpointError: the checkpoint is missing or corrupt.
    """
    path = find_file(options.checkpoint)
    checkpoint = load_checkpoint(path)
    state = of_model(checkpoint.get("state_dict", {}))
    sizes = checkpoint.get("hyper_parameters", {})
    if "head_dim" not in sizes or "tokens.weight" not in state:
        raise ConfigError(f"{path} is not a text encoder: it has no tokens or head_dim")
    if sizes.get("position_period") is not None and "positions.blocks.weight" in state:
        raise ConfigError("position_period is set: only one position table is supported")
    layer = _attention_of(path, options.config, state, sizes)
    require_attention(layer)
    origin = checkpoint.get("transformers", {})
    config = dict(origin.get("config", {}))
    family: Family = options.model_type or config.get("model_type") or "bert"
    if family != config.get("model_type"):
        config = {}
    classes = checkpoint.get("TextPairs", {}).get("classes")
    if classes and "classifier.weight" in state:
        config["id2label"] = {str(i): label for i, label in enumerate(classes)}
        config["label2id"] = {label: i for i, label in enumerate(classes)}
    extra = of_model(origin.get("other_heads", {}))
    left_out = []
    if "next_sentence.weight" in extra and family == "bert":
        state |= extra
    else:
        left_out = sorted({name.partition(".")[0] for name in extra})
    written, tensors = export_model(state, sizes, layer.num_heads, family, config)
    done = write_model(options.folder.expanduser(), written, tensors)
    lines = [f"{written['architectures'][0]}: {len(tensors)} tensors", done]
    if written["architectures"][0].endswith("Model") and "pooler.weight" not in state:
        lines.insert(1, "the model has no pooler: transformers initialises a new one")
    if family == "roberta" and "model_type" not in config:
        padding = _OWN_TOKENS[family]["pad_token_id"]
        lines.insert(
            1,
            f"RoBERTa gives tokens of id {padding} no position: if that is not the padding of your "
            "tokeniser, pass --model_type bert",
        )
    if left_out:
        lines.insert(1, f"omitted, since this class lacks them: {', '.join(left_out)}")
    return lines


def _attention_of(
    checkpoint: Path, given: Path | None, state: Mapping[str, Tensor], sizes: Mapping[str, Any]
) -> Attention:
    """Return an attention layer like the checkpoint's, from its configuration."""
    found = given or attention_file(checkpoint)
    if found is None:
        raise ConfigError(
            f"configuration not found: {checkpoint.with_suffix('.yaml')}, which defines the "
            "attention; pass --config"
        )
    entry = attention_entry(found)
    width, head_dim = state["tokens.weight"].shape[1], sizes["head_dim"]
    with torch.device("meta"):
        return build_attention(entry["class_path"], entry["init_args"], width, head_dim)


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `run`."""
    add = parser.add_argument
    add("checkpoint", type=Path, help="checkpoint of a text encoder, or its run folder")
    add("folder", type=Path, help="folder to write config.json and model.safetensors to")
    add("--config", type=Path, help="the run's config.yaml, or the attention file")
    add(
        "--model_type",
        choices=FAMILIES,
        help="default: the type the checkpoint was converted from, otherwise bert",
    )
    add_flag(parser)
