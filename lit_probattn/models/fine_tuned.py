"""Heads on a text encoder: answer spans, and classes of texts or pairs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lit_probattn.base.arguments import Count, Rate, takes
from lit_probattn.models.text_encoder import TextEncoder
from lit_probattn.randomness import Dropout


class SpanModel(TextEncoder):
    """Scores every token as the first and as the last token of the answer.

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

    def scores(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of starts and of ends, (B, N) each.

        Padded tokens also have logits, which callers mask.
        """
        start, end = self.spans(hidden).unbind(-1)  # (B, N) each
        return start, end


class TextClassifier(TextEncoder):
    """Classification of the pooled first token by a linear layer.

        encoder ─ first token ─ dense ─ tanh ─ drop ─ linear

    Source: BERT's pooler and classifier (Devlin et al., 2019), which is also RoBERTa's
    classification head.
    Departs from the source: there is no dropout before the dense layer, which RoBERTa applies in
    addition to its encoder's dropout.

    Args:
        num_classes: number of labels.
        head_dropout: dropout before the last layer.

    Raises:
        ValueError: see `TextEncoder`.
    """

    @takes(TextEncoder)
    def __init__(self, *, num_classes: Count, head_dropout: Rate = 0.1, **options: Any) -> None:
        super().__init__(**options)
        embed_dim = self.tokens.embedding_dim
        self.pooler = nn.Linear(embed_dim, embed_dim)
        self.head_dropout = Dropout(head_dropout)
        self.classifier = nn.Linear(embed_dim, num_classes)
        self._initialise()

    def scores(self, hidden: Tensor) -> Tensor:
        """Return the logits of the classes, (B, num_classes)."""
        pooled = torch.tanh(self.pooler(hidden[:, 0]))  # (B, C)
        return self.classifier(self.head_dropout(pooled))  # (B, num_classes)
