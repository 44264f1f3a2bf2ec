"""Theorem 2, larger heads are more expressive: fitted narrow students, and separating inputs.

    f(X) = Σ_i W_o^i W_v^i X Softmax[(W_k^i X)ᵀ (W_q^i X) / √s]

A target in which all heads share one query-key product of rank d_p > s cannot be computed by heads
of size s = d / h, if its value map has full rank. Inputs are (…, d, n), tokens in columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Heads:
    """Weights of a layer without biases, by head; additional leading dimensions are allowed."""

    query: Tensor  # W_q, (…, h, s, d)
    key: Tensor  # W_k, (…, h, s, d)
    value: Tensor  # W_v, (…, h, s_v, d)
    out: Tensor  # W_o, (…, h, d, s_v)

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return f(X): (…, B, d, n) -> (…, B, d, n), with the leading dimensions of the weights."""
        x = inputs[..., :, None, :, :]  # (…, B, 1, d, n)
        q, k, v, o = (w[..., None, :, :, :] for w in self.tensors)
        weights = torch.softmax((k @ x).mT @ (q @ x) / self.query.shape[-2] ** 0.5, -2)
        return (o @ (v @ x @ weights)).sum(-3)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All weights."""
        return self.query, self.key, self.value, self.out

    @property
    def products(self) -> Tensor:
        """Return W_kᵀ W_q / √s of all heads, (…, h, d, d)."""
        return self.key.mT @ self.query / self.query.shape[-2] ** 0.5

    @property
    def value_maps(self) -> Tensor:
        """Return W_o W_v of all heads, (…, h, d, d)."""
        return self.out @ self.value


def theorem_target(
    embed_dim: int, num_heads: int, head_size: int, generator: torch.Generator
) -> Heads:
    """Return a layer as in theorem 2: one random query-key product of rank d_p for all heads.

    Raises:
        ValueError: the theorem's conditions do not hold.
    """
    if head_size > embed_dim or num_heads * head_size <= embed_dim:
        raise ValueError(
            f"theorem 2 needs head_size ≤ embed_dim < num_heads · head_size, received {head_size}, "
            f"{embed_dim}, {num_heads}"
        )

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64) * embed_dim**-0.5

    query, key = (draw(1, head_size, embed_dim).expand(num_heads, -1, -1) for _ in range(2))
    value, out = draw(num_heads, head_size, embed_dim), draw(num_heads, embed_dim, head_size)
    return Heads(query, key, value, out)


def fit_students(
    target: Heads,
    head_size: int,
    steps: int,
    *,
    batch_size: int = 256,
    num_seeds: int = 3,
    lr: float = 5e-3,
) -> list[float]:
    """Train layers with heads of one size on a target; return their held-out errors.

    Training uses new inputs N(0, 1.5²) of 6 tokens in every step and Adam with cosine decay. The
    loss ‖f − g‖² / ‖g‖² is returned for each seed. All seeds are trained in one batch.
    """
    heads, _, embed_dim = target.query.shape[-3:]
    generators = [torch.Generator().manual_seed(seed) for seed in range(num_seeds)]

    def draw(*shape: int) -> Tensor:
        return torch.stack([torch.randn(shape, generator=g) for g in generators])

    def leaf(*shape: int) -> Tensor:
        return (draw(heads, *shape) * embed_dim**-0.5).requires_grad_()

    rows, columns = (head_size, embed_dim), (embed_dim, head_size)
    student = Heads(leaf(*rows), leaf(*rows), leaf(*rows), leaf(*columns))
    goal = Heads(*(w.float() for w in target.tensors))
    optimiser = torch.optim.Adam(student.tensors, lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)

    def errors(count: int) -> Tensor:
        inputs = 1.5 * draw(count, embed_dim, 6)
        exact = goal(inputs)
        return (student(inputs) - exact).square().sum((1, 2, 3)) / exact.square().sum((1, 2, 3))

    for _ in range(steps):
        optimiser.zero_grad()
        errors(batch_size).sum().backward()
        optimiser.step()
        schedule.step()
    with torch.no_grad():
        return [float(e) for e in errors(4096)]


def separating_input(first: Heads, second: Heads, seq_len: int = 2, seed: int = 0) -> Tensor:
    """Return X with f(X) ≠ g(X) for two layers, following the proof of theorem 2; (d, n).

    1. If the summed value maps differ, X = v 1ᵀ: all tokens are equal, so weights have no effect.
    2. Otherwise, if the symmetric part of a difference of query-key products is nonzero, one token.
    3. Otherwise two tokens, v₁ and a small multiple of (A' − U') v₁; the paper's choice does not
       always exist.

    `first` is f, the narrow layer; all heads of `second`, g, have one query-key product.

    Raises:
        ValueError: n < 2, or no input was found (the layers are equal up to rounding).
    """
    if seq_len < 2:
        raise ValueError(f"seq_len must be at least 2, received {seq_len}")
    candidates = _candidates(first, second, seq_len, torch.Generator().manual_seed(seed))
    gaps = [difference(first, second, x) for x in candidates]
    best = max(range(len(gaps)), key=gaps.__getitem__)
    if gaps[best] < 1e-10:
        raise ValueError(f"no separating input found: largest relative difference {gaps[best]:.1e}")
    return candidates[best]


def difference(first: Heads, second: Heads, inputs: Tensor) -> float:
    """Return ‖f(X) − g(X)‖ / ‖g(X)‖ for one input (d, n)."""
    exact = second(inputs[None])
    return float((first(inputs[None]) - exact).norm() / exact.norm().clamp_min(1e-300))


def _candidates(
    first: Heads, second: Heads, seq_len: int, generator: torch.Generator
) -> list[Tensor]:
    """Return the inputs of the first applicable case of the proof's three cases."""
    size = first.query.shape[-1]
    gap = first.value_maps.sum(0) - second.value_maps.sum(0)
    if float(torch.linalg.matrix_norm(gap, 2)) > 1e-9:
        direction = torch.linalg.svd(gap).Vh[0]
        return [direction[:, None].expand(-1, seq_len)]
    shared = second.products[0]
    found = []
    for product in first.products:
        mismatch = shared - product
        values, vectors = torch.linalg.eigh((mismatch + mismatch.mT) / 2)
        one_token = float(values.abs().max()) > 1e-9
        for _ in range(4):
            noise = torch.randn(size, generator=generator, dtype=torch.float64)
            inputs = torch.zeros(size, seq_len, dtype=torch.float64)
            if one_token:
                top = vectors[:, values.abs().argmax()]
                inputs[:, 0] = top + 0.1 * noise / noise.norm()
            elif float(mismatch.norm()) > 1e-9:
                inputs[:, 0] = noise / noise.norm()
                inputs[:, 1] = -0.05 * mismatch @ inputs[:, 0] / mismatch.norm()
            else:
                continue
            found.append(inputs)
    return found or [torch.zeros(size, seq_len, dtype=torch.float64)]
