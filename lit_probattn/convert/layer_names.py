"""Names of attention layers in other code bases, and how their tensors map to ours.

Names of this package are those in the state dict of `lit_probattn.attention.layer.Attention`.
Weights are (output rows, input columns). Rows of `query_proj`, `key_proj` and `value_proj` are
ordered by head, then component (keys with K of them), then entry; columns of `out_proj` by head,
then entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_probattn.attention import Attention
from lit_probattn.base.errors import ConfigError, nearest
from lit_probattn.convert.files import require_no_hooks
from lit_probattn.convert.transformers_names import require_names

# Computes a tensor of this package from source tensors, for a given layer.
Read = Callable[[Sequence[Tensor], Attention], Tensor]


@dataclass(frozen=True)
class Row:
    """Mapping to one tensor of this package.

    Args:
        ours: its name; {kind} is a placeholder for weight and bias.
        theirs: names of the source tensors.
        read: function that computes the tensor.
    """

    ours: str
    theirs: tuple[str, ...]
    read: Read

    def each(self) -> Iterator[Row]:
        """Yield the row, or one row each for weight and bias."""
        for kind in ("weight", "bias") if "{kind}" in self.ours else ("",):
            names = tuple(name.format(kind=kind) for name in self.theirs)
            yield Row(self.ours.format(kind=kind), names, self.read)


@dataclass(frozen=True)
class LayerNames:
    """Names of one kind of layer.

    Args:
        source: code base and class.
        rows: if two rows map to the same tensor, the first whose names are all present is used.
        ignored: prefixes of names outside attention: other modules, or buffers.
    """

    source: str
    rows: tuple[Row, ...]
    ignored: tuple[str, ...] = ()


# ---- how tensors are read ----------------------------------------------------------------------


def _same(tensors: Sequence[Tensor], layer: Attention) -> Tensor:
    return tensors[0]


def _transposed(tensors: Sequence[Tensor], layer: Attention) -> Tensor:
    return tensors[0].T


def _joint(part: int, turned: bool = False) -> Read:
    """Return the reader of query, key or value from a joint projection of all three in order."""

    def read(tensors: Sequence[Tensor], layer: Attention) -> Tensor:
        whole = tensors[0].T if turned else tensors[0]
        projections = (layer.query_proj, layer.key_proj, layer.value_proj)
        sizes = [projection.out_features for projection in projections]
        if sum(sizes) != whole.shape[0]:
            raise ConfigError(
                f"the joint projection has {whole.shape[0]} rows, expected "
                f"{' + '.join(map(str, sizes))}"
            )
        return whole.split(sizes)[part]

    return read


def _chunks(count: int, *parts: int) -> Read:
    """Return the reader of components from a projection of `count` equal parts."""

    def read(tensors: Sequence[Tensor], layer: Attention) -> Tensor:
        found = tensors[0].chunk(count)
        return _components([found[part] for part in parts], layer)

    return read


def _by_head(count: int, *parts: int) -> Read:
    """Return the reader of components where the parts of each head are adjacent."""

    def read(tensors: Sequence[Tensor], layer: Attention) -> Tensor:
        found = tensors[0].unflatten(0, (layer.num_heads, count, -1)).unbind(1)
        return _components([found[part].flatten(0, 1) for part in parts], layer)

    return read


def _components(tensors: Sequence[Tensor], layer: Attention) -> Tensor:
    """Interleave projections of one component each: rows by head, component and entry."""
    by_head = [tensor.unflatten(0, (layer.num_kv_heads, -1)) for tensor in tensors]
    return torch.stack(by_head, 1).flatten(0, 2)


def _means(tensors: Sequence[Tensor], layer: Attention) -> Tensor:
    """Return shifts b = −μ, (H, 2, E), from μ (2, H, E)."""
    return -tensors[0].transpose(0, 1)


def _by_position(tensors: Sequence[Tensor], layer: Attention) -> Tensor:
    """Stack the priors of both components, each (H, …, L), into (H, 2, L)."""
    return torch.stack([tensor.flatten(1) for tensor in tensors], 1)


def _first_of_two(tensors: Sequence[Tensor], layer: Attention) -> Tensor:
    """Return priors (H, 2, L) from those of the first component; each pair sums to 1."""
    first = tensors[0].flatten(1)
    return torch.stack([first, 1.0 - first], 1)


def _of_layer(tensors: Sequence[Tensor], layer: Attention) -> Tensor:
    """Return one pair of priors as it is, or expand priors of the first component, (H, L)."""
    return tensors[0] if tensors[0].dim() == 1 else _first_of_two(tensors, layer)


# ---- the table ---------------------------------------------------------------------------------


def _four(query: str, key: str, value: str, out: str) -> tuple[Row, ...]:
    """Return the rows of four separate projections."""
    ours = ("query_proj", "key_proj", "value_proj", "out_proj")
    named = zip(ours, (query, key, value, out), strict=True)
    return tuple(Row(f"{one}.{{kind}}", (f"{name}.{{kind}}",), _same) for one, name in named)


def _three_in_one(joint: str, out: str) -> tuple[Row, ...]:
    """Return the rows of a joint projection; `joint` and `out` contain {kind}."""
    parts = ("query_proj", "key_proj", "value_proj")
    rows = [Row(f"{part}.{{kind}}", (joint,), _joint(i)) for i, part in enumerate(parts)]
    return (*rows, Row("out_proj.{kind}", (out,), _same))


_PRIOR, _SHIFT = "core.prior.value", "core.key_shift"
_SHIFTS = Row(_SHIFT, ("mu",), _means)
_LRA = _four("W_q", "W_k", "W_v", "ff")
_TWO_KEYS = Row("key_proj.{kind}", ("W_k.{kind}", "W_k2.{kind}"), _components)
_LM = (
    Row("query_proj.weight", ("q_net.weight",), _same),
    Row("out_proj.weight", ("o_net.weight",), _same),
)
_LM_OWN = (
    Row("key_proj.weight", ("kv_net.weight",), _chunks(2, 0)),
    Row("value_proj.weight", ("kv_net.weight",), _chunks(2, 1)),
)
_LM_PRIORS = (
    Row(_PRIOR, ("pi0", "pi1"), _by_position),
    Row(_PRIOR, ("pi",), _first_of_two),
)
_NORM = ("layer_norm.",)


def _fast_weights(count: int, *keys: int) -> tuple[Row, ...]:
    """Return the rows of linear attention in the language models, with adjacent parts per head."""
    return (
        Row("query_proj.weight", ("qkv_net.weight",), _by_head(count, 0)),
        Row("key_proj.weight", ("qkv_net.weight",), _by_head(count, *keys)),
        Row("value_proj.weight", ("qkv_net.weight",), _by_head(count, count - 1)),
        Row("out_proj.weight", ("o_net.weight",), _same),
    )


def _mixing(name: str, layers: int) -> tuple[Row, ...]:
    """Return the rows of a mixing MLP with ReLUs; its last bias is separate in this package."""
    rows = []
    for number in range(layers):
        theirs, last = f"{name}.{2 * number}", number == layers - 1
        bias = "core.mixing.last_bias" if last else f"core.mixing.biases.{number}"
        rows.append(Row(f"core.mixing.weights.{number}", (f"{theirs}.weight",), _same))
        rows.append(Row(bias, (f"{theirs}.bias",), _same))
    return tuple(rows)


_NOISE = Row("core.noise_scale.theta", ("sigma_noise",), _same)
_FISH_LM = _four("q_net", "k_net", "v_net", "o_net")
_HDP = _four("q_proj", "k_proj", "v_proj", "out_proj")
_POSITIONS = ("relative_position_",)
_BERT = _four("self.query", "self.key", "self.value", "output.dense")
_MGK_CODE, _FISH_CODE = "minhtannguyen/transformer-mgk", "minhtannguyen/FishFormer"

LAYOUTS: dict[str, LayerNames] = {
    # torch, timm, transformers
    "torch": LayerNames(
        "torch.nn.MultiheadAttention",
        (
            *_three_in_one("in_proj_{kind}", "out_proj.{kind}"),
            Row("query_proj.weight", ("q_proj_weight",), _same),  # when the key width differs
            Row("key_proj.weight", ("k_proj_weight",), _same),
            Row("value_proj.weight", ("v_proj_weight",), _same),
        ),
    ),
    "timm": LayerNames(
        "timm, Attention of a ViT and WindowAttention of a Swin",
        _three_in_one("qkv.{kind}", "proj.{kind}"),
        _POSITIONS,
    ),
    "bert": LayerNames("transformers, BertAttention", _BERT, ("output.LayerNorm.",)),
    "roberta": LayerNames("transformers, RobertaAttention", _BERT, ("output.LayerNorm.",)),
    "gpt2": LayerNames(
        "transformers, GPT2Attention",
        (
            *(
                Row(f"{part}.{kind}", (f"c_attn.{kind}",), _joint(i, turned=kind == "weight"))
                for i, part in enumerate(("query_proj", "key_proj", "value_proj"))
                for kind in ("weight", "bias")
            ),
            Row("out_proj.weight", ("c_proj.weight",), _transposed),
            Row("out_proj.bias", ("c_proj.bias",), _same),
        ),
        ("bias", "masked_bias"),
    ),
    # MGK, Long Range Arena
    "lra": LayerNames(f"{_MGK_CODE}, lra, Attention: softmax or linear", _LRA),
    "lra_mgk": LayerNames(
        f"{_MGK_CODE}, lra, Attention with key2: softmax or linear",
        (*_LRA[:1], _TWO_KEYS, *_LRA[2:], Row(_PRIOR, ("attn.pi",), _of_layer)),
    ),
    "lra_smgk": LayerNames(
        f"{_MGK_CODE}, lra, Attention with multi_gauss, softmax",
        (
            *_LRA,
            Row(_SHIFT, ("attn.multi_gauss_kernel.mu",), _means),
            Row(_PRIOR, ("attn.multi_gauss_kernel.pi",), _of_layer),
        ),
        ("attn.pi",),  # the same tensor under a second name
    ),
    "lra_smlk": LayerNames(
        f"{_MGK_CODE}, lra, Attention with multi_gauss, linear",
        (*_LRA, Row(_SHIFT, ("attn.mu",), _means), Row(_PRIOR, ("attn.pi",), _of_layer)),
    ),
    # MGK, language model
    "lm": LayerNames(f"{_MGK_CODE}, language model, MultiHeadAttn", (*_LM, *_LM_OWN), _NORM),
    "lm_mgk": LayerNames(
        f"{_MGK_CODE}, language model, MGKAttn with two keys",
        (
            *_LM,
            Row("key_proj.weight", ("kv_net.weight",), _chunks(3, 0, 1)),
            Row("value_proj.weight", ("kv_net.weight",), _chunks(3, 2)),
            *_LM_PRIORS,
        ),
        _NORM,
    ),
    "lm_smgk": LayerNames(
        f"{_MGK_CODE}, language model, MGKAttn with shifts",
        (*_LM, *_LM_OWN, _SHIFTS, *_LM_PRIORS),
        _NORM,
    ),
    "lm_linear": LayerNames(
        f"{_MGK_CODE}, language model, linear fast weights", _fast_weights(3, 1), _NORM
    ),
    "lm_mlk": LayerNames(
        f"{_MGK_CODE}, language model, two linear keys",
        (*_fast_weights(4, 1, 2), *_LM_PRIORS),
        _NORM,
    ),
    "lm_smlk": LayerNames(
        f"{_MGK_CODE}, language model, linear keys with shifts",
        (*_fast_weights(3, 1), _SHIFTS, *_LM_PRIORS),
        _NORM,
    ),
    # MGK in translation
    "translation_mgk": LayerNames(
        f"{_FISH_CODE}, translation, MGKAttention",
        (
            *_HDP[:1],
            Row("key_proj.{kind}", ("k_proj1.{kind}", "k_proj2.{kind}"), _components),
            *_HDP[2:],
            Row(_PRIOR, ("pi",), _transposed),
        ),
    ),
    "translation_smgk": LayerNames(
        f"{_FISH_CODE}, translation, SMGKAttention",
        (*_HDP, _SHIFTS, Row(_PRIOR, ("pi",), _transposed)),
    ),
    # FiSH
    "fish_lm": LayerNames(
        f"{_FISH_CODE}, language model, HDPAttn",
        (*_FISH_LM, *_mixing("hdp_net", 2), _NOISE),
        _NORM,
    ),
    "fish_lm_mish": LayerNames(
        f"{_FISH_CODE}, language model, MixtureAttn",
        (*_FISH_LM, Row("core.mixing.weights.0", ("hdp_net.weight",), _same), _NOISE),
        _NORM,
    ),
    "fish_translation": LayerNames(
        f"{_FISH_CODE}, translation, HDPAttention",
        (*_HDP, *_mixing("hdp_net", 2), _NOISE),
    ),
    "fish_swin": LayerNames(
        f"{_FISH_CODE}, images, WindowAttention_HDP with two ratios",
        (*_three_in_one("qkv.{kind}", "proj.{kind}"), *_mixing("hdp_proj", 2)),
        _POSITIONS,
    ),
    "fish_swin_linear": LayerNames(
        f"{_FISH_CODE}, images, WindowAttention_HDP with one ratio",
        (*_three_in_one("qkv.{kind}", "proj.{kind}"), *_mixing("hdp_proj", 1)),
        _POSITIONS,
    ),
}


# ---- reading -----------------------------------------------------------------------------------


def layer_state(layout: str, tensors: Mapping[str, Tensor], layer: Attention) -> dict[str, Tensor]:
    """Return the state dict of a layer from that of a layer in another code base.

    Args:
        layout: one of `LAYOUTS`.
        tensors: state dict of the source layer; norms and buffers outside attention are ignored.
        layer: the target layer; it is not changed.

    Raises:
        ConfigError: unknown layout, missing or unexpected names, or shapes that differ.
    """
    rows = _chosen(layout, tensors, layer)
    names = {name for row in rows.values() for name in row.theirs}
    ignored = LAYOUTS[layout].ignored
    require_names([name for name in tensors if not _is_ignored(name, names, ignored)], names)
    found = {}
    for ours, own in layer.state_dict().items():
        row = rows[ours]
        try:
            tensor = row.read([tensors[name] for name in row.theirs], layer)
        except RuntimeError as error:
            raise ConfigError(
                f"{' and '.join(row.theirs)}: shapes do not match {layer.num_heads} heads of size "
                f"{layer.head_dim}: {' '.join(str(error).split())}"
            ) from error
        if tensor.shape != own.shape:
            raise ConfigError(
                f"{' and '.join(row.theirs)}: expected shape {tuple(own.shape)} for {ours}, "
                f"received {tuple(tensor.shape)}; build the layer with the sizes of the source"
            )
        found[ours] = tensor.contiguous()
    return found


def load_layer(layout: str, tensors: Mapping[str, Tensor], layer: Attention) -> None:
    """Load the weights of a layer in another code base; see `layer_state`."""
    layer.load_state_dict(layer_state(layout, tensors, layer))


def _chosen(layout: str, tensors: Mapping[str, Tensor], layer: Attention) -> dict[str, Row]:
    """Return the row that applies to each tensor of the layer."""
    if layout not in LAYOUTS:
        raise ConfigError(f"unknown layout {layout!r}{nearest(layout, LAYOUTS)}")
    require_no_hooks(layer)
    rows: dict[str, Row] = {}
    for row in (one for rows_of in LAYOUTS[layout].rows for one in rows_of.each()):
        complete = row.ours in rows and all(name in tensors for name in rows[row.ours].theirs)
        if not complete:
            rows.setdefault(row.ours, row)
            if all(name in tensors for name in row.theirs):
                rows[row.ours] = row
    own = layer.state_dict()
    lacking = [name for name in own if name not in rows]
    if lacking:
        raise ConfigError(
            f"layout {layout} ({LAYOUTS[layout].source}) has no source for {', '.join(lacking)} of "
            f"{type(layer).__name__}: use the layer class of that layout"
        )
    return {name: rows[name] for name in own}


def _is_ignored(name: str, wanted: set[str], ignored: tuple[str, ...]) -> bool:
    return name not in wanted and name.startswith(ignored)
