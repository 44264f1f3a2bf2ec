"""Classification of texts or text pairs by an encoder, possibly pre-trained."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lit_probattn.attention.numerics import compute_dtype
from lit_probattn.base.arguments import arguments_of, takes
from lit_probattn.models.fine_tuned import TextClassifier as TextClassifierModel
from lit_probattn.tasks.fine_tuning.recipe import BERT, FineTuning
from lit_probattn.tasks.sequence_classifier import LabelTask


class TextClassifier(FineTuning, LabelTask):
    """Encoder with a pooler of its first token, trained with cross-entropy.

    Both texts of a pair are one sequence and attend to each other. Batches have `inputs`,
    `key_mask` and `token_types` (B, N), `target` and `sample_ids` (B,). For logged values see
    `LabelTask`.

    Source: BERT (Devlin et al., 2019), section 4.1.
    """

    model: TextClassifierModel

    @takes(TextClassifierModel, LabelTask, **BERT)
    def __init__(self, **options: Any) -> None:
        super().__init__(**arguments_of(LabelTask, options))
        self.model = TextClassifierModel(**arguments_of(TextClassifierModel, options))

    def forward(self, batch: Any) -> Tensor:
        """Return the logits of a batch, in float32 or float64. Shape (B, num_classes)."""
        logits: Tensor = self.model(**self.encoder_inputs(batch))
        return logits.to(compute_dtype(logits))
