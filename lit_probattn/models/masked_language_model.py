"""Masked language models: tokens, some of them hidden -> blocks -> the hidden words."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lit_probattn.attention.layer import AttentionFactory
from lit_probattn.models.adaptive_softmax import MAX_LOGITS, FullSoftmax
from lit_probattn.models.language_model import IGNORE
from lit_probattn.models.transformer import Activation, Transformer
from lit_probattn.randomness import STREAM_MASKING, RandomKey, philox4x32

# The last rows of the token table are not words: begin, end, mask.
NUM_SPECIAL = 3
_STD = 0.02
# Of the chosen words: what becomes the mask token, and what becomes a random word.
_SHARE_MASKED, _SHARE_RANDOM = 0.8, 0.1


def mask_tokens(
    inputs: Tensor, target: Tensor, key: RandomKey, *, vocab_size: int, probability: float = 0.15
) -> tuple[Tensor, Tensor]:
    """Hide words, as a pure function of (seed, step, sample, position).

    Source: BERT (Devlin et al., 2019), dynamic as in RoBERTa: every word is chosen with
    `probability`; of the chosen, 80 % become the mask token, 10 % a random word, 10 % stay.
    Departs from the source: choices are independent; the number of chosen words varies.

    Args:
        inputs: token ids, (B, N).
        target: the same ids, IGNORE where nothing may be hidden (padding, begin, end), (B, N).
        key: names the draw; counter (position, 0, 0, sample).
        vocab_size: V; the mask token is V − 1, words are below V − 3.

    Returns:
        The inputs with words hidden, and the target, IGNORE where no word was chosen.
    """
    batch, length = inputs.shape
    positions = torch.arange(length, device=inputs.device).view(1, -1)
    samples = key.samples(batch, inputs.device).view(-1, 1)
    zero = torch.zeros((), dtype=torch.int64, device=inputs.device)
    words = philox4x32((positions, zero, zero, samples), key.philox_key(STREAM_MASKING))
    choice, kind, word, _ = words
    chosen = (choice < round(probability * 2**32)) & (target != IGNORE)
    masked = kind < round(_SHARE_MASKED * 2**32)
    random = ~masked & (kind < round((_SHARE_MASKED + _SHARE_RANDOM) * 2**32))
    hidden = torch.where(masked, vocab_size - 1, inputs)
    hidden = torch.where(random, (word * (vocab_size - NUM_SPECIAL)) >> 32, hidden)
    return torch.where(chosen, hidden, inputs), torch.where(chosen, target, IGNORE)


class PeriodicPositions(nn.Module):
    """Learned positions: one table, or for long inputs a table of offsets and one of blocks.

        position p = period · q + r   ->   offsets[r] + blocks[q]

    Source: value-aware attention (Gupta and Berant, 2021), table 4 "POSq". Without a second block
    it is an ordinary table.

    Args:
        period: rows of the first table. None means max_seq_len.
    """

    def __init__(self, max_seq_len: int, embed_dim: int, period: int | None = None) -> None:
        super().__init__()
        self.period = min(max_seq_len, max_seq_len if period is None else period)
        if self.period < 1:
            raise ValueError(f"position_period must be at least 1, received {period}")
        self.offsets = nn.Embedding(self.period, embed_dim)
        num_blocks = -(-max_seq_len // self.period)
        self.blocks = nn.Embedding(num_blocks, embed_dim) if num_blocks > 1 else None

    def forward(self, positions: Tensor) -> Tensor:
        """Return what is added to tokens at `positions` (…); (…, C)."""
        result: Tensor = self.offsets(positions % self.period)
        if self.blocks is not None:
            result = result + self.blocks(positions // self.period)
        return result


class MaskedLanguageModel(nn.Module):
    """Bidirectional encoder in the manner of RoBERTa, its output layer tied to the token table.

        tokens + positions ─ norm ─ drop ─ Block × L ─ dense ─ gelu ─ norm ─ log p(word)

    Source: RoBERTa (Liu et al., 2019), which the value-aware paper (section 4, A.1) trains on.
    Departs from the source: nothing is pre-trained; sizes are arguments.

    The arguments are those of `lit_probattn.tasks.MaskedLanguageModeling`.

    Raises:
        ValueError: fewer than four token ids.
    """

    def __init__(
        self,
        attention: AttentionFactory,
        *,
        vocab_size: int,
        max_seq_len: int,
        embed_dim: int = 768,
        head_dim: int = 64,
        num_layers: int = 12,
        mlp_dim: int = 3072,
        dropout: float = 0.0,
        norm_first: bool = False,
        activation: Activation = "gelu",
        attention_dropout: float | None = 0.0,
        position_period: int | None = None,
        activation_checkpointing: bool = False,
        max_logits: int = MAX_LOGITS,
    ) -> None:
        super().__init__()
        if vocab_size <= NUM_SPECIAL:
            raise ValueError(
                f"vocab_size must exceed the {NUM_SPECIAL} special tokens, received {vocab_size}"
            )
        options: Any = {} if attention_dropout is None else {"dropout": attention_dropout}
        self.vocab_size, self.max_seq_len = vocab_size, max_seq_len
        self.tokens = nn.Embedding(vocab_size, embed_dim)
        self.positions = PeriodicPositions(max_seq_len, embed_dim, position_period)
        self.norm = nn.LayerNorm(embed_dim)
        self.dropout = nn.Dropout(dropout)
        self.encoder = Transformer(
            partial(attention, **options),
            embed_dim,
            head_dim,
            num_layers,
            mlp_dim,
            dropout,
            norm_first=norm_first,
            activation=activation,
            activation_checkpointing=activation_checkpointing,
        )
        self.head = nn.Sequential(
            nn.Linear(embed_dim, embed_dim), nn.GELU(), nn.LayerNorm(embed_dim)
        )
        self.output = FullSoftmax(vocab_size, max_logits=max_logits)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=_STD)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(
        self, inputs: Tensor, *, key_mask: Tensor | None = None, rng: RandomKey | None = None
    ) -> Tensor:
        """Return what the output layer reads, (B, N, C), for token ids (B, N).

        Args:
            inputs: token ids, words hidden by `mask_tokens`.
            key_mask: real tokens, (B, N). None means all.
            rng: names the draw of attention dropout and noise.

        Raises:
            ValueError: there are more tokens than `max_seq_len`.
        """
        length = inputs.shape[1]
        if length > self.max_seq_len:
            raise ValueError(
                f"cannot read a sequence of {length} tokens: max_seq_len is {self.max_seq_len}"
            )
        positions = torch.arange(length, device=inputs.device)
        x = self.dropout(self.norm(self.tokens(inputs) + self.positions(positions)))  # (B, N, C)
        x = self.encoder(x, key_mask=key_mask, rng=rng)  # (B, N, C)
        return self.head(x)

    def token_losses(self, hidden: Tensor, target: Tensor) -> Tensor:
        """Return −log p of every target that is not IGNORE, in order, (num_scored,) float32."""
        scored = target != IGNORE
        return self.output(hidden[scored], target[scored], self.tokens.weight)

    def predictions(self, hidden: Tensor, target: Tensor) -> Tensor:
        """Return the likeliest word of every target that is not IGNORE, in order."""
        rows = hidden[target != IGNORE]
        count = max(1, self.output.max_logits // self.vocab_size)
        parts = [self.output.log_probs(part, self.tokens.weight) for part in rows.split(count)]
        return torch.cat([part.argmax(-1) for part in parts]) if parts else rows.new_zeros(0).long()
