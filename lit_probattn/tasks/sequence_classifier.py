"""Classification of sequences (ListOps, Text, …) or pairs of texts (Retrieval)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy

from lit_probattn.attention.numerics import compute_dtype
from lit_probattn.base.arguments import Count, arguments_of, takes
from lit_probattn.base.files import as_unicode
from lit_probattn.models.classifiers import Classifier
from lit_probattn.models.classifiers import PairClassifier as PairModel
from lit_probattn.tasks.base import Batch, Split, Task


def reset_metrics(*every: nn.ModuleDict) -> None:
    """Reset the metrics of all splits."""
    for metrics in every:
        for metric in metrics.values():
            cast(Metric, metric).reset()


class LabelTask(Task):
    """Base of tasks with one label per sample: cross-entropy, metrics, predictions.

    A subclass sets `self.model`, which maps inputs to logits. Logs, in addition to the values of
    every task: `val/loss`, `val/accuracy`, `test/loss`, `test/accuracy`. Both metrics are ratios of
    sums over samples, so they are the same for any number of ranks.

    Args:
        num_classes: number of labels.
    """

    logged: ClassVar[tuple[str, ...]] = ("loss", "accuracy")
    num_sums = 2  # losses, samples

    @takes(Task)
    def __init__(self, *, num_classes: Count, **training: Any) -> None:
        super().__init__(**training)
        self.keep_arguments()  # including the subclass's
        self.num_classes = num_classes
        splits = get_args(Split)
        self.accuracies = nn.ModuleDict(
            {split: MulticlassAccuracy(num_classes, average="micro") for split in splits}
        )

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits of a batch, in float32 or float64. Shape (B, num_classes)."""
        logits: Tensor = self.model(
            batch["inputs"], key_mask=batch["key_mask"], rng=self.random_key(batch)
        )
        return logits.to(compute_dtype(logits))

    def batch_loss(self, batch: Batch) -> Tensor:
        """Return the mean cross-entropy over the batch. Shape ()."""
        return F.cross_entropy(self(batch), batch["target"])

    def predict_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return the predictions of the real rows of a batch.

        Returns:
            `sample_id`, `target`, `prediction` (R,) int64 and `probabilities` (R, num_classes)
            float32, for the R rows that are not filler rows.
        """
        real = batch["sample_ids"] >= 0
        probabilities = self(batch)[real].softmax(dim=-1)
        return {
            "sample_id": batch["sample_ids"][real],
            "target": batch["target"][real],
            "prediction": probabilities.argmax(dim=-1),
            "probabilities": probabilities,
        }

    def finish_predictions(self, table: Any) -> Any:
        """Add the label of the predicted class and the file, if the data name them.

        Targets of samples without a label are missing values.
        """
        data = self.datamodule
        unlabelled = table["target"] < 0
        if unlabelled.any():
            table["target"] = table["target"].astype("Int64").mask(unlabelled)
        if hasattr(data, "classes"):
            classes = data.classes  # read from a file
            labels = [as_unicode(str(classes[number])) for number in table["prediction"]]
            table.insert(table.columns.get_loc("prediction") + 1, "predicted_label", labels)
        if hasattr(data, "name_of"):
            split, samples = data.predict_split, table["sample_id"]
            table.insert(1, "file", [as_unicode(data.name_of(split, i)) for i in samples])
        return table

    def evaluate(self, batch: Batch, split: Split) -> None:
        """Add the real rows of a batch to the metrics, ignoring filler rows."""
        logits = self(batch)
        real = batch["sample_ids"] >= 0
        losses = F.cross_entropy(logits, batch["target"], reduction="none")
        accuracy = cast(Metric, self.accuracies[split])
        self.add_to_sums(torch.where(real, losses.double(), 0.0).sum(), real.sum())
        if bool(real.any()):
            accuracy.update(logits[real], batch["target"][real])
        self._evaluate_more(logits[real], batch["target"][real], split)
        bar = split == "val"
        self.log(f"{split}/accuracy", accuracy, prog_bar=bar, on_step=False, on_epoch=True)

    def log_scores(self, split: Split) -> None:
        """Log the mean loss."""
        total, count = self.summed()
        self.log(f"{split}/loss", total / count)
        self._sums.zero_()

    def reset_scores(self) -> None:
        """Discard the sums of the metrics."""
        super().reset_scores()
        reset_metrics(self.accuracies)

    def _evaluate_more(self, logits: Tensor, target: Tensor, split: Split) -> None:
        """Hook for further metrics, on the R real rows of a batch; R may be 0."""


class SequenceClassifier(LabelTask):
    """Transformer encoder, pooling and a classifier head, trained with cross-entropy.

    For logged values see `LabelTask`.

    Source: MGK, ICML 2022, model and training set-up on the Long Range Arena.
    Departs from the source: whole validation and test sets are scored, each sample once, unless
    `parity_eval` of the data is set.
    """

    # The model class; subclasses for other inputs replace it by one with the same arguments.
    model_class: ClassVar[Callable[..., nn.Module]] = Classifier

    @takes(Classifier, LabelTask, embed_dim=64, head_dim=32, num_layers=2, mlp_dim=128)
    def __init__(self, **options: Any) -> None:
        super().__init__(**arguments_of(LabelTask, options))
        self.model: nn.Module = self.model_class(**arguments_of(Classifier, options))


class PairClassifier(SequenceClassifier):
    """A shared encoder for both texts of a pair, and a head that compares them.

    Batches have `inputs` and `key_mask` of shape (B, 2, N). Both texts are encoded in
    one call of 2 B sequences; for attention dropout, noise and random features, the texts of
    sample i have sample ids 2 i and 2 i + 1, so that their draws differ. Priors that follow an
    M-step (setting B) are updated once per optimiser step, from both texts of all pairs of that
    step.

    All arguments and logged values are those of SequenceClassifier.

    Source: MGK, ICML 2022, Retrieval set-up on the Long Range Arena.
    Departs from the source: one M-step per optimiser step instead of one per text; evaluation as
    in SequenceClassifier.
    """

    model_class: ClassVar[Callable[..., nn.Module]] = PairModel
