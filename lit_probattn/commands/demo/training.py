"""Two small classifiers, trained alternately on the same batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from datamodules.expressions import MAX_LEN, NUM_CLASSES, Expressions, batches
from datamodules.lra.listops_generator import TOKENS
from lit_probattn.attention import AttentionFactory, MGKAttention, SoftmaxAttention
from lit_probattn.models.classifiers import Classifier

NUM_HEADS = 4
NUM_LAYERS = 2
EMBED_DIM = 64
HEAD_DIM = 16
BATCH = 64
_WARMUP, _LR = 50, 3e-3
VARIANTS: dict[str, AttentionFactory] = {
    f"softmax, {NUM_HEADS} heads": partial(SoftmaxAttention, num_heads=NUM_HEADS),
    f"sMGK, {NUM_HEADS // 2} heads": partial(
        MGKAttention, num_heads=NUM_HEADS // 2, num_components=2, shifted_keys=True
    ),
}


def make_model(attention: AttentionFactory, max_seq_len: int = MAX_LEN) -> Classifier:
    """Return a small classifier of expressions, without dropout."""
    return Classifier(
        attention,
        vocab_size=len(TOKENS),
        num_classes=NUM_CLASSES,
        max_seq_len=max_seq_len,
        embed_dim=EMBED_DIM,
        head_dim=HEAD_DIM,
        num_layers=NUM_LAYERS,
        mlp_dim=2 * EMBED_DIM,
        dropout=0.0,
    )


@dataclass
class Side:
    """A model in training, and its history."""

    name: str
    model: Classifier
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)  # per step
    seconds: list[float] = field(default_factory=list)  # per step
    accuracy: list[tuple[int, float]] = field(default_factory=list)  # (steps, accuracy)

    @classmethod
    def new(cls, name: str, attention: AttentionFactory, seed: int) -> Side:
        """Return an untrained model."""
        torch.manual_seed(seed)
        model = make_model(attention)
        return cls(name, model, torch.optim.AdamW(model.parameters(), lr=_LR))

    def step(self, batch: Expressions) -> None:
        """Take one step, and record its loss and time."""
        begin = time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = _LR * min(1.0, (len(self.losses) + 1) / _WARMUP)
        loss = F.cross_entropy(self.logits(batch.tokens), batch.values)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.losses.append(float(loss.detach()))
        self.seconds.append(time.perf_counter() - begin)

    def logits(self, tokens: Tensor) -> Tensor:
        """Map padded expressions (B, N) to logits (B, 10)."""
        scores: Tensor = self.model(tokens, key_mask=tokens > 0)
        return scores

    @torch.no_grad()
    def probabilities(self, tokens: Tensor) -> Tensor:
        """Return the probability of each value in evaluation mode, (B, 10)."""
        training = self.model.training
        self.model.eval()
        found = self.logits(tokens).softmax(-1)
        self.model.train(training)
        return found

    def evaluate(self, test: Expressions) -> None:
        """Record the accuracy."""
        right = self.probabilities(test.tokens).argmax(-1) == test.values
        self.accuracy.append((len(self.losses), float(right.float().mean())))


def make_sides(seed: int) -> list[Side]:
    """Return both untrained models."""
    return [Side.new(name, attention, seed) for name, attention in VARIANTS.items()]


def train(
    sides: Sequence[Side],
    data: tuple[Expressions, Expressions],
    *,
    seed: int,
    steps: int | None,
    seconds: float,
    show: Callable[[float], None],
) -> bool:
    """Train all models alternately on the same batches; return False if interrupted.

    Args:
        data: training and test expressions.
        seed: seed of the batches.
        steps: number of steps of each model; None means as many as fit into `seconds`.
        seconds: training time if `steps` is None.
        show: called after every evaluation with the completed fraction.
    """
    train_on, test_on = data
    every = 20 if steps is None else max(1, steps // 20)
    begin = time.perf_counter()
    done = 0.0
    try:
        for number, batch in enumerate(batches(train_on, BATCH, seed)):
            if number % every == 0 or done >= 1:
                for side in sides:
                    side.evaluate(test_on)
                show(min(done, 1.0))
            if done >= 1:
                break
            for side in sides:
                side.step(batch)
            spent = (time.perf_counter() - begin) / seconds
            done = spent if steps is None else (number + 1) / steps
    except KeyboardInterrupt:
        for side in sides:  # give all models the same batches
            if len(side.losses) < len(sides[0].losses):
                side.step(batch)
        return False
    return True
