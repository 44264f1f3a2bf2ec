"""Image classification: ImageNet with timm's Swin and ViT models."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, ClassVar, cast, get_args

import torch
import torch.nn.functional as F
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy

from lit_probattn.base.arguments import NotNegative, OnlyWith, Range, Rate, arguments_of, takes
from lit_probattn.base.errors import ConfigError, prefixed
from lit_probattn.interop.state_dicts import read_state_dict
from lit_probattn.models.images import ImageModel, load_timm_state_dict
from lit_probattn.tasks.base import Batch, Split
from lit_probattn.tasks.parameter_order import ordered_parameters
from lit_probattn.tasks.schedules import ScheduleValues
from lit_probattn.tasks.sequence_classifier import LabelTask, reset_metrics

TOP_K = 5


class ImageClassifier(LabelTask):
    """A Swin or ViT of timm with replaced attention, trained with smoothed cross-entropy and AdamW.

    Batches have float `inputs` (B, 3, S, S), and `mix_target`, `mix_weight` if images are
    mixed: the loss then uses the mixed labels. Vectors, biases and position tables have no weight
    decay. Logs, in addition to the values of `LabelTask`: `val/accuracy_top5` and
    `test/accuracy_top5`, computed from exact sums over samples.

    Source: FiSH, NeurIPS 2022, table 5 and its image code (Swin, DeiT).
    Departs from the source: nothing.

    Args:
        initial_weights: file with a state dict of the timm model to start from (torch.save or
            safetensors). Replaced layers load its position tables; with attention_weights=copy also
            its projections.
        label_smoothing: fraction of a label that is spread over all classes.
        start_lr: learning rate of the first warm-up step. None keeps the schedule's.
        final_lr: learning rate at the end of the cosine.
        ema_decay: decay of a moving average of the weights, which evaluations then use. None
            disables it.
        ema_warmup: let the decay grow from 0 (timm's `use_warmup`).

    Raises:
        ValueError: the model or a layer does not exist, the weights belong to another model, or a
            rate is out of range.
    """

    logged: ClassVar[tuple[str, ...]] = (*LabelTask.logged, "accuracy_top5")

    @takes(ImageModel, LabelTask, model_name="swin_tiny_patch4_window7_224", drop_path=0.2)
    def __init__(
        self,
        *,
        initial_weights: str | None = None,
        label_smoothing: Rate = 0.1,
        start_lr: Annotated[NotNegative | None, OnlyWith(warmup_steps=Range(1))] = None,
        final_lr: NotNegative = 0.0,
        ema_decay: Rate | None = None,
        ema_warmup: Annotated[bool, OnlyWith(ema_decay=Range())] = False,
        **options: Any,
    ) -> None:
        super().__init__(**arguments_of(LabelTask, options))
        if max(final_lr, start_lr or 0.0) > self.lr:
            raise ValueError(
                f"start_lr and final_lr must be at most lr={self.lr}, received {start_lr} "
                f"and {final_lr}"
            )
        if final_lr and not self.schedule.startswith("cosine"):
            raise ValueError(f"final_lr requires a cosine schedule, received {self.schedule!r}")
        self.label_smoothing = label_smoothing
        self.start_lr, self.final_lr = start_lr, final_lr
        self.model: nn.Module = ImageModel(**arguments_of(ImageModel, options))
        if initial_weights is not None:
            copy = options["attention_weights"] == "copy"
            with prefixed("initial_weights", ConfigError):
                weights = read_state_dict(Path(initial_weights))
            load_timm_state_dict(self.net, weights, projections=copy)
        self.ema: ModelEmaV3 | None = None
        if ema_decay is not None:
            self.ema = ModelEmaV3(self.model, decay=ema_decay, use_warmup=ema_warmup)
            self.ema.requires_grad_(False)
        top: dict[str, Any] = {"average": "micro", "top_k": min(TOP_K, self.num_classes)}
        self.accuracies_top5 = nn.ModuleDict(
            {split: MulticlassAccuracy(self.num_classes, **top) for split in get_args(Split)}
        )

    heads = ("net.head", "net.fc", "net.classifier")

    @property
    def net(self) -> nn.Module:
        """timm's model."""
        return cast(nn.Module, self.model.net)

    def batch_loss(self, batch: Batch) -> Tensor:
        """Return the mean smoothed cross-entropy, with mixed labels for mixed images; ()."""
        mixed = cast(Mapping[str, Tensor], batch)
        logits = self(batch)

        def losses(target: Tensor) -> Tensor:
            smoothing = self.label_smoothing if self.training else 0.0
            return F.cross_entropy(logits, target, reduction="none", label_smoothing=smoothing)

        own = losses(batch["target"])
        if "mix_target" not in mixed:
            return own.mean()
        weight = mixed["mix_weight"].to(own)  # half precision, if that is the precision of inputs
        return torch.lerp(own, losses(mixed["mix_target"]), weight).mean()

    # ---- optimiser -----------------------------------------------------------------------------

    def configure_model(self) -> None:
        """Shard the parameters over the ranks if the strategy requires it.

        Raises:
            ValueError: ema_decay is set, which does not support sharding.
        """
        if self.device_mesh is not None and self.ema is not None:
            raise ValueError(
                "ema_decay does not support sharded parameters: use configs/trainer/ddp.yaml, or "
                "set --model.init_args.ema_decay null"
            )
        super().configure_model()

    def configure_optimizers(self) -> Optimizer:
        """Return AdamW, without weight decay on vectors, biases and position tables."""
        skipped = cast(ImageModel, self.model).no_weight_decay()
        named = ordered_parameters(self.model).items()
        groups: list[dict[str, Any]] = [
            {"params": [p for name, p in named if name not in skipped]},
            {"params": [p for name, p in named if name in skipped], "weight_decay": 0.0},
        ]
        return self.make_optimizer(AdamW, [group for group in groups if group["params"]])

    def scheduled(self) -> ScheduleValues:
        """Return the schedule between `start_lr`, `lr` and `final_lr`.

        With `start_lr`, warm-up step t of T has start + (lr - start) t / T, as in timm; the
        cosine is rescaled to end at `final_lr`.
        """
        values, step = super().scheduled(), self.trainer.global_step
        warmup = self._lengths().warmup
        if step < warmup:
            if self.start_lr is None:
                return values
            share = step / warmup
            return values._replace(lr=self.start_lr + (self.lr - self.start_lr) * share)
        return values._replace(lr=self.final_lr + (1 - self.final_lr / self.lr) * values.lr)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Step the optimiser, then update the moving average unless the step was skipped."""
        super().optimizer_step(*args, **kwargs)
        if self.ema is not None and self._overflows_in_a_row == 0:
            # Lightning increments the step later; timm counts from 1 and copies the first.
            self.ema.update(self.model, step=self.trainer.global_step + 1)

    # ---- evaluation ----------------------------------------------------------------------------

    def evaluate(self, batch: Batch, split: Split) -> None:
        """Score a batch with the moving average of the weights; see `LabelTask.evaluate`."""
        with self._averaged():
            super().evaluate(batch, split)

    def predict_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return predictions; see `LabelTask.predict_step`."""
        with self._averaged():
            return super().predict_step(batch, batch_idx)

    def reset_scores(self) -> None:
        """Discard the sums of the metrics."""
        super().reset_scores()
        reset_metrics(self.accuracies_top5)

    def _evaluate_more(self, logits: Tensor, target: Tensor, split: Split) -> None:
        accuracy = cast(Metric, self.accuracies_top5[split])
        if len(target):
            accuracy.update(logits, target)
        self.log(f"{split}/accuracy_top5", accuracy, on_step=False, on_epoch=True)

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        """Replace the model by its moving average, if there is one."""
        if self.ema is None:
            yield
            return
        trained = self.model
        self.model = cast(nn.Module, self.ema.module)
        try:
            yield
        finally:
            self.model = trained
