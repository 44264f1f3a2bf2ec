"""What the DataModules hand to the tasks."""

from typing import TypedDict

from torch import Tensor


class Batch(TypedDict):
    """A batch of sequences.

    `inputs` (B, N) token ids, `key_mask` (B, N) True where the token is real, `target` (B,),
    `sample_ids` (B,) index in the split; -1 marks a row that only fills up an evaluation batch.
    Pairs of texts have `inputs` and `key_mask` (B, 2, N).
    """

    inputs: Tensor
    key_mask: Tensor
    target: Tensor
    sample_ids: Tensor
