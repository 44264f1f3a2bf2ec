"""BERT-style bidirectional text encoders: token ids, embeddings, blocks."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from lit_probattn.attention.packing import Packing, packing_of
from lit_probattn.base.arguments import (
    Count,
    Positive,
    WholeNumber,
    arguments_of,
    checks_arguments,
    takes,
)
from lit_probattn.models.embeddings import PositionInit, sine_positions
from lit_probattn.models.transformer import Transformer
from lit_probattn.randomness import Dropout, RandomKey


class PeriodicPositions(nn.Module):
    """Learned positions: one embedding, or for long inputs an embedding of offsets and of blocks.

        position p = period · q + r   ->   offsets[r] + blocks[q]

    Source: value-aware attention (Gupta and Berant, 2021), table 4 "POSq". With a single block it
    is an ordinary position embedding.

    Args:
        max_seq_len: longest sequence, N.
        embed_dim: C.
        position_period: for long inputs, rows of the offset embedding, see `PeriodicPositions`.
            None means max_seq_len.
    """

    @checks_arguments
    def __init__(
        self, *, max_seq_len: Count, embed_dim: Count, position_period: Count | None = None
    ) -> None:
        super().__init__()
        period = position_period
        self.period = min(max_seq_len, max_seq_len if period is None else period)
        self.offsets = nn.Embedding(self.period, embed_dim)
        num_blocks = -(-max_seq_len // self.period)
        self.blocks = nn.Embedding(num_blocks, embed_dim) if num_blocks > 1 else None

    def forward(self, positions: Tensor) -> Tensor:
        """Return the embeddings of `positions` (…); (…, C)."""
        result: Tensor = self.offsets(positions % self.period)
        if self.blocks is not None:
            result = result + self.blocks(positions // self.period)
        return result

    @torch.no_grad()
    def start_from_sines(self, std: float) -> None:
        """Set both embeddings to `sine_positions` with this root mean square."""
        for table in (self.offsets, self.blocks):
            if table is not None:
                rows = sine_positions(*table.weight.shape)
                table.weight.copy_(rows * (std * math.sqrt(2.0)))


class TextEncoder(nn.Module):
    """Bidirectional encoder in the style of BERT and RoBERTa; subclasses add heads (`scores`).

        tokens + positions (+ token types) ─ norm ─ drop ─ Block × L

    Source: BERT (Devlin et al., 2019), RoBERTa (Liu et al., 2019).

    Args:
        vocab_size: number of token ids, V.
        dropout: dropout of embeddings and of both branches of a block.
        norm_first: pre-norm blocks with a final norm; BERT and RoBERTa are post-norm.
        position_init: initialisation of learned positions: `normal`, or `sinusoidal`:
            `sine_positions` with root mean square `init_std`.
        num_token_types: number of token types, such as the two sentences of a pair. 0 disables
            token types.
        norm_eps: epsilon of all layer norms; 1e-12 in BERT, 1e-5 in RoBERTa.
        init_std: standard deviation of the initial weights and embeddings. BERT uses 0.02 at any
            width, which keeps narrow models at unigram frequencies for thousands of steps: the
            scale of a layer's output is proportional to init_std · √C, 0.55 in BERT with width 768.
        activation_dropout: dropout within the MLPs, after the activation; 0 in BERT. None
            means `dropout`.

    Raises:
        ValueError: no token ids, an unknown `position_init`, sinusoidal positions with an odd
            width, an `init_std` that is not positive, or a size that `Transformer` rejects.
    """

    @takes(
        *(Transformer, PeriodicPositions),
        without=("attention_bias", "cross_attention"),
        embed_dim=768,
        head_dim=64,
        num_layers=12,
        mlp_dim=3072,
        attention_dropout=0.0,
        norm_first=False,
    )
    def __init__(
        self,
        *,
        vocab_size: Count,
        position_init: PositionInit = "normal",
        num_token_types: WholeNumber = 0,
        init_std: Positive = 0.02,
        **parts: Any,
    ) -> None:
        super().__init__()
        embed_dim: int = parts["embed_dim"]
        if position_init == "sinusoidal" and embed_dim % 2:
            raise ValueError(
                f"position_init sinusoidal requires an even embed_dim, received {embed_dim}"
            )
        self.position_init, self.init_std = position_init, init_std
        self.vocab_size, self.max_seq_len = vocab_size, int(parts["max_seq_len"])
        self.num_token_types = num_token_types
        self.tokens = nn.Embedding(vocab_size, embed_dim)
        self.positions = PeriodicPositions(**arguments_of(PeriodicPositions, parts))
        self.token_types = nn.Embedding(num_token_types, embed_dim) if num_token_types else None
        self.norm = nn.LayerNorm(embed_dim, eps=parts["norm_eps"])
        self.dropout = Dropout(parts["dropout"])
        self.encoder = Transformer(**arguments_of(Transformer, parts))

    def _initialise(self) -> None:
        """Initialise all linear layers and embeddings; called by subclasses after adding heads."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=self.init_std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        if self.position_init == "sinusoidal":
            self.positions.start_from_sines(self.init_std)

    def forward(
        self,
        inputs: Tensor,
        *,
        key_mask: Tensor | None = None,
        token_types: Tensor | None = None,
        rng: RandomKey | None = None,
    ) -> Any:
        """Return the `scores` of token ids (B, N).

        The other arguments and errors are those of `encode`.
        """
        given: Any = {"key_mask": key_mask, "token_types": token_types, "rng": rng}
        return self.scores(self.encode(inputs, **given))

    def scores(self, hidden: Tensor) -> Any:
        """Return the output of the heads, given the result of `encode`."""
        raise NotImplementedError(f"{type(self).__name__} must implement scores")

    def encode(
        self,
        inputs: Tensor,
        *,
        key_mask: Tensor | None = None,
        token_types: Tensor | None = None,
        rng: RandomKey | None = None,
        cu_seqlens: Tensor | Packing | None = None,
    ) -> Tensor:
        """Return the output of the last block, (B, N, C), for token ids (B, N).

        Padding does not attend: its outputs have no meaning.

        Args:
            inputs: token ids.
            key_mask: real tokens, (B, N). None means all.
            token_types: type of every token, (B, N). None means 0 if token types are enabled.
            rng: key of attention dropout and noise.
            cu_seqlens: bounds of packed sequences over the B · N tokens, (D + 1,) integers, or a
                `Packing`; `rng.sample_ids` are then the sequences', (D,).

        Raises:
            ValueError: a sequence has more tokens than `max_seq_len`, or types that the model
                lacks.
        """
        packing, length = packing_of(cu_seqlens), inputs.shape[1]
        positions = torch.arange(length, device=inputs.device)
        if packing is not None:
            length = packing.longest(*inputs.shape)
            positions, _ = packing.positions(len(inputs), inputs.device)
        if length > self.max_seq_len:
            raise ValueError(
                f"cannot embed a sequence of {length} tokens: max_seq_len is {self.max_seq_len}"
            )
        embedded = self.tokens(inputs) + self.positions(positions)
        if self.token_types is not None:
            types = inputs.new_zeros(()) if token_types is None else token_types
            embedded = embedded + self.token_types(types)
        elif token_types is not None:
            raise ValueError("received token_types, but the model has num_token_types=0")
        x = self.dropout(self.norm(embedded))  # (B, N, C)
        masks: Any = {"key_mask": key_mask, "query_mask": key_mask, "cu_seqlens": packing}
        return self.encoder(x, **masks, rng=rng)  # (B, N, C)
