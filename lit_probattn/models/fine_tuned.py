"""Heads on an encoder of text: where an answer lies, and which class a text or a pair is of."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lit_probattn.base.arguments import takes
from lit_probattn.models.text_encoder import TextEncoder
from lit_probattn.randomness import RandomKey


class SpanModel(TextEncoder):
    """Every token's score as the first and as the last one of the answer.

        encoder ─ linear ─ start, end

    Source: BERT (Devlin et al., 2019), section 4.2.

    Raises:
        ValueError: see `TextEncoder`.
    """

    @takes(TextEncoder)
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.spans = nn.Linear(self.tokens.embedding_dim, 2)
        self._initialise()

    def forward(
        self,
        inputs: Tensor,
        *,
        key_mask: Tensor | None = None,
        token_types: Tensor | None = None,
        rng: RandomKey | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the logits of starts and of ends, (B, N) each, for token ids (B, N).

        Padded tokens have logits too: a softmax over positions leaves them out by itself. The
        arguments are those of `encode`.

        Raises:
            ValueError: there are more tokens than `max_seq_len`.
        """
        hidden = self.encode(inputs, key_mask=key_mask, token_types=token_types, rng=rng)
        start, end = self.spans(hidden).unbind(-1)  # (B, N) each
        return start, end


class TextClassifier(TextEncoder):
    """The first token's vector, pooled, and a linear layer to the classes.

        encoder ─ first token ─ dense ─ tanh ─ drop ─ linear

    Source: BERT's pooler and classifier (Devlin et al., 2019), which is RoBERTa's classification
    head too.
    Departs from the source: nothing is dropped in front of the dense layer, as RoBERTa does beside
    its encoder's own dropout.

    Args:
        num_classes: number of labels.
        head_dropout: dropout in front of the last layer.

    Raises:
        ValueError: see `TextEncoder`.
    """

    @takes(TextEncoder)
    def __init__(self, *, num_classes: int, head_dropout: float = 0.1, **options: Any) -> None:
        super().__init__(**options)
        embed_dim = self.tokens.embedding_dim
        self.pooler = nn.Linear(embed_dim, embed_dim)
        self.head_dropout = nn.Dropout(head_dropout)
        self.classifier = nn.Linear(embed_dim, num_classes)
        self._initialise()

    def forward(
        self,
        inputs: Tensor,
        *,
        key_mask: Tensor | None = None,
        token_types: Tensor | None = None,
        rng: RandomKey | None = None,
    ) -> Tensor:
        """Return the logits of the classes, (B, num_classes), for token ids (B, N).

        The arguments are those of `encode`.

        Raises:
            ValueError: there are more tokens than `max_seq_len`.
        """
        hidden = self.encode(inputs, key_mask=key_mask, token_types=token_types, rng=rng)
        pooled = torch.tanh(self.pooler(hidden[:, 0]))  # (B, C)
        return self.classifier(self.head_dropout(pooled))  # (B, num_classes)
