"""One label per text or pair of texts, by an encoder that may have been trained before."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lit_probattn.attention import AttentionFactory
from lit_probattn.models.embeddings import PositionInit
from lit_probattn.models.fine_tuned import TextClassifier as TextClassifierModel
from lit_probattn.models.text_encoder import TextEncoder
from lit_probattn.models.transformer import Activation
from lit_probattn.tasks.base import model_arguments
from lit_probattn.tasks.fine_tuning.recipe import FineTuning
from lit_probattn.tasks.schedules import ScheduleName
from lit_probattn.tasks.sequence_classifier import LabelTask


class TextClassifier(FineTuning, LabelTask):
    """Encoder and the pooler of its first token, trained with cross-entropy.

    Both texts of a pair are one sequence, and attend to each other. Batches have `inputs`,
    `key_mask` and `token_types` (B, N), `target` and `sample_ids` (B,). Logged: see `LabelTask`.

    Source: BERT (Devlin et al., 2019), section 4.1.

    Args:
        dropout: dropout of embeddings and of both branches of a block.
        head_dropout: dropout in front of the last layer.
        position_period: for long inputs, see `PeriodicPositions`.
        position_init: `normal` or `sinusoidal`, see `TextEncoder`; `--init_from` goes before it.
        num_token_types: kinds of segments that the model tells apart; 0 for none, as in RoBERTa.
        norm_eps: epsilon of all layer norms; BERT has 1e-12, RoBERTa 1e-5.
        share_layers: one block for all layers, stored and counted once.
        init_std: standard deviation of matrices and tables at the start, see `TextEncoder`.
        activation_dropout: dropout within the MLPs, after the activation, where BERT has none. None
            means `dropout`.
        training_options: these, and the rest, are documented in `lit_probattn.tasks.Task`.
    """

    model: TextClassifierModel

    def __init__(
        self,
        attention: AttentionFactory,
        vocab_size: int,
        num_classes: int,
        max_seq_len: int,
        embed_dim: int = 768,
        head_dim: int = 64,
        num_layers: int = 12,
        mlp_dim: int = 3072,
        dropout: float = 0.1,
        head_dropout: float = 0.1,
        norm_first: bool = False,
        activation: Activation = "gelu",
        attention_dropout: float | None = 0.1,
        position_period: int | None = None,
        position_init: PositionInit = "normal",
        num_token_types: int = 2,
        norm_eps: float = 1e-12,
        activation_checkpointing: bool = False,
        lr: float = 3e-5,
        weight_decay: float = 0.01,
        schedule: ScheduleName = "linear",
        share_layers: bool = False,
        init_std: float = 0.02,
        activation_dropout: float | None = None,
        **training_options: Any,
    ) -> None:
        optimisation: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
        super().__init__(num_classes, schedule=schedule, **optimisation, **training_options)
        arguments = model_arguments(TextEncoder, locals())
        self.model = TextClassifierModel(
            attention, num_classes=num_classes, head_dropout=head_dropout, **arguments
        )

    def forward(self, batch: Any) -> Tensor:
        """Return the logits of a batch, in float32 or better. Shape (B, num_classes)."""
        logits: Tensor = self.model(**self.encoder_inputs(batch))
        return logits if logits.dtype == torch.float64 else logits.float()
