"""Segments of episodes, and batches of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from datamodules.core.order import FILL
from datamodules.trajectories.episodes import Episodes

PADDED_ACTION = -10.0  # action of padded steps, as in the source


class Segment(NamedTuple):
    """Consecutive steps of an episode.

    Args:
        observations: Standardised, (num_steps, obs_dim) float32.
        actions: (num_steps, act_dim) float32.
        returns_to_go: Divided by the return scale, (num_steps,) float32.
        first: Index of the first step in its episode.
    """

    observations: npt.NDArray[np.float32]
    actions: npt.NDArray[np.float32]
    returns_to_go: npt.NDArray[np.float32]
    first: int
    sample_id: int


class Segments:
    """Segments of at most `context_length` steps, each within one episode.

    Args:
        chosen: Indices of the episodes.
        stride: Number of steps between the starts of consecutive segments. 1 starts a segment at
            every step, so that episodes are sampled in proportion to their length, as in the
            source.
    """

    def __init__(
        self,
        episodes: Episodes,
        chosen: npt.NDArray[np.int64],
        context_length: int,
        return_scale: float,
        stride: int = 1,
    ) -> None:
        self.episodes, self.chosen = episodes, chosen
        self.context_length, self.return_scale = context_length, return_scale
        bounds = zip(episodes.offsets[chosen], episodes.offsets[chosen + 1], strict=True)
        self._firsts = np.concatenate([np.arange(a, b, stride) for a, b in bounds])

    def __len__(self) -> int:
        return len(self._firsts)

    def __getitem__(self, index: int) -> Segment:
        """Return one segment; FILL returns the first one with the id FILL."""
        first = int(self._firsts[0 if index == FILL else index])
        offsets = self.episodes.offsets
        episode = int(np.searchsorted(offsets, first, side="right")) - 1
        rows = slice(first, min(first + self.context_length, int(offsets[episode + 1])))
        return Segment(
            self.episodes.standardised(rows),
            self.episodes.actions[rows],
            (self.episodes.returns_to_go[rows] / self.return_scale).astype(np.float32),
            first - int(offsets[episode]),
            index,
        )

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Number of steps of each segment, (num_segments,)."""
        offsets = self.episodes.offsets
        stops = offsets[np.searchsorted(offsets, self._firsts, side="right")]
        return np.minimum(stops - self._firsts, self.context_length)


@dataclass(frozen=True)
class SegmentCollate:
    """Collate segments, padded on the right to `context_length` steps."""

    context_length: int
    obs_dim: int
    act_dim: int

    def __call__(self, segments: list[Segment]) -> dict[str, Tensor]:
        """Return a batch of B segments of K steps.

        `observations` (B, K, obs_dim), `actions` (B, K, act_dim) and `returns_to_go` (B, K, 1) are
        float32, `timesteps` (B, K) int64, `mask` (B, K) is True on real steps, and `sample_ids`
        (B,) are the indices of the segments. Padding is 0, and -10 for actions. A filler row has no
        real steps and the id -1.
        """
        batch, steps = len(segments), self.context_length
        observations = np.zeros((batch, steps, self.obs_dim), dtype=np.float32)
        actions = np.full((batch, steps, self.act_dim), PADDED_ACTION, dtype=np.float32)
        returns = np.zeros((batch, steps, 1), dtype=np.float32)
        timesteps = np.zeros((batch, steps), dtype=np.int64)
        mask = np.zeros((batch, steps), dtype=np.bool_)
        for row, segment in enumerate(segments):
            if segment.sample_id == FILL:
                continue
            real = len(segment.returns_to_go)
            observations[row, :real] = segment.observations
            actions[row, :real] = segment.actions
            returns[row, :real, 0] = segment.returns_to_go
            timesteps[row, :real] = np.arange(segment.first, segment.first + real)
            mask[row, :real] = True
        arrays: dict[str, Any] = {
            "observations": observations,
            "actions": actions,
            "returns_to_go": returns,
            "timesteps": timesteps,
            "mask": mask,
        }
        arrays["sample_ids"] = np.array([segment.sample_id for segment in segments])
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
