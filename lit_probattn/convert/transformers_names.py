"""Names of BERT's and RoBERTa's weights in transformers beside ours: one table, read both ways.

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
# Parts of a model that a file may have, beside the encoder.
Part = Literal["pooler", "words", "next_sentence", "spans", "labels"]

# Ours, theirs, and the shape of the weight; a bias, where there is one, has its first size.
# V words, N positions, T token types, C width, I inner width, L labels. {} is the layer's number.
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
# Where the bias of words stands, and the second names of what is tied to others.
_WORD_BIAS: dict[Family, str] = {"bert": "cls.predictions.bias", "roberta": "lm_head.bias"}
_DECODER: dict[Family, str] = {
    "bert": "cls.predictions.decoder",
    "roberta": "lm_head.decoder",
}
# Buffers in old files, and old names of the parameters of layer norms.
_BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")
_OLD = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}

# Classes of transformers by the parts that they have, `pooler` apart.
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
    """What a file of transformers holds.

    Args:
        family: bert or roberta.
        num_layers: blocks.
        parts: heads, and `pooler`, that it has.
        bare: whether the encoder's names lack their prefix, as in files of `BertModel`.
    """

    family: Family
    num_layers: int
    parts: frozenset[Part]
    bare: bool = False

    def rows(self) -> Iterator[_Row]:
        """Yield ours, theirs and the shape of every parameter."""
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
        """Return theirs by ours."""
        return {ours: theirs for ours, theirs, _ in self.rows()}

    @property
    def architecture(self) -> str:
        """The class of transformers that has these parts."""
        return _STEMS[self.family] + _CLASSES[self.parts - {"pooler"}]


def _both(ours: str, theirs: str, shape: str) -> Iterator[_Row]:
    yield f"{ours}.weight", f"{theirs}.weight", shape
    yield f"{ours}.bias", f"{theirs}.bias", shape[0]


def architectures() -> set[str]:
    """Return the classes of transformers that are read."""
    heads = {family: {*_HEADS[family]} for family in FAMILIES}
    return {
        _STEMS[family] + name
        for family in FAMILIES
        for parts, name in _CLASSES.items()
        if parts <= heads[family]
    }


# ---- from theirs to ours -----------------------------------------------------------------------


def tidy(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors under today's names, without buffers."""
    found = {}
    for name, tensor in tensors.items():
        for old, new in _OLD.items():
            if name.endswith(old):
                name = name.removesuffix(old) + new
        if not name.endswith(_BUFFERS):
            found[name] = tensor
    return found


def layout_of(family: Family, num_layers: int, names: Collection[str]) -> Layout:
    """Return the layout of a file that has these names.

    Raises:
        ConfigError: heads come together that no class of transformers has.
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
            f"the file has heads for {' and '.join(sorted(parts))} together, which no class of "
            "transformers has: save one model"
        )
    if any(_has(names, prefix + theirs) for _, theirs, _ in _POOLER):
        parts.add("pooler")
    if family == "bert" and parts & {"labels", "next_sentence"}:
        parts.add("pooler")  # they read it: without it, it is missing
    return Layout(family, num_layers, frozenset(parts), bare)


def _has(names: Collection[str], stem: str) -> bool:
    return f"{stem}.weight" in names or f"{stem}.bias" in names


def drop_tied(layout: Layout, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors without those that are others under a second name.

    Raises:
        ConfigError: they are not equal.
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
                f"{second} is not {first}: an output layer of its own cannot be kept, only one "
                "that is tied to the table of words"
            )
    return rest


def to_ours(layout: Layout, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors by our names.

    Raises:
        ConfigError: names are missing or unexpected; the message gives the nearest.
    """
    names = layout.names()
    require_names(tensors, names.values())
    return {ours: tensors[theirs] for ours, theirs in names.items()}


def require_names(found: Collection[str], expected: Iterable[str]) -> None:
    """Raise a ConfigError that lists missing and unexpected names, with the nearest."""
    wanted = set(expected)
    missing, unexpected = sorted(wanted - set(found)), sorted(set(found) - wanted)
    told = [
        _listed("missing", missing, unexpected),
        _listed("unexpected", unexpected, missing or sorted(wanted)),
    ]
    if missing or unexpected:
        raise ConfigError("; ".join(text for text in told if text))


_MOST_LISTED = 6
_HINT = "; did you mean "


def _listed(what: str, names: list[str], others: list[str]) -> str:
    """Return names, each with the nearest of the others, and how many more there are."""
    if not names:
        return ""
    shown = []
    for name in names[:_MOST_LISTED]:
        hint = nearest(name, others)
        close = hint.startswith(_HINT)
        shown.append(f"{name} (near {hint.removeprefix(_HINT)[:-1]})" if close else name)
    more = len(names) - len(shown)
    return f"{what}: {', '.join(shown)}" + (f" and {more} more" if more else "")
