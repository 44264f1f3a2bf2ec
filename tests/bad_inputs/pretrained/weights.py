"""Weights of BERT and RoBERTa that are read, and models of ours that are written as such."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file
from torch import Tensor

from lit_probattn.convert.transformers_names import Layout
from tests.bad_inputs.cases import Case, command_error, on_folder

_CONFIG: dict[str, Any] = {
    **{"model_type": "bert", "vocab_size": 7, "hidden_size": 4, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "intermediate_size": 5, "max_position_embeddings": 6},
    **{"type_vocab_size": 2, "architectures": ["BertForMaskedLM"]},
}
_SIZES = {"V": 7, "N": 6, "T": 2, "C": 4, "I": 5, "L": 3, "2": 2}
_Tensors = dict[str, Tensor]
_IMPORT = ("convert", "from_transformers")


def _model(folder: Path, **config: Any) -> _Tensors:
    """Write the configuration of a small BERT for masked words; return its tensors."""
    (folder / "config.json").write_text(json.dumps({**_CONFIG, **config}))
    rows = Layout("bert", 1, frozenset({"words"})).rows()
    return {theirs: torch.ones([_SIZES[c] for c in shape]) for _, theirs, shape in rows}


def _read(folder: Path) -> str:
    return command_error([*_IMPORT, str(folder), str(folder / "out.ckpt")])


@on_folder
def configured(folder: Path, **config: Any) -> str:
    """A sound model but for its configuration."""
    save_file(_model(folder, **config), folder / "model.safetensors")
    return _read(folder)


@on_folder
def changed(folder: Path, change: Callable[[_Tensors], object]) -> str:
    """A sound model but for its tensors."""
    tensors = _model(folder)
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return _read(folder)


@on_folder
def filed(folder: Path, write: Callable[[Path, _Tensors], object]) -> str:
    """A sound model but for its files, which `write` writes."""
    write(folder, _model(folder))
    return _read(folder)


def _indexed(weight_map: Any) -> Callable[[Path], str]:
    def write(folder: Path, tensors: _Tensors) -> None:
        save_file(tensors, folder / "model-1.safetensors")
        text = json.dumps({"weight_map": weight_map})
        (folder / "model.safetensors.index.json").write_text(text)

    return filed(write)


def _bytes(name: str, content: bytes) -> Callable[[Path], str]:
    return filed(lambda folder, _: (folder / name).write_bytes(content))


def _own_output(folder: Path) -> str:
    save_file(_model(folder), folder / "model.safetensors")
    (folder / "out.ckpt").write_text("mine")
    return _read(folder)


@on_folder
def _classified(folder: Path, labels: list[str], **config: Any) -> str:
    """A classifier of three classes, converted with these labels."""
    named = {"architectures": ["BertForSequenceClassification"], **config}
    (folder / "config.json").write_text(json.dumps({**_CONFIG, **named}))
    rows = Layout("bert", 1, frozenset({"pooler", "labels"})).rows()
    tensors = {theirs: torch.ones([_SIZES[c] for c in shape]) for _, theirs, shape in rows}
    save_file(tensors, folder / "model.safetensors")
    words = ["--labels", *labels] if labels else []
    return command_error([*_IMPORT, str(folder), str(folder / "out.ckpt"), *words])


def _masked_with_labels(folder: Path) -> str:
    save_file(_model(folder), folder / "model.safetensors")
    words = [*_IMPORT, str(folder), str(folder / "out.ckpt"), "--labels", "good", "bad"]
    return command_error(words)


def _import_cases() -> Iterator[Case]:
    case = partial(Case, "BERT and RoBERTa (read from transformers' files)")
    yield case("no such folder", lambda f: _read(f / "nowhere"))
    yield case("no config.json", _read)
    yield case("no weights", filed(lambda folder, _: None))
    yield case("weights of TensorFlow only", _bytes("tf_model.h5", b"weights"))
    yield case("a cut config.json", _bytes("config.json", b'{"model'))
    yield case("config.json holds a list", _bytes("config.json", b"[]"))
    yield case("the output exists", _own_output)
    yield case("a cut safetensors file", _bytes("model.safetensors", b"\t"))
    yield case("a file that is not a pickle", _bytes("pytorch_model.bin", b"weights"))
    yield case(
        "a list instead of tensors",
        filed(lambda folder, _: torch.save([1], folder / "pytorch_model.bin")),
    )
    yield case(
        "it needs code to load",
        filed(lambda folder, _: torch.save({"a": Case}, folder / "pytorch_model.bin")),
    )
    yield case("an index without files", _indexed({}))
    three = {"id2label": {"0": "yes", "1": "no", "2": "maybe"}}
    yield case("labels of another model", _classified(["yes", "no", "never"], **three))
    yield case("one label too few", _classified(["yes", "no"], **three))
    yield case("labels of a masked language model", _masked_with_labels)
    yield case("id2label lacks a class", _classified([], id2label={"0": "yes", "2": "no"}))
    yield case("an index of another folder", _indexed({"a": "../model-1.safetensors"}))
    yield case("a part is missing", _indexed({"a": "model-2.safetensors"}))
    yield case("a part lacks a tensor", _indexed({"a": "model-1.safetensors"}))
    for given, config in {
        "another model_type": {"model_type": "robert"},
        "no model_type": {"model_type": None},
        "architectures are a number": {"architectures": 3},
        "another architecture": {"architectures": ["BertForTokenClassification"]},
        "another activation": {"hidden_act": "gelu_new"},
        "relu with a head for masked words": {"hidden_act": "relu"},
        "relative positions": {"position_embedding_type": "relative_key"},
        "a decoder": {"is_decoder": True},
        "cross-attention": {"add_cross_attention": True},
        "pruned heads": {"pruned_heads": {"0": [1]}},
        "embeddings of another size": {"embedding_size": 3},
        "heads that do not divide the width": {"num_attention_heads": 3},
        "no layers": {"num_hidden_layers": 0},
        "a size that is no number": {"hidden_size": "4"},
        "a size that is null": {"intermediate_size": None},
        "a dropout that is no number": {"hidden_dropout_prob": "0.1"},
        "a dropout above 1": {"attention_probs_dropout_prob": 10},
        "an epsilon that is null": {"layer_norm_eps": None},
        "a RoBERTa whose padding is null": {
            **{"model_type": "roberta", "architectures": None, "pad_token_id": None},
        },
        "more layers than it has": {"num_hidden_layers": 2},
        "a RoBERTa without positions": {
            **{"model_type": "roberta", "architectures": None},
            **{"max_position_embeddings": 2},
        },
        "another vocabulary": {"vocab_size": 8},
    }.items():
        yield case(given, configured(**config))
    table = "bert.embeddings.word_embeddings.weight"
    yield case("a tensor is missing", changed(lambda t: t.pop("bert.embeddings.LayerNorm.bias")))
    yield case("a tensor too many", changed(lambda t: t.update(extra=torch.ones(1))))
    yield case(
        "a name with a slip",
        changed(lambda t: t.update({table.replace("word_", "words_"): t.pop(table)})),
    )
    yield case(
        "an output layer of its own",
        changed(lambda t: t.update({"cls.predictions.decoder.weight": 2 * t[table]})),
    )
    yield case("two heads", changed(lambda t: t.update({"qa_outputs.weight": torch.ones(2, 4)})))


# ---- written -----------------------------------------------------------------------------------


@on_folder
def exported(
    folder: Path,
    sizes: dict[str, Any] | None = None,
    attention: str = "SoftmaxAttention",
    options: dict[str, Any] | None = None,
    words: tuple[str, ...] = (),
    **tensors: Tensor | None,
) -> str:
    """A checkpoint of ours that has no place in a BERT; None takes a tensor out."""
    rows = Layout("bert", 1, frozenset({"words"})).rows()
    state: dict[str, Any] = {ours: torch.ones([_SIZES[c] for c in s]) for ours, _, s in rows}
    for name, tensor in tensors.items():
        key = name.replace("__", ".")
        state[key] = tensor
    state = {f"model.{name}": tensor for name, tensor in state.items() if tensor is not None}
    path = folder / "own.ckpt"
    torch.save({"state_dict": state, "hyper_parameters": {"head_dim": 2, **(sizes or {})}}, path)
    entry = {"class_path": f"lit_probattn.attention.{attention}", "init_args": {"num_heads": 2}}
    entry["init_args"] |= options or {}  # type: ignore[operator]
    text = yaml.safe_dump({"model": {"init_args": {"attention": entry}}})
    if "--no-config" not in words:
        path.with_suffix(".yaml").write_text(text)
    if "--taken" in words:
        (folder / "out").mkdir()
        (folder / "out/config.json").write_text("mine")
    rest = [word for word in words if word not in ("--no-config", "--taken")]
    return command_error(["convert", "to_transformers", str(path), str(folder / "out"), *rest])


def _export_cases() -> Iterator[Case]:
    case = partial(Case, "BERT and RoBERTa (written in transformers' files)")
    yield case("MGK", exported(attention="MGKAttention", options={"num_components": 2}))
    yield case("scores of a Gaussian", exported(options={"score": "gaussian"}))
    yield case("attention without biases", exported(options={"bias": False}))
    yield case("grouped heads", exported(options={"num_kv_heads": 1}))
    yield case("heads that do not make up the width", exported({"head_dim": 3}))
    yield case("pre-norm blocks", exported({"norm_first": True}))
    yield case("relu with a head for masked words", exported({"activation": "relu"}))
    yield case(
        "positions in two tables",
        exported({"position_period": 6}, positions__blocks__weight=torch.ones(2, 4)),
    )
    yield case("another model", exported(tokens__weight=None))
    yield case("a tensor is missing", exported(norm__bias=None))
    yield case("a tensor too many", exported(extra=torch.ones(1)))
    yield case(
        "next sentences of a RoBERTa",
        exported(words=("--model_type", "roberta"), next_sentence__weight=torch.ones(2, 4)),
    )
    yield case("no configuration", exported(words=("--no-config",)))
    yield case("the output exists", exported(words=("--taken",)))


def cases() -> Iterator[Case]:
    """Read and written."""
    yield from _import_cases()
    yield from _export_cases()
