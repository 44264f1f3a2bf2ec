"""`torchrun … -m tests.killing.frail_fit …`: `fit` whose rank 1 dies once, in its first life.

The newest checkpoint is damaged in the moment of death, as FRAIL_DAMAGE says (cut or flip), at
micro-batch FRAIL_AT.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from lit_probattn.cli.app import main
from lit_probattn.tasks import SequenceClassifier
from lit_probattn.training.checkpoints import list_checkpoints
from tests.killing.damage import DAMAGE
from tests.support.runs import kill_me

step = SequenceClassifier.training_step


def frail_step(self: Any, batch: Any, batch_idx: int) -> Any:
    """Die at one micro-batch."""
    first_life = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if first_life and self.global_rank == 1 and batch_idx == int(os.environ["FRAIL_AT"]):
        (folder,) = Path(os.environ["FRAIL_ROOT"]).glob("*/*/checkpoints")
        DAMAGE[os.environ["FRAIL_DAMAGE"]](list_checkpoints(folder, "step")[0])
        kill_me()
    return step(self, batch, batch_idx)


SequenceClassifier.training_step = frail_step

if __name__ == "__main__":
    sys.exit(main())
