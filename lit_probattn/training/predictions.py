"""`predict` writes one row per sample: predictions-<checkpoint>.parquet."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pandas as pd
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lit_probattn.tasks.distributed import gather_objects


def predictions_frame(batches: list[dict[str, Any]]) -> pd.DataFrame:
    """Rows of `predict_step` outputs, ordered by sample.

    Returns:
        A column for each output: numbers, texts, or a list of numbers per row; `probabilities`
        become `probability_0` … (float32), one column per class.
    """
    frames = []
    for batch in batches:
        columns: dict[str, Any] = {}
        for name, values in batch.items():
            if name == "probabilities":
                table = values.float().cpu().numpy()
                columns |= {f"probability_{c}": table[:, c] for c in range(table.shape[1])}
            elif isinstance(values, Tensor):
                columns[name] = values.cpu().numpy() if values.dim() == 1 else values.tolist()
            else:
                columns[name] = values
        frames.append(pd.DataFrame(columns))
    table = pd.concat(frames, ignore_index=True)
    return table.sort_values("sample_id", kind="stable", ignore_index=True)


class PredictionWriter(Callback):
    """Collects predictions on every rank; the first rank writes them to one Parquet file.

    Args:
        path: the file, replaced whole if it exists.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._batches: list[dict[str, Any]] = []

    def on_predict_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Keep one batch, on the CPU."""
        self._batches.append(
            {name: v.cpu() if isinstance(v, Tensor) else v for name, v in outputs.items()}
        )

    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Gather the ranks' rows and write the file."""
        frames = gather_objects(predictions_frame(self._batches))
        self._batches = []
        if not trainer.is_global_zero:
            return
        table = pd.concat(frames, ignore_index=True)
        table = table.sort_values("sample_id", kind="stable", ignore_index=True)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        table.to_parquet(temporary, index=False)
        temporary.replace(self.path)
