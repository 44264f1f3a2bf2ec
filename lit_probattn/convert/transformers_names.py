"""Parameter names of BERT and RoBERTa in transformers and here: one table for both directions.

BERT        bert.embeddings …, bert.encoder.layer.0 …, cls.predictions …, qa_outputs, classifier
RoBERTa     roberta. … likewise, lm_head …, qa_outputs, classifier.dense, classifier.out_proj
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from lit_probattn.base.errors import ConfigError, nearest

Family = Literal["bert", "roberta"]
FAMILIES: tuple[Family, ...] = ("bert", "roberta")
# Optional parts of a model, in addition to the encoder.
Part = Literal["pooler", "words", "next_sentence", "spans", "labels"]

# Name here, name in transformers, and shape of the weight; the bias has its first dimension.
# V vocabulary, N positions, T token types, C width, I MLP width, L labels; {} is the layer index.
_Row = tuple[str, str, str]
_EMBEDDINGS: tuple[_Row, ...] = (
    ("tokens", "embeddings.word_embeddings", "VC"),
    ("positions.offsets", "embeddings.position_embeddings", "NC"),
    ("token_types", "embeddings.token_type_embeddings", "TC"),
)
_LAYER: tuple[_Row, ...] = (
    ("attention.query_proj", "attention.self.query", "CC"),
    ("attention.key_proj", "attention.self.key", "CC"),
    ("attention.value_proj", "attention.self.value", "CC"),
    ("attention.out_proj", "attention.output.dense", "CC"),
    ("norm1", "attention.output.LayerNorm", "C"),
    ("mlp.fc1", "intermediate.dense", "IC"),
    ("mlp.fc2", "output.dense", "CI"),
    ("norm2", "output.LayerNorm", "C"),
)
_POOLER: tuple[_Row, ...] = (("pooler", "pooler.dense", "CC"),)  # behind the encoder's prefix
_HEADS: dict[Family, dict[Part, tuple[_Row, ...]]] = {
    "bert": {
        "words": (
            ("head.0", "cls.predictions.transform.dense", "CC"),
            ("head.2", "cls.predictions.transform.LayerNorm", "C"),
        ),
        "next_sentence": (("next_sentence", "cls.seq_relationship", "2C"),),
        "spans": (("spans", "qa_outputs", "2C"),),
        "labels": (("classifier", "classifier", "LC"),),
    },
    "roberta": {
        "words": (("head.0", "lm_head.dense", "CC"), ("head.2", "lm_head.layer_norm", "C")),
        "spans": (("spans", "qa_outputs", "2C"),),
        "labels": (
            ("pooler", "classifier.dense", "CC"),
            ("classifier", "classifier.out_proj", "LC"),
        ),
    },
}
# Name of the output bias, and of tied duplicates.
_WORD_BIAS: dict[Family, str] = {"bert": "cls.predictions.bias", "roberta": "lm_head.bias"}
_DECODER: dict[Family, str] = {
    "bert": "cls.predictions.decoder",
    "roberta": "lm_head.decoder",
}
# Buffers in old files, and old names of layer-norm parameters.
_BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")
_OLD = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}

# Class suffixes in transformers by parts, without `pooler`.
_CLASSES: dict[frozenset[Part], str] = {
    frozenset(): "Model",
    frozenset({"words"}): "ForMaskedLM",
    frozenset({"words", "next_sentence"}): "ForPreTraining",
    frozenset({"spans"}): "ForQuestionAnswering",
    frozenset({"labels"}): "ForSequenceClassification",
}
_STEMS: dict[Family, str] = {"bert": "Bert", "roberta": "Roberta"}


@dataclass(frozen=True)
class Layout:
    """Layout of a model file of transformers.

    Args:
        family: bert or roberta.
        num_layers: number of blocks.
        parts: heads of the model, and `pooler`.
        bare: whether encoder names lack the family prefix, as in files of `BertModel`.
    """

    family: Family
    num_layers: int
    parts: frozenset[Part]
    bare: bool = False

    def rows(self) -> Iterator[_Row]:
        """Yield the two names and the shape of each parameter."""
        prefix = "" if self.bare else f"{self.family}."
        for ours, theirs, shape in _EMBEDDINGS:
            yield f"{ours}.weight", f"{prefix}{theirs}.weight", shape
        yield from _both("norm", f"{prefix}embeddings.LayerNorm", "C")
        for number in range(self.num_layers):
            for ours, theirs, shape in _LAYER:
                place = (
                    f"encoder.blocks.{number}.{ours}",
                    f"{prefix}encoder.layer.{number}.{theirs}",
                )
                yield from _both(*place, shape)
        if "pooler" in self.parts:
            for ours, theirs, shape in _POOLER:
                yield from _both(ours, prefix + theirs, shape)
        for part, rows in _HEADS[self.family].items():
            if part in self.parts:
                for row in rows:
                    yield from _both(*row)
        if "words" in self.parts:
            yield "output.bias", _WORD_BIAS[self.family], "V"

    def names(self) -> dict[str, str]:
        """Return the mapping from names here to names in transformers."""
        return {ours: theirs for ours, theirs, _ in self.rows()}

    @property
    def architecture(self) -> str:
        """Name of the transformers class with these parts."""
        return _STEMS[self.family] + _CLASSES[self.parts - {"pooler"}]


def _both(ours: str, theirs: str, shape: str) -> Iterator[_Row]:
    yield f"{ours}.weight", f"{theirs}.weight", shape
    yield f"{ours}.bias", f"{theirs}.bias", shape[0]


def architectures() -> set[str]:
    """Return the supported classes of transformers."""
    heads = {family: {*_HEADS[family]} for family in FAMILIES}
    return {
        _STEMS[family] + name
        for family in FAMILIES
        for parts, name in _CLASSES.items()
        if parts <= heads[family]
    }


# ---- from transformers -------------------------------------------------------------------------


def tidy(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors under current names, without buffers."""
    found = {}
    for name, tensor in tensors.items():
        for old, new in _OLD.items():
            if name.endswith(old):
                name = name.removesuffix(old) + new
        if not name.endswith(_BUFFERS):
            found[name] = tensor
    return found


def layout_of(family: Family, num_layers: int, names: Collection[str]) -> Layout:
    """Return the layout of a file with these names.

    Raises:
        ConfigError: no class of transformers has this combination of heads.
    """
    bare = not any(name.startswith(f"{family}.") for name in names)
    prefix = "" if bare else f"{family}."
    parts: set[Part] = {
        part
        for part, rows in _HEADS[family].items()
        if any(_has(names, theirs) for _, theirs, _ in rows)
    }
    if frozenset(parts) not in _CLASSES:
        raise ConfigError(
            f"the file has heads for {' and '.join(sorted(parts))}, a combination that no class of "
            "transformers has: save a single model"
        )
    if any(_has(names, prefix + theirs) for _, theirs, _ in _POOLER):
        parts.add("pooler")
    if family == "bert" and parts & {"labels", "next_sentence"}:
        parts.add("pooler")  # these heads require it, so its absence is reported
    return Layout(family, num_layers, frozenset(parts), bare)


def _has(names: Collection[str], stem: str) -> bool:
    return f"{stem}.weight" in names or f"{stem}.bias" in names


def drop_tied(layout: Layout, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors without tied duplicates.

    Raises:
        ConfigError: duplicates differ.
    """
    if "words" not in layout.parts:
        return tensors
    names = layout.names()
    stem, bias = _DECODER[layout.family], names["output.bias"]
    rest = dict(tensors)
    if bias not in rest and f"{stem}.bias" in rest:
        rest[bias] = rest.pop(f"{stem}.bias")
    for second, first in ((f"{stem}.bias", bias), (f"{stem}.weight", names["tokens.weight"])):
        tied = rest.pop(second, None)
        if tied is not None and first in rest and not tied.equal(rest[first]):
            raise ConfigError(
                f"{second} differs from {first}: untied output layers are not supported, only "
                "those tied to the token embeddings"
            )
    return rest


def to_ours(layout: Layout, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors under the names of this package.

    Raises:
        ConfigError: names are missing or unexpected; the message suggests the nearest.
    """
    names = layout.names()
    require_names(tensors, names.values())
    return {ours: tensors[theirs] for ours, theirs in names.items()}


def require_names(found: Collection[str], expected: Iterable[str]) -> None:
    """Raise a ConfigError that lists missing and unexpected names, each with the nearest match."""
    wanted = set(expected)
    missing, unexpected = sorted(wanted - set(found)), sorted(set(found) - wanted)
    problems = [
        _listed("missing", missing, unexpected),
        _listed("unexpected", unexpected, missing or sorted(wanted)),
    ]
    if missing or unexpected:
        raise ConfigError("; ".join(text for text in problems if text))


_MOST_LISTED = 6
_HINT = "; did you mean "


def _listed(what: str, names: list[str], others: list[str]) -> str:
    """Return the names with the nearest of the others, truncated to `_MOST_LISTED`."""
    if not names:
        return ""
    shown = []
    for name in names[:_MOST_LISTED]:
        hint = nearest(name, others)
        close = hint.startswith(_HINT)
        shown.append(f"{name} (near {hint.removeprefix(_HINT)[:-1]})" if close else name)
    more = len(names) - len(shown)
    return f"{what}: {', '.join(shown)}" + (f" and {more} more" if more else "")
