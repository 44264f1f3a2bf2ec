"""Batches of images: mixup, cutmix, and sample requests that include the step.

Mixing. Mixed images are neighbours in the global batch, and one draw, a function of (seed, step),
applies to the whole global batch. A global batch is therefore mixed identically for every number of
ranks and accumulation steps, provided that micro-batches contain whole pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from timm.data import Mixup
from torch import Tensor

from datamodules.core.loaders import Batch
from datamodules.core.order import TrainingOrder
from datamodules.core.sequences import batch_of
from datamodules.images.samples import Request, Sample, seeded

_MIX = 0x313  # separates these draws from order and transforms


@dataclass
class Mixing:
    """Mixup and cutmix of neighbours, by timm.

    Source: timm's `Mixup` in batch mode. Departs from the source: partners are neighbours in the
    batch instead of first and last; since the order of a batch is random, the distribution is the
    same.

    Args:
        mixup, cutmix: Parameters of the Beta distributions; 0 disables.
        probability: Probability that a batch is mixed.
        switch: Probability of cutmix if both are enabled.
    """

    mixup: float
    cutmix: float
    probability: float
    switch: float
    seed: int
    _mix: Mixup = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._mix = Mixup(
            mixup_alpha=self.mixup,
            cutmix_alpha=self.cutmix,
            prob=self.probability,
            switch_prob=self.switch,
            mode="batch",
            label_smoothing=0.0,
            num_classes=2,
        )

    def __call__(self, images: Tensor, step: int) -> tuple[Tensor, float]:
        """Return the mixed images (B, 3, S, S), and the weight of each original image."""
        rows = torch.arange(len(images))
        # timm mixes the first with the last, so neighbours are moved to opposite ends.
        order = torch.cat([rows[::2], rows[1::2].flip(0)])
        with seeded(self.seed, _MIX, step):
            mixed, shares = self._mix(images[order], (order % 2).long())
        back = torch.empty_like(mixed)
        back[order] = mixed
        return back, float(shares[0, 0])


@dataclass(frozen=True)
class ImageCollate:
    """Collate images; `mixing` mixes those of a training batch."""

    mixing: Mixing | None = None

    def __call__(self, samples: list[Sample]) -> Batch:
        """Return a batch.

        `inputs` (B, 3, S, S), `key_mask` (B, 1), all True (images have no padding), `target` and
        `sample_ids` (B,); if images are mixed also `mix_target` (B,), the class of the partner,
        and `mix_weight` (B,) float32, its weight.
        """
        images = torch.stack([sample.image for sample in samples])
        batch = batch_of(samples, images, torch.ones(len(samples), 1, dtype=torch.bool))
        if self.mixing is not None:
            batch["inputs"], own = self.mixing(batch["inputs"], samples[0].step)
            batch["mix_target"] = batch["target"].view(-1, 2).flip(1).flatten()
            batch["mix_weight"] = torch.full((len(samples),), 1.0 - own)
        return batch


class RequestOrder:
    """The micro-batches of a training order as requests with epoch and step."""

    def __init__(self, order: TrainingOrder) -> None:
        self.order = order

    def __iter__(self) -> Iterator[list[Request]]:
        num_steps = self.order.steps_per_epoch
        steps = self.order.micro_steps.of_epochs(num_steps, int)  # an epoch by its number
        for (epoch, index, _), samples in zip(steps, self.order, strict=False):
            yield [Request(sample, epoch, epoch * num_steps + index) for sample in samples]
