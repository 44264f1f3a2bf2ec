"""Output layers over large vocabularies, tied to the token embedding, with chunked losses.

Logits are computed for some tokens at a time and recomputed in backward, so that memory does not
grow with tokens × words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lit_probattn.base.arguments import Count, OnlyWith, checks_arguments, takes
from lit_probattn.base.torch_internals import outside_graphs

# Maximum number of logits in memory: 256 MiB in float32.
MAX_LOGITS = 1 << 26


@outside_graphs
def chunked_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, max_logits: int
) -> Tensor:
    """Return −log softmax(hidden · weightᵀ + bias)[target] of every row, (n,) float32.

    Args:
        hidden: (n, C).
        weight: (V, C).
        bias: (V,) or None.
        target: class of each row, (n,) int64.
        max_logits: maximum number of logits in memory; chunks have at least one row.
    """

    def part(rows: Tensor, classes: Tensor) -> Tensor:
        return F.cross_entropy(_exact(F.linear(rows, weight, bias)), classes, reduction="none")

    return in_parts(part, hidden, target, max(1, max_logits // weight.shape[0]))


def in_parts(
    part: Callable[[Tensor, Tensor], Tensor], hidden: Tensor, target: Tensor, rows: int
) -> Tensor:
    """Return `part(hidden, target)`, computed in chunks that are recomputed in backward.

    Args:
        part: maps rows and their classes to per-row results.
        hidden: (n, C).
        target: (n,).
        rows: maximum number of rows per chunk.
    """
    if hidden.shape[0] <= rows:
        return part(hidden, target)
    results = []
    for h, t in zip(hidden.split(rows), target.split(rows), strict=True):
        if torch.is_grad_enabled():
            result: Tensor = checkpoint(part, h, t, use_reentrant=False, preserve_rng_state=False)
            results.append(result)
        else:
            results.append(part(h, t))
    return torch.cat(results)


class FullSoftmax(nn.Module):
    """Softmax over all words, with the token embedding as weights; see `chunked_cross_entropy`.

    Args:
        vocab_size: V, number of token ids.
        bias: whether every word has a bias.
        max_logits: maximum number of logits in memory while computing the loss.
    """

    @checks_arguments
    def __init__(
        self, *, vocab_size: Count, bias: bool = True, max_logits: Count = MAX_LOGITS
    ) -> None:
        super().__init__()
        self.max_logits = max_logits
        self.bias = nn.Parameter(torch.zeros(vocab_size)) if bias else None

    def forward(self, hidden: Tensor, target: Tensor, table: Tensor) -> Tensor:
        """Return the losses of words `target` (n,) given `hidden` (n, C); (n,) float32."""
        return chunked_cross_entropy(hidden, table, self.bias, target, self.max_logits)

    def log_probs(self, hidden: Tensor, table: Tensor) -> Tensor:
        """Return the log-probabilities of all words, (…, V) float32, given `hidden` (…, C)."""
        return _log_softmax(F.linear(hidden, table, self.bias))


class AdaptiveSoftmax(nn.Module):
    """Softmax over frequent words and clusters of rarer words, then within the cluster.

    Source: Grave et al., 2017, as in MGK, ICML 2022, appendix A.1.2 and its code: clusters
    keep the full width (div_val 1), the token embedding provides the weights of all words, every
    word has a bias, and the entry of cluster i = 1, 2, … in the first softmax is the i-th from the
    end.

    Args:
        embed_dim: C.
        cutoffs: starts of the clusters of the adaptive softmax, in words by decreasing frequency;
            cutoffs of at least V are ignored. Without cutoffs it equals `FullSoftmax`.

    Raises:
        ValueError: cutoffs do not increase.
    """

    @takes(FullSoftmax)
    def __init__(
        self,
        *,
        embed_dim: Count,
        cutoffs: Annotated[Sequence[int], OnlyWith(output="adaptive")] = (20000, 40000, 200000),
        **options: Any,
    ) -> None:
        super().__init__()
        vocab_size: int = options["vocab_size"]
        bounds = [0, *cutoffs]
        if any(a >= b for a, b in pairwise(bounds)):
            raise ValueError(f"cutoffs must be positive and increase, received {list(cutoffs)}")
        self.max_logits: int = options["max_logits"]
        self.bounds = [*(bound for bound in bounds if bound < vocab_size), vocab_size]
        num_clusters = len(self.bounds) - 2
        self.bias = nn.Parameter(torch.zeros(vocab_size)) if options["bias"] else None
        self.cluster_weight = nn.Parameter(torch.zeros(num_clusters, embed_dim))
        self.cluster_bias = nn.Parameter(torch.zeros(num_clusters))

    @property
    def _clusters(self) -> list[tuple[int, int, int]]:
        """Entry in the first softmax, first word and end of each cluster."""
        bounds, count = self.bounds, len(self.bounds) - 2
        return [(bounds[1] + count - i, bounds[i], bounds[i + 1]) for i in range(1, count + 1)]

    def _head(self, table: Tensor) -> tuple[Tensor, Tensor | None]:
        first = self.bounds[1]
        weight = torch.cat([table[:first], self.cluster_weight.to(table.dtype)])
        words = self.cluster_bias.new_zeros(first) if self.bias is None else self.bias[:first]
        return weight, torch.cat([words, self.cluster_bias])

    def _words(self, table: Tensor, low: int, high: int) -> tuple[Tensor, Tensor | None]:
        return table[low:high], None if self.bias is None else self.bias[low:high]

    @outside_graphs
    def forward(self, hidden: Tensor, target: Tensor, table: Tensor) -> Tensor:
        """Return the losses of words `target` (n,) given `hidden` (n, C); (n,) float32."""
        entry = target.clone()
        for place, low, high in self._clusters:
            entry[(target >= low) & (target < high)] = place
        losses = chunked_cross_entropy(hidden, *self._head(table), entry, self.max_logits)
        for _, low, high in self._clusters:
            rows = ((target >= low) & (target < high)).nonzero()[:, 0]
            words = self._words(table, low, high)
            more = chunked_cross_entropy(hidden[rows], *words, target[rows] - low, self.max_logits)
            losses = losses.index_add(0, rows, more.to(losses.dtype))
        return losses

    def log_probs(self, hidden: Tensor, table: Tensor) -> Tensor:
        """Return the log-probabilities of all words, (…, V) float32, given `hidden` (…, C)."""
        head = _log_softmax(F.linear(hidden, *self._head(table)))
        parts = [head[..., : self.bounds[1]]]
        for place, low, high in self._clusters:
            within = _log_softmax(F.linear(hidden, *self._words(table, low, high)))
            parts.append(within + head[..., place, None])
        return torch.cat(parts, -1)


def _log_softmax(logits: Tensor) -> Tensor:
    return _exact(logits).log_softmax(-1)


def _exact(logits: Tensor) -> Tensor:
    """Convert to float32 unless the dtype is float64."""
    return logits if logits.dtype == torch.float64 else logits.float()
