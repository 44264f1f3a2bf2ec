"""One label per multivariate series: the UEA archive."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer, RAdam

from lit_probattn.attention import AttentionFactory
from lit_probattn.models.series.encoder import AttentionInit, Positions, SeriesTransformer
from lit_probattn.models.series.norm import Norm, NormPositions, SeriesBatchNorm
from lit_probattn.models.transformer import Activation
from lit_probattn.tasks.base import model_arguments
from lit_probattn.tasks.distributed import sum_with_gradients
from lit_probattn.tasks.parameter_order import ordered_parameters
from lit_probattn.tasks.sequence_classifier import LabelTask


class SeriesClassifier(LabelTask):
    """Encoder of series with a flattened head, trained with cross-entropy and RAdam.

    Batches have float `inputs` (B, N, num_features). Batch norm sees the real steps of a step's
    whole batch, on all ranks; it cannot see those of several accumulation steps at once, so
    accumulation is refused with it. Logged: see `LabelTask`.

    Source: FiSH, NeurIPS 2022, table 6 (UEA), with the recipes of mvts and Flowformer; see
    `lit_probattn.models.series.encoder`.
    Departs from the source: batch norm leaves padded steps out (`norm_positions=all` counts them);
    incomplete batches at the end of an epoch are dropped.

    Args:
        num_features: dimensions of a series.
        max_seq_len: N, the longest series.
        dropout: dropout of embedding, both branches of a block, and head. Attention dropout is the
            attention's own argument.
        norm: `batch` (mvts) or `layer` (Flowformer).
        norm_positions: steps that count in batch norm: `real`, or `all` as in the source, which
            needs `pad_to=max` of the data.
        final_norm: a layer norm after the last block (Flowformer).
        positions: `learnable` or `fixed` positions.
        attention_init: projections start as those of nn.MultiheadAttention (`xavier`, mvts) or of
            nn.Linear (`default`).
        activation: of the MLPs and of the head.
        optimizer: `radam`, or `adamw`.
        training_options: these, and the rest, are documented in `lit_probattn.tasks.Task`.
    """

    def __init__(
        self,
        attention: AttentionFactory,
        num_features: int,
        num_classes: int,
        max_seq_len: int,
        embed_dim: int = 64,
        head_dim: int = 8,
        num_layers: int = 3,
        mlp_dim: int = 256,
        dropout: float = 0.1,
        norm: Norm = "batch",
        norm_positions: NormPositions = "real",
        final_norm: bool = False,
        positions: Positions = "learnable",
        attention_init: AttentionInit = "xavier",
        activation: Activation = "gelu",
        optimizer: Literal["radam", "adamw"] = "radam",
        **training_options: Any,
    ) -> None:
        super().__init__(num_classes, **training_options)
        self.optimizer_name = optimizer
        arguments = model_arguments(SeriesTransformer, locals())
        self.model: nn.Module = SeriesTransformer(attention, **arguments)

    def setup(self, stage: str) -> None:
        """Connect batch norm to the other ranks.

        Raises:
            ValueError: batch norm with gradient accumulation; or see `Task.setup`.
        """
        super().setup(stage)
        norms = self._batch_norms()
        accumulation = self.trainer.accumulate_grad_batches
        if stage == "fit" and norms and accumulation > 1:
            raise ValueError(
                f"batch norm needs all samples of a step in one pass, but "
                f"trainer.accumulate_grad_batches is {accumulation}: set it to 1, use more ranks, "
                f"or norm=layer"
            )
        for norm in norms:
            norm.sum_over_ranks = sum_with_gradients

    def configure_optimizers(self) -> Optimizer:
        """Return RAdam as in the source: plain momentum while its variance is undefined."""
        if self.optimizer_name == "adamw":
            return super().configure_optimizers()
        return self.make_optimizer(RAdam, ordered_parameters(self).values())

    def _batch_norms(self) -> list[SeriesBatchNorm]:
        return [module for module in self.modules() if isinstance(module, SeriesBatchNorm)]

    def _describe_my_window(self) -> str | None:
        with self._alone():
            return super()._describe_my_window()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Batch norm of this rank only: a rank that repeats a batch must not wait for others."""
        norms = self._batch_norms()
        reductions = [norm.sum_over_ranks for norm in norms]
        for norm in norms:
            norm.sum_over_ranks = lambda values: values
        try:
            yield
        finally:
            for norm, reduction in zip(norms, reductions, strict=True):
                norm.sum_over_ranks = reduction
