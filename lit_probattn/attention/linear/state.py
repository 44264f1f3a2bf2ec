"""The state of linear attention in decoding: of constant size, whatever the length."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_probattn.attention.cache import Cache


class LinearState(Cache):
    """Sums Σ_j f_j [v_j, 1]ᵀ of one layer over the tokens seen so far.

    Held: H_kv · F · (E_v + 1) numbers per sequence in at least float32 (H_kv · F · E_v without a
    sum in the denominator), whatever the length and whatever the number of components of a key;
    random features add the logarithm of their common factor, H_kv numbers. No graph is kept.
    """

    def __init__(self) -> None:
        self.length = 0
        self.sums: Tensor | None = None
        self.log_scale: Tensor | None = None

    def append(
        self,
        key: Tensor,
        value: Tensor,
        key_mask: Tensor | None = None,
        offset: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Count the tokens and hand them back: earlier ones are in the sums.

        Raises:
            ValueError: the batch differs from the state's.
        """
        if self.sums is not None and self.sums.shape[0] != key.shape[0]:
            raise ValueError(
                f"state holds a batch of {self.sums.shape[0]}, received {key.shape[0]}: "
                "a state belongs to one layer and one batch"
            )
        self.length += value.shape[-2]
        return key, value, key_mask

    def common_scale(self, log_scale: Tensor | None) -> Tensor | None:
        """Return the factor that old and new features are divided by, bringing the sums to it.

        Args:
            log_scale: logarithm of the factor that suits the new keys, (B, H_kv, 1, 1).
        """
        if log_scale is None or self.log_scale is None or self.sums is None:
            return log_scale
        common = torch.maximum(self.log_scale, log_scale)
        self.sums = self.sums * torch.exp(self.log_scale - common)
        return common

    def replace(self, sums: Tensor, log_scale: Tensor | None) -> None:
        """Keep the sums over all tokens so far, and the factor that they were divided by."""
        self.sums = sums.detach()
        self.log_scale = None if log_scale is None else log_scale.detach()

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        held = (self.sums, self.log_scale)
        return sum(t.numel() * t.element_size() for t in held if t is not None)

    @property
    def allocated_bytes(self) -> int:
        """Bytes held."""
        return self.num_bytes
