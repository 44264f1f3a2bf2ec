"""Extractive question answering: SQuAD."""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_probattn.attention.numerics import compute_dtype
from lit_probattn.base.arguments import Count, Range, arguments_of, takes
from lit_probattn.models.fine_tuned import SpanModel
from lit_probattn.tasks.base import Split, Task, real_rows
from lit_probattn.tasks.distributed import gather_objects
from lit_probattn.tasks.fine_tuning.answers import Prediction, scores_of
from lit_probattn.tasks.fine_tuning.recipe import BERT, FineTuning
from lit_probattn.tasks.fine_tuning.spans import (
    Answer,
    Window,
    best_spans,
    merge,
    probabilities,
)


class QuestionAnswering(FineTuning):
    """Encoder with two scores per token, for the answer's first and last token.

    Trained on the mean over windows of the average of both cross-entropies. In a window without the
    answer both targets are the first token of the sequence.

    A batch consists of windows: a question and a piece of its text. `inputs`, `key_mask`,
    `token_types` (B, N); `answerable` (B, N), True on tokens of the text; `target` (B, 2),
    positions of the answer's first and last token; `sample_ids` (B,), the window indices.

    Logs, in addition to the values of every task, for `val` and `test`: `loss`, over all windows;
    `exact_match` and `f1` in percent, `questions`; and for data of version 2.0 the additional
    scores of `lit_probattn.tasks.fine_tuning.answers.scores_of`. Each question counts once,
    regardless of the batches and ranks of its windows; if windows are excluded
    (`limit_val_batches`), the prediction uses the remaining ones.

    `predict` writes a row per question: `id`, `prediction`, `score`, `null_odds` (no-answer score
    minus the score of the best text), the `n_best` texts with their scores and probabilities, and
    the correct answers; and next to the table the official JSON of identifiers and texts.

    Source: BERT (Devlin et al., 2019), sections 4.2 and 4.3.

    Args:
        n_best: number of answers kept per window and per question.
        max_answer_length: maximum number of tokens of an answer.
        null_threshold: for data of version 2.0, no answer is predicted if `null_odds` exceeds it.

    Raises:
        ValueError: a value is out of range.
    """

    logged: ClassVar[tuple[str, ...]] = (
        *("loss", "exact_match", "f1", "questions"),
        *("has_answer_*", "no_answer_*", "best_*"),
    )
    num_sums = 2  # losses, windows

    model: SpanModel

    @takes(SpanModel, Task, **BERT)
    def __init__(
        self,
        *,
        n_best: Count = 20,
        max_answer_length: Count = 30,
        null_threshold: Annotated[float, Range()] = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(**arguments_of(Task, options))
        self.keep_arguments()
        self.n_best, self.max_answer_length = n_best, max_answer_length
        self.null_threshold = null_threshold
        self.model = SpanModel(**arguments_of(SpanModel, options))
        self._windows: list[Window] = []

    def setup(self, stage: str) -> None:
        """Check that the data provide texts, and that null_threshold applies to them.

        Raises:
            ValueError: a check fails; see also `FineTuning.setup`.
        """
        super().setup(stage)
        version = self._data().version
        if self.null_threshold and version == "1.1":
            raise ValueError(
                f"null_threshold {self.null_threshold} applies to data of version 2.0, in which "
                "questions can have no answer: unset it, or set --data.init_args.version 2.0"
            )

    # ---- losses ------------------------------------------------------------------------------

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the logits of starts and ends, −inf at padding, in float32 or float64; (B, N)."""
        start, end = (
            logits.to(compute_dtype(logits)) for logits in self.model(**self.encoder_inputs(batch))
        )
        blocked = ~batch["key_mask"]
        return start.masked_fill(blocked, -math.inf), end.masked_fill(blocked, -math.inf)

    def window_losses(self, start: Tensor, end: Tensor, target: Tensor) -> Tensor:
        """Return the mean of both cross-entropies of every window, (B,)."""
        first, last = target.unbind(-1)
        losses = [
            F.cross_entropy(start, first, reduction="none"),
            F.cross_entropy(end, last, reduction="none"),
        ]
        return torch.stack(losses).mean(0)

    def batch_loss(self, batch: Any) -> Tensor:
        """Return the mean loss over the windows of a batch. Shape ()."""
        start, end = self(batch)
        return self.window_losses(start, end, batch["target"]).mean()

    # ---- evaluation --------------------------------------------------------------------------

    def evaluate(self, batch: Any, split: Split) -> None:
        """Accumulate the losses and the best spans of the real windows of a batch."""
        rows = real_rows(batch)
        if not len(rows["sample_ids"]):
            return
        start, end = self(rows)
        losses = self.window_losses(start, end, rows["target"]).double()
        self.add_to_sums(losses.sum(), losses.new_tensor(len(losses)))
        self._windows += self._found(rows, start, end, split)

    def log_scores(self, split: Split) -> None:
        """Log the loss, and the scores of all questions."""
        total, count = self.summed().tolist()
        windows = [window for part in gather_objects(self._windows) for window in part]
        self.reset_scores()
        questions, data = self._questions(split), self._data()
        rows = [
            Prediction(answer.text, answer.odds, questions[answer.question].answers)
            for answer in self._merged(windows, split)
        ]
        scores = {"loss": total / count if count else math.nan}
        scores |= scores_of(rows, data.version, self.null_threshold)
        for name, value in scores.items():
            exact = torch.tensor(value, dtype=torch.float64)
            self.log(f"{split}/{name}", exact, prog_bar=split == "val" and name in ("loss", "f1"))

    def reset_scores(self) -> None:
        """Discard the sums and the windows."""
        super().reset_scores()
        self._windows = []

    def _found(self, rows: Any, start: Tensor, end: Tensor, split: str) -> list[Window]:
        """Return the results of windows, with spans converted from tokens to characters."""
        data, sizes = self._data(), (self.n_best, self.max_answer_length)
        best = best_spans(
            start, end, rows["answerable"], count=sizes[0], max_answer_length=sizes[1]
        )
        null = (start[:, 0] + end[:, 0]).tolist()
        found = []
        for row, number in enumerate(rows["sample_ids"].tolist()):
            places = zip(*(part[row].tolist() for part in best), strict=True)
            spans = [
                (score, *data.characters(split, number, first, last))
                for score, first, last in places
                if score > -math.inf
            ]
            found.append(Window(data.question_of(split, number), null[row], spans))
        return found

    def _merged(self, windows: list[Window], split: str) -> list[Answer]:
        contexts = [question.context for question in self._questions(split)]
        return merge(windows, contexts, self.n_best)

    # ---- prediction --------------------------------------------------------------------------

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """Return the results of the real windows of a batch.

        Returns:
            `sample_id` (R,), the window indices, and `found`, a `Window` of each as a list.
        """
        rows = real_rows(batch)
        found: list[Window] = []
        if len(rows["sample_ids"]):
            start, end = self(rows)
            found = self._found(rows, start, end, self._data().predict_split)
        return {"sample_id": rows["sample_ids"], "found": [list(window) for window in found]}

    def finish_predictions(self, table: Any) -> Any:
        """Merge the rows of windows into one row per question."""
        import pandas as pd

        data = self._data()
        windows = [Window(*found) for found in table["found"]]
        questions = self._questions(data.predict_split)
        rows = []
        for answer in self._merged(windows, data.predict_split):
            question = questions[answer.question]
            is_null = data.version == "2.0" and answer.odds > self.null_threshold
            row = {
                "sample_id": answer.question,
                "id": question.id,
                "question": question.question,
                "prediction": "" if is_null else answer.text,
                "score": answer.null if is_null or not answer.scores else answer.scores[0],
                "null_odds": answer.odds,
                "n_best": answer.texts,
                "n_best_scores": answer.scores,
                "n_best_probabilities": probabilities(answer.scores),
                "answers": list(question.answers),
            }
            rows.append(row)
        return pd.DataFrame(rows)

    def prediction_files(self, table: Any) -> dict[str, str]:
        """Return the official JSON; for version 2.0 also the odds, for choosing thresholds."""
        texts = dict(zip(table["id"], table["prediction"], strict=True))
        files = {".json": json.dumps(texts, ensure_ascii=False, indent=1) + "\n"}
        if self._data().version == "2.0":
            odds = dict(zip(table["id"], table["null_odds"], strict=True))
            files["-null_odds.json"] = json.dumps(odds, indent=1) + "\n"
        return files

    # ---- data --------------------------------------------------------------------------------

    def _questions(self, split: str) -> Any:
        return self._data().questions(split)

    def _data(self) -> Any:
        """Return the DataModule, which provides the texts.

        Raises:
            ValueError: the DataModule does not provide texts.
        """
        data = self.datamodule
        if not hasattr(data, "characters"):
            raise ValueError(
                "answers require data with the texts of questions (datamodules."
                f"QuestionAnswering), received {type(data).__name__}"
            )
        return data
