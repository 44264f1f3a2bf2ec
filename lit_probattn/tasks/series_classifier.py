"""Classification of multivariate series: the UEA archive."""

from contextlib import ExitStack
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer, RAdam

from lit_probattn.base.arguments import arguments_of, takes
from lit_probattn.models.series.encoder import SeriesTransformer
from lit_probattn.models.series.norm import SeriesBatchNorm
from lit_probattn.tasks.distributed import sum_with_gradients
from lit_probattn.tasks.parameter_order import ordered_parameters
from lit_probattn.tasks.sequence_classifier import LabelTask


class SeriesClassifier(LabelTask):
    """Series encoder with a flattened head, trained with cross-entropy and RAdam.

    Batches have float `inputs` (B, N, num_features). Batch norm uses the real steps of the whole
    micro-step's batch on all ranks; since it cannot combine several accumulation steps, gradient
    accumulation raises an error. For logged values see `LabelTask`.

    Source: FiSH, NeurIPS 2022, table 6 (UEA), with the recipes of mvts and Flowformer; see
    `lit_probattn.models.series.encoder`.
    Departs from the source: batch norm excludes padded steps (`norm_positions=all` includes them);
    incomplete batches at the end of an epoch are dropped.

    Args:
        optimizer: `radam`, or `adamw`.
    """

    @takes(SeriesTransformer, LabelTask, embed_dim=64, head_dim=8, num_layers=3, mlp_dim=256)
    def __init__(self, *, optimizer: Literal["radam", "adamw"] = "radam", **options: Any) -> None:
        super().__init__(**arguments_of(LabelTask, options))
        self.optimizer_name = optimizer
        self.model: nn.Module = SeriesTransformer(**arguments_of(SeriesTransformer, options))

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
                "batch norm requires all samples of a step in one pass, but "
                f"trainer.accumulate_grad_batches is {accumulation}: set it to 1, use more ranks, "
                "or set norm=layer"
            )
        for norm in norms:
            norm.sum_over_ranks = sum_with_gradients

    def configure_optimizers(self) -> Optimizer:
        """Return RAdam as in the source: momentum SGD while its variance is undefined."""
        if self.optimizer_name == "adamw":
            return super().configure_optimizers()
        return self.make_optimizer(RAdam, ordered_parameters(self).values())

    def _batch_norms(self) -> list[SeriesBatchNorm]:
        return [module for module in self.modules() if isinstance(module, SeriesBatchNorm)]

    def _describe_my_window(self) -> str | None:
        with ExitStack() as stack:  # repeating a batch must not wait for other ranks
            for norm in self._batch_norms():
                stack.callback(setattr, norm, "sum_over_ranks", norm.sum_over_ranks)
                norm.sum_over_ranks = lambda values: values
            return super()._describe_my_window()
