"""Convert a BERT or RoBERTa of transformers to a text encoder of this package.

    lit-probattn convert from_transformers bert-base-uncased/ bert.ckpt

FOLDER contains config.json and model.safetensors (or pytorch_model.bin, or a sharded version of
either). Nothing is downloaded, and the package transformers is not required. The command writes
`bert.ckpt`, for `--ckpt_path bert.ckpt`, and `bert.yaml` with sizes and attention (pass
`--config bert.yaml` after the task file). The data determine the vocabulary and the maximum length.
Classes must have the same order as in the data; --labels reorders them.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning
from torch import Tensor

from lit_probattn.base.arguments import Parser
from lit_probattn.base.errors import ConfigError, prefixed
from lit_probattn.convert.files import check_output, write
from lit_probattn.convert.transformers_files import CONFIG, read_json, read_weights
from lit_probattn.convert.transformers_names import (
    FAMILIES,
    Family,
    Layout,
    architectures,
    drop_tied,
    layout_of,
    tidy,
    to_ours,
)
from lit_probattn.training.checkpoints import in_task

# Unsupported options: key of config.json, supported value, and name of the feature.
_REQUIRED: tuple[tuple[str, Any, str], ...] = (
    ("position_embedding_type", "absolute", "relative positions"),
    ("is_decoder", False, "a decoder"),
    ("add_cross_attention", False, "cross-attention"),
    ("pruned_heads", {}, "pruned heads"),
)
ACTIVATIONS = ("gelu", "relu")
_ONE_CLASS = "single_label_classification"
_UNNAMED = re.compile(r"LABEL_\d+")
# Defaults of keys that config.json may omit.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
}
_COUNTS = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    *("intermediate_size", "max_position_embeddings", "type_vocab_size"),
)
HEAD_DROPOUT = 0.1  # default of TextClassifier
_SHARES = ("hidden_dropout_prob", "attention_probs_dropout_prob")
ATTENTION = "lit_probattn.attention.SoftmaxAttention"
_PADDING: dict[Family, int] = {"bert": 0, "roberta": 1}
# Prefixes of weights that masked language models of this package do not have.
EXTRA_HEADS = ("pooler.", "next_sentence.")


@dataclass(frozen=True)
class Imported:
    """Weights and sizes under the names of this package.

    Attributes:
        state: tensors of the model.
        sizes: arguments of the model, except `attention`.
        num_heads: number of attention heads.
        layout: parts of the model in the file.
        config: content of config.json.
        classes: label of each class index, or None without named classes.
    """

    state: dict[str, Tensor]
    sizes: dict[str, Any]
    num_heads: int
    layout: Layout
    config: dict[str, Any]
    classes: list[str] | None = None


def first_row(family: Family, config: Mapping[str, Any]) -> int:
    """Return the row of the position table for the first position.

    Source: fairseq's RoBERTa counts positions from the padding id; earlier rows are unused.

    Raises:
        ConfigError: the padding id is not a valid index.
    """
    if family == "bert":
        return 0
    padding = config.get("pad_token_id", _PADDING[family])
    if not _is_number(padding, int) or padding < 0:
        raise ConfigError(f"pad_token_id must be a non-negative integer, received {padding!r}")
    return int(padding) + 1


def _is_number(value: Any, *kinds: type) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


def read_family(config: Mapping[str, Any]) -> Family:
    """Return the family of a configuration, after checking that all of it is supported.

    Raises:
        ConfigError: unsupported option; the message names it.
    """
    kind = config.get("model_type")
    family = next((name for name in FAMILIES if name == kind), None)
    if kind is None:
        raise ConfigError(f"model_type is missing: expected {' or '.join(FAMILIES)}")
    if family is None:
        raise ConfigError(f"unsupported model_type {kind!r}: expected {' or '.join(FAMILIES)}")
    for key, needed, name in _REQUIRED:
        value = config.get(key, needed)
        if value not in (needed, None) and value:
            raise ConfigError(f"{key} is {value!r}: {name} is not supported")
    named = config.get("architectures") or []
    if not isinstance(named, list):
        raise ConfigError(f"architectures must be a list of names, received {named!r}")
    for name in named:
        if name not in architectures():
            known = ", ".join(sorted(architectures()))
            raise ConfigError(f"unsupported architecture {name}: expected one of {known}")
    return family


def read_sizes(family: Family, config: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """Return the arguments of the model and the number of heads.

    Raises:
        ConfigError: a size is invalid, or an option is not supported.
    """
    given = {**_DEFAULTS, **config}
    for key in _COUNTS:
        value = given[key]
        if not _is_number(value, int) or value < 1:
            raise ConfigError(f"{key} must be a positive integer, received {value!r}")
    for key in _SHARES:
        value = given[key]
        if not _is_number(value, int, float) or not 0 <= value < 1:
            raise ConfigError(f"{key} must be a number in [0, 1), received {value!r}")
    eps = given["layer_norm_eps"]
    if not _is_number(eps, int, float) or not 0 < eps < math.inf:
        raise ConfigError(f"layer_norm_eps must be a positive number, received {eps!r}")
    width, heads = given["hidden_size"], given["num_attention_heads"]
    if width % heads:
        raise ConfigError(
            f"num_attention_heads must divide hidden_size, received {heads} and {width}"
        )
    other = given.get("embedding_size", width)
    if other != width:
        raise ConfigError(
            f"embedding_size {other} differs from hidden_size {width}: factorised embeddings "
            "are not supported"
        )
    if given["hidden_act"] not in ACTIVATIONS:
        raise ConfigError(
            f"unsupported hidden_act {given['hidden_act']!r}: expected {' or '.join(ACTIVATIONS)}"
        )
    positions = given["max_position_embeddings"] - first_row(family, config)
    if positions < 1:
        raise ConfigError(
            f"max_position_embeddings {given['max_position_embeddings']} leaves no position "
            f"after pad_token_id {first_row(family, config) - 1}"
        )
    sizes = {
        "vocab_size": given["vocab_size"],
        "max_seq_len": positions,
        "embed_dim": width,
        "head_dim": width // heads,
        "num_layers": given["num_hidden_layers"],
        "mlp_dim": given["intermediate_size"],
        "dropout": float(given["hidden_dropout_prob"]),
        "norm_first": False,
        "activation": given["hidden_act"],
        "attention_dropout": float(given["attention_probs_dropout_prob"]),
        "num_token_types": given["type_vocab_size"],
        "norm_eps": float(given["layer_norm_eps"]),
        "activation_dropout": 0.0,
    }
    return sizes, heads


def read_head_dropout(config: Mapping[str, Any]) -> float:
    """Return the dropout of a classification head, by default that of the encoder.

    Raises:
        ConfigError: it is not a number in [0, 1).
    """
    value = config.get("classifier_dropout")
    if value is None:
        value = config.get("hidden_dropout_prob", _DEFAULTS["hidden_dropout_prob"])
    if not _is_number(value, int, float) or not 0 <= value < 1:
        raise ConfigError(f"classifier_dropout must be a number in [0, 1), received {value!r}")
    return float(value)


def read_classes(config: Mapping[str, Any], count: int) -> list[str] | None:
    """Return the label of each class index, or None if they are LABEL_0, LABEL_1, ….

    Raises:
        ConfigError: id2label does not name all `count` classes, or they do not exclude each other.
    """
    problem = config.get("problem_type") or (_ONE_CLASS if count > 1 else "regression")
    if problem != _ONE_CLASS:
        raise ConfigError(
            f"problem_type is {problem} with {count} labels: only {_ONE_CLASS} is supported"
        )
    named = config.get("id2label")
    if named is None:
        return None
    # A configuration in Python has integers as keys, its file has strings.
    found = {str(key): x for key, x in named.items()} if isinstance(named, dict) else {}
    classes = [x for i in range(count) if isinstance(x := found.get(str(i)), str)]
    if not len(classes) == len(set(classes)) == len(named) == count:
        raise ConfigError(
            f"id2label must name classes 0 to {count - 1} of the classifier, received {named}"
        )
    return None if all(_UNNAMED.fullmatch(x) for x in classes) else classes


def reorder(found: Imported, labels: Sequence[str]) -> Imported:
    """Return a classifier with its classes in the order and spelling of `labels`.

    Labels match case-insensitively. Unnamed classes are assigned the labels in order.

    Raises:
        ConfigError: the labels do not match the classes of the model.
    """
    if "labels" not in found.layout.parts:
        raise ConfigError(f"--labels: {found.layout.architecture} has no classes; remove --labels")
    count = found.sizes["num_classes"]
    own = [x.casefold() for x in found.classes or labels]
    wanted = [x.casefold() for x in labels]
    if len(set(wanted)) != len(wanted) or sorted(own) != sorted(wanted) or len(own) != count:
        names = ", ".join(found.classes) if found.classes else f"names for its {count} classes"
        raise ConfigError(
            f"--labels: expected {names}, in the order of the data, received {', '.join(labels)}"
        )
    rows = [own.index(x) for x in wanted]
    moved = {name: found.state[name][rows] for name in ("classifier.weight", "classifier.bias")}
    return replace(
        found,
        state={**found.state, **moved},
        config={
            **found.config,
            "id2label": {str(i): label for i, label in enumerate(labels)},
            "label2id": {label: i for i, label in enumerate(labels)},
        },
        classes=list(labels),
    )


def convert(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], path: Path = Path(CONFIG)
) -> Imported:
    """Convert the weights of a model.

    Args:
        config: content of config.json.
        tensors: state dict, under the names of transformers.
        path: file of `config`, for error messages.

    Raises:
        ConfigError: an option is not supported, or a tensor is missing, unexpected or of the wrong
            shape.
    """
    classes = None
    with prefixed(path, ConfigError):
        family = read_family(config)
        sizes, heads = read_sizes(family, config)
    named = tidy(tensors)
    layout = layout_of(family, sizes["num_layers"], named)
    if "words" in layout.parts and family == "bert" and sizes["activation"] != "gelu":
        raise ConfigError(
            f"{path}: hidden_act {sizes['activation']!r} with a masked-LM head is not supported: "
            "expected gelu"
        )
    state = to_ours(layout, drop_tied(layout, named))
    if "labels" in layout.parts:
        sizes["num_classes"] = len(state["classifier.weight"])
        with prefixed(path, ConfigError):
            classes = read_classes(config, sizes["num_classes"])
            dropout = read_head_dropout(config)
        if dropout != HEAD_DROPOUT:  # otherwise the sizes also suit tasks with another head
            sizes["head_dropout"] = dropout
    first = first_row(family, config)
    _require_shapes(layout, state, {**sizes, "max_seq_len": first + sizes["max_seq_len"]}, path)
    state["positions.offsets.weight"] = state["positions.offsets.weight"][first:].clone()
    return Imported(state, sizes, heads, layout, dict(config), classes)


def _require_shapes(
    layout: Layout, state: Mapping[str, Tensor], sizes: Mapping[str, Any], path: Path
) -> None:
    """Raise a ConfigError for a tensor whose shape differs from config.json at `path`."""
    known = {
        "V": sizes["vocab_size"],
        "N": sizes["max_seq_len"],
        "T": sizes["num_token_types"],
        "C": sizes["embed_dim"],
        "I": sizes["mlp_dim"],
        "L": sizes.get("num_classes"),
        "2": 2,
    }
    for ours, theirs, shape in layout.rows():
        expected = tuple(known[letter] for letter in shape)
        found = tuple(state[ours].shape)
        if found != expected:
            raise ConfigError(f"{theirs} has shape {found}, expected {expected} from {path}")


def import_folder(folder: Path, output: Path, labels: Sequence[str] | None = None) -> list[str]:
    """Write a checkpoint and a configuration of a transformers model; return lines to print.

    Args:
        folder: folder of the model, with config.json.
        output: path of the checkpoint.
        labels: order of a classifier's classes; see `reorder`. None keeps the stored order.

    Raises:
        ConfigError: the model is not supported, or an output exists.
        CheckpointError: the checkpoint cannot be written.
    """
    check_output(output)
    path = folder / CONFIG
    found = convert(read_json(path), read_weights(folder), path)
    if labels is not None:
        found = reorder(found, labels)
    own, extra = dict(found.state), {}
    if "words" in found.layout.parts:
        extra = {name: own.pop(name) for name in found.state if name.startswith(EXTRA_HEADS)}
    checkpoint = {
        "pytorch-lightning_version": lightning.__version__,
        "state_dict": in_task(own),
        "hyper_parameters": found.sizes,
        "transformers": {"config": found.config, "other_heads": in_task(extra)},
    }
    if found.classes is not None:  # checked against the data's, as in a trained checkpoint
        checkpoint["TextPairs"] = {"classes": found.classes, "converted": True}
    # Determined by the data: runs get them from there, and `open_trained` from the checkpoint.
    of_data = ("vocab_size", "max_seq_len", "num_classes")
    arguments = {name: value for name, value in found.sizes.items() if name not in of_data}
    arguments["attention"] = {
        "class_path": ATTENTION,
        "init_args": {"num_heads": found.num_heads},
    }
    done = write(output, checkpoint, {"model": {"init_args": arguments}})
    count = sum(tensor.numel() for tensor in found.state.values())
    data = ", ".join(f"{name} {found.sizes[name]}" for name in of_data if name in found.sizes)
    lines = [f"{found.layout.architecture}: {count:,} parameters; requires data with {data}", done]
    if found.classes is not None:
        lines.insert(1, f"classes: {', '.join(found.classes)}")
    elif "num_classes" in found.sizes:
        lines.insert(1, "unnamed classes: the data must use the same order (or pass --labels)")
    if extra:
        heads = ", ".join(sorted({name.partition(".")[0] for name in extra}))
        lines.insert(1, f"stored apart, since masked language models here lack them: {heads}")
    return lines


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `run`."""
    parser.add_argument("folder", type=Path, help="folder of the model, with config.json")
    parser.add_argument("output", type=Path, help="checkpoint to write, NAME.ckpt")
    help = "classes of a classifier in the order of the data, such as: entailment neutral"
    parser.add_argument("--labels", nargs="+", metavar="LABEL", help=help)


def run(options: argparse.Namespace) -> list[str]:
    """Run the command; see `import_folder`."""
    return import_folder(options.folder.expanduser(), options.output, options.labels)
