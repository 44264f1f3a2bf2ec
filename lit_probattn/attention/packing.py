"""Packed documents: many short sequences in one, each of which attends only to itself.

Documents are grouped by length into ordinary calls, one document per row with padding at the end,
and outputs are scattered back to the positions of their tokens. All variants and engines therefore
support packing, positions restart in each document, and time is proportional to the sum of squared
lengths.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lit_probattn.base.graphs import written
from lit_probattn.randomness import RandomKey

# Most by which a group's longest document exceeds its shortest: a factor, or a number of tokens.
_LONGER, _MORE_TOKENS = 1.25, 8


@dataclass(frozen=True)
class Group:
    """Documents that are computed in one call.

    Args:
        documents: their numbers, (D,) int64.
        queries: indices of their tokens among all queries, (D, N) int64; a shorter document repeats
            its last token.
        keys: indices of their tokens among all keys, (D, L) int64.
        real_queries: which queries are real tokens, (D, N) bool. None means all.
        real_keys: which keys are real tokens, (D, L) bool. None means all.
    """

    documents: Tensor
    queries: Tensor
    keys: Tensor
    real_queries: Tensor | None
    real_keys: Tensor | None

    def to(self, device: torch.device) -> Group:
        """Return a copy of the group on a device."""
        parts = (self.documents, self.queries, self.keys, self.real_queries, self.real_keys)
        return Group(*(x if x is None else x.to(device) for x in parts))  # type: ignore[arg-type]

    def key_of(self, key: RandomKey | None, num_documents: int) -> RandomKey | None:
        """Return the key for the draws of these documents, from a key of all documents.

        Raises:
            ValueError: the number of `sample_ids` differs from the number of documents.
        """
        if key is None:
            return None
        ids = key.samples(num_documents, self.documents.device)
        return replace(key, sample_ids=ids[self.documents])

    def key_mask(self, given: Tensor | None, has_last: bool = False) -> Tensor | None:
        """Return the mask of the group's keys, (D, L) bool, or None if no key is masked.

        Args:
            given: real keys of the packed call, (B, L).
            has_last: whether real queries never attend to padding, as with a causal mask.
        """
        own = None if has_last else self.real_keys
        if given is None:
            return own
        known = given.flatten()[self.keys]
        return known if own is None else known & own


class Packing:
    """Bounds of packed documents, built once per batch and passed to every layer as `cu_seqlens`.

    The tokens of a batch (B, N) are counted row by row; documents are adjacent, and none crosses
    the end of a row. Lengths of 0 are allowed.

    Args:
        cu_seqlens: bounds over the B · N queries, (D + 1,) integers from 0 to B · N, as in
            `torch.nn.attention.varlen`. A tensor on another device than the CPU synchronises.
        cu_seqlens_k: bounds over the keys in cross-attention. None means the bounds of the queries.

    Raises:
        ValueError: bounds are not ascending integers from 0, or the number of documents differs
            between queries and keys.
        NotImplementedError: the call is exported; the program would contain these bounds.
    """

    def __init__(self, cu_seqlens: Tensor, cu_seqlens_k: Tensor | None = None) -> None:
        self.bounds = _bounds("cu_seqlens", cu_seqlens)
        self.is_self = cu_seqlens_k is None
        self.key_bounds = self.bounds
        if cu_seqlens_k is not None:
            self.key_bounds = _bounds("cu_seqlens_k", cu_seqlens_k)
            if len(self.bounds) != len(self.key_bounds):
                raise ValueError(
                    f"cu_seqlens bounds {self.num_documents} documents and cu_seqlens_k "
                    f"{len(self.key_bounds) - 1}: expected the same number"
                )
        self._groups: dict[tuple[bool, torch.device], list[Group]] = {}

    @property
    def num_documents(self) -> int:
        """D."""
        return len(self.bounds) - 1

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """Number of queries and of keys of every document."""
        queries, keys = (pairwise(bounds) for bounds in (self.bounds, self.key_bounds))
        return [(b - a, d - c) for (a, b), (c, d) in zip(queries, keys, strict=True)]

    def positions(self, batch_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the position of every query (B, N) and key (B, L) in its document.

        Positions are aligned at the end of a document, like `is_causal`: the last query has the
        position of the last key.
        """
        queries = [torch.arange(n) + (length - n) for n, length in self.lengths]
        keys = [torch.arange(length) for _, length in self.lengths]
        first, second = (torch.cat(parts).to(device) for parts in (queries, keys))
        return first.view(batch_size, -1), second.view(batch_size, -1)

    def longest(self, batch_size: int, num_queries: int) -> int:
        """Return the number of queries of the longest document of a batch (B, N).

        Raises:
            ValueError: the bounds do not cover the tokens.
        """
        self.check(batch_size, num_queries, num_queries)
        return max(count for count, _ in self.lengths)

    def per_token(self, values: Tensor) -> Tensor:
        """Return the entry of every query's document, (B · N, …) of values (D, …)."""
        counts = torch.tensor([count for count, _ in self.lengths], device=values.device)
        return values.repeat_interleave(counts, 0)

    def token_lengths(self, batch_size: int, device: torch.device) -> Tensor:
        """Return the number of queries of every query's document, (B, N)."""
        counts = torch.tensor([count for count, _ in self.lengths], device=device)
        return self.per_token(counts).view(batch_size, -1)

    def check(self, batch_size: int, num_queries: int, num_keys: int) -> None:
        """Check the bounds against a batch.

        Raises:
            ValueError: they do not cover its tokens, or a document crosses the end of a row.
        """
        for name, bounds, length in (
            ("cu_seqlens", self.bounds, num_queries),
            ("cu_seqlens" if self.is_self else "cu_seqlens_k", self.key_bounds, num_keys),
        ):
            if bounds[-1] != batch_size * length:
                raise ValueError(
                    f"{name} ends at {bounds[-1]}, expected {batch_size} x {length} tokens = "
                    f"{batch_size * length}"
                )
            missing = set(range(0, batch_size * length, max(1, length))) - set(bounds)
            if missing:
                raise ValueError(
                    f"{name} has no bound at {min(missing)}, the start of a row of {length} "
                    "tokens: a document cannot cross the end of a row"
                )

    def groups(self, device: torch.device, *, exact: bool = False) -> list[Group]:
        """Return the documents in groups of similar lengths, without documents without queries.

        Args:
            device: device of the groups' tensors.
            exact: whether all documents of a group have equal lengths, so that none is padded.
        """
        if (exact, device) not in self._groups:
            made = [self._group(group) for group in self._divided(exact)]
            self._groups[exact, device] = [group.to(device) for group in made]
        return self._groups[exact, device]

    def _divided(self, exact: bool) -> Iterator[list[int]]:
        lengths = self.lengths
        order = sorted((d for d, (n, _) in enumerate(lengths) if n), key=lambda d: lengths[d])
        group: list[int] = []
        for document in order:
            if group and not _fit(lengths[group[0]], lengths[document], exact):
                yield group
                group = []
            group.append(document)
        if group:
            yield group

    def _group(self, documents: list[int]) -> Group:
        lengths = torch.tensor([self.lengths[d] for d in documents])
        parts = []
        for bounds, length in zip((self.bounds, self.key_bounds), lengths.unbind(1), strict=True):
            begins = torch.tensor([bounds[d] for d in documents])[:, None]
            steps = torch.arange(int(length.max()))
            real = steps < length[:, None]
            last = (length[:, None] - 1).clamp(min=0)
            places = (begins + steps.minimum(last)).clamp(max=max(0, bounds[-1] - 1))
            parts.append((places, None if bool(real.all()) else real))
        (queries, real_queries), (keys, real_keys) = parts
        return Group(torch.tensor(documents), queries, keys, real_queries, real_keys)


def packing_of(
    cu_seqlens: Tensor | Packing | None, cu_seqlens_k: Tensor | None = None
) -> Packing | None:
    """Return the packing of a call's arguments.

    Raises:
        ValueError: see `Packing`; or `cu_seqlens_k` is passed with a packing, or alone.
    """
    if cu_seqlens_k is not None and not isinstance(cu_seqlens, Tensor):
        raise ValueError(
            "received cu_seqlens_k without cu_seqlens as a tensor: pass both, or "
            "Packing(cu_seqlens, cu_seqlens_k) as cu_seqlens"
        )
    if isinstance(cu_seqlens, Tensor):
        return Packing(cu_seqlens, cu_seqlens_k)
    return cu_seqlens


def nested_like(query: Tensor, out: Tensor) -> Tensor:
    """Return tokens (1, T, C) as a jagged tensor with the query's documents."""
    jagged: Any = query
    return torch.nested.nested_tensor_from_jagged(out[0], jagged.offsets())


def tokens_of_nested(*tensors: Tensor | None) -> tuple[list[Any], Packing]:
    """Return the tokens (1, T, C) of jagged query, key and value, and their packing.

    Raises:
        ValueError: one is not jagged along its positions, has holes, or is not nested like the
            query; or key and value have different lengths.
    """
    tokens: list[Any] = []
    bounds: list[Tensor] = []
    named: Any = zip(("query", "key", "value"), tensors, strict=True)
    for name, tensor in named:
        if tensor is None:
            tokens.append(None)
            continue
        jagged = tensor.is_nested and tensor.layout == torch.jagged and tensor.dim() == 3
        if not jagged or isinstance(tensor.shape[1], int) or tensor.lengths() is not None:
            raise ValueError(
                f"{name} is not a jagged tensor (documents, positions, width) without holes: build "
                "query, key and value with torch.nested.nested_tensor(…, layout=torch.jagged)"
            )
        tokens.append(tensor.values()[None])
        bounds.append(tensor.offsets().cpu())
    if len(bounds) == 3 and not bounds[1].equal(bounds[2]):
        raise ValueError("key and value have documents of different lengths: expected the same")
    return tokens, Packing(bounds[0], bounds[1] if len(bounds) > 1 else None)


def gather(heads: Tensor, places: Tensor) -> Tensor:
    """Return tokens of heads as rows, (B, …, N, E) -> (D, …, n, E), for indices (D, n)."""
    tokens = heads.movedim(0, -3).flatten(-3, -2)  # (…, B · N, E)
    chosen = tokens.index_select(-2, places.flatten())
    return chosen.unflatten(-2, tuple(places.shape)).movedim(-3, 0)


def scatter(parts: list[Tensor], groups: list[Group], batch_size: int) -> Tensor:
    """Return the outputs of all groups at the positions of their tokens, (B, H, N, E_v)."""
    outs, places = [], []
    for out, group in zip(parts, groups, strict=True):
        tokens, place = out.movedim(0, -3).flatten(-3, -2), group.queries.flatten()
        if group.real_queries is not None:
            real = group.real_queries.flatten().nonzero().flatten()
            tokens, place = tokens.index_select(-2, real), place[real]
        outs.append(tokens)
        places.append(place)
    order = torch.cat(places).argsort()
    whole = torch.cat(outs, -2).index_select(-2, order)  # (H, B · N, E_v)
    return whole.unflatten(-2, (batch_size, -1)).movedim(-3, 0)


def refuse_beside_documents(**given: object) -> None:
    """Raise if an argument has no meaning for packed documents.

    Raises:
        ValueError: one of the arguments is not None.
    """
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"{name} is not supported with packed documents (cu_seqlens); pad the documents "
                "and pass key_mask instead"
            )


def _fit(shortest: tuple[int, int], document: tuple[int, int], exact: bool) -> bool:
    if exact:
        return shortest == document
    return all(
        small <= large <= max(_LONGER * small, small + _MORE_TOKENS)
        for small, large in zip(shortest, document, strict=True)
    )


def _bounds(name: str, given: Tensor) -> list[int]:
    if written() == "exported":
        raise NotImplementedError(
            f"{name} cannot be exported: the program would contain these bounds; pad the documents "
            "and pass key_mask"
        )
    integer = not (given.is_floating_point() or given.is_complex() or given.dtype == torch.bool)
    if given.dim() != 1 or not integer or len(given) < 2:
        raise ValueError(
            f"{name} has shape {tuple(given.shape)} and dtype {given.dtype}, expected (documents "
            "+ 1,) integers"
        )
    bounds: list[int] = given.tolist()
    if bounds[0] != 0 or any(b < a for a, b in pairwise(bounds)):
        raise ValueError(f"{name} must start with 0 and never fall, received {_short(bounds)}")
    return bounds


def _short(numbers: list[int]) -> str:
    told = ", ".join(map(str, numbers[:6]))
    return f"[{told}, …]" if len(numbers) > 6 else f"[{told}]"
