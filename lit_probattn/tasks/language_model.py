"""Causal language modelling: WikiText-103 and other running text, and separate sentences."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from lit_probattn.attention.cache import Cache
from lit_probattn.base.arguments import Count, arguments_of, takes
from lit_probattn.models.decoding import Sampling, generate
from lit_probattn.models.language_model import IGNORE, LanguageModel
from lit_probattn.tasks.base import Batch, Split, Task, real_rows
from lit_probattn.tasks.distributed import sum_over_ranks

# Scoring modes, as patterns.
_FORMS = ("segments", "sliding", "stride[0-9]*", "sentences")


class LanguageModeling(Task):
    """Causal language model, trained on the mean loss of the tokens of a batch.

    Logs, in addition to the values of every task: `val/ppl_<form>` and `test/ppl_<form>`, where
    the form, set by the batches, is the scoring mode: `segments` (independent segments, fast),
    `sliding` (a window that moves by one token, as in the papers), `stride<n>` or `sentences`
    (separately); and `<split>/tokens_<form>`, the number of scored tokens. A perplexity is
    exp(sum of losses / tokens) over all ranks, each token once, in float64. If batches contain
    the number of words of each row (`num_words`, 0 excludes the row), `<split>/word_ppl` and
    `<split>/words` are the per-word values.

    If batches contain the number of tokens of their global batch (`global_tokens`), the training
    loss is the mean over these tokens, independent of ranks and accumulation steps. Training
    batches can be packed: `cu_seqlens` instead of `key_mask` (`datamodules.core.packing`).

    `predict` continues prompts token by token, using each layer's cache or recurrent state.

    Source: MGK, ICML 2022, appendix A.1.2.

    Args:
        max_new_tokens: number of tokens that `predict` adds to a prompt.
    """

    logged: ClassVar[tuple[str, ...]] = (
        *(f"ppl_{form}" for form in _FORMS),
        *(f"tokens_{form}" for form in _FORMS),
        "word_ppl",
        "words",
    )

    model: LanguageModel

    @takes(LanguageModel, Sampling, Task)
    def __init__(self, *, max_new_tokens: Count = 64, **options: Any) -> None:
        super().__init__(**arguments_of(Task, options))
        self.keep_arguments()
        self.max_new_tokens = max_new_tokens
        self.sampling = Sampling(**arguments_of(Sampling, options))
        self.model = self.make_model(options)
        # Factory of the caches of `predict`; None means the model's default.
        self.make_caches: Callable[[], list[Cache]] | None = None
        self._scores: dict[str, Tensor] = {}  # form -> loss sum, tokens; the same for words
        self._generated: list[tuple[int, int, float]] = []  # rows, tokens per row, seconds

    def make_model(self, options: Mapping[str, Any]) -> LanguageModel:
        """Return the model for the options of the task."""
        return LanguageModel(**arguments_of(LanguageModel, options))

    # ---- losses ------------------------------------------------------------------------------

    def token_losses(self, batch: Batch) -> Tensor:
        """Return the loss of every scored token, in order, (num_scored,) float32."""
        bounds: Any = batch.get("cu_seqlens")
        given: Any = {"key_mask": batch["key_mask"]} if bounds is None else {"cu_seqlens": bounds}
        hidden = self.model(batch["inputs"], **given, rng=self.random_key(batch))
        return self.model.token_losses(hidden, batch["target"])

    def batch_loss(self, batch: Batch) -> Tensor:
        """Return the mean loss over the tokens of a batch. Shape ().

        With `global_tokens`, return this micro-batch's contribution to that of the global batch.
        """
        losses = self.token_losses(batch)
        total: Any = batch.get("global_tokens")
        return losses.mean() if total is None else self.part_of_mean(losses.sum(), total)

    # ---- evaluation --------------------------------------------------------------------------

    def evaluate(self, batch: Batch, split: Split) -> None:
        """Add the losses of the real rows of a batch."""
        rows: Any = real_rows(batch)
        form = str(batch.get("form", "segments"))
        sums = self._scores.setdefault(form, torch.zeros(4, dtype=torch.float64))
        if len(rows["sample_ids"]):
            losses = self.token_losses(rows).double()
            words = rows.get("num_words", torch.zeros(len(rows["sample_ids"]))).to(losses)
            # The row of each scored token, in order.
            row = (rows["target"] != IGNORE).nonzero()[:, 0]
            counted = (losses * (words > 0)[row]).sum()
            count = losses.new_tensor(len(losses))
            sums += torch.stack([losses.sum(), count, counted, words.sum()]).to(sums)

    def log_scores(self, split: Split) -> None:
        """Log perplexity and number of tokens for every scoring mode."""
        for form, sums in self._scores.items():
            total, count, counted, words = sum_over_ranks(sums.to(self.device)).tolist()
            self.log(f"{split}/ppl_{form}", _perplexity(total, count), prog_bar=split == "val")
            self.log(f"{split}/tokens_{form}", float(count))
            if words:
                self.log(f"{split}/word_ppl", _perplexity(counted, words))
                self.log(f"{split}/words", float(words))
        self.reset_scores()

    def reset_scores(self) -> None:
        """Discard the sums."""
        self._scores = {}

    # ---- prediction --------------------------------------------------------------------------

    def on_predict_epoch_start(self) -> None:
        """Discard the counts of an interrupted prediction."""
        self._generated = []

    def predict_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        """Continue the prompts of a batch, independently of one another; print them.

        Returns:
            `sample_id` (R,), `prompt` (R, P), `continuation` (R, T) token ids of the R real rows,
            and with a DataModule that can decode, `prompt_text` and `continuation_text`.
        """
        rows = real_rows(batch)
        prompt, mask, ids = (rows[k] for k in ("inputs", "key_mask", "sample_ids"))
        tokens = prompt.new_zeros(len(prompt), self.max_new_tokens)
        lengths = mask.sum(1)
        for length in lengths.unique().tolist():  # padding counts as positions in some caches
            part = (lengths == length).nonzero()[:, 0]
            made = generate(
                self.model,
                prompt[part, prompt.shape[1] - length :],
                max_new_tokens=self.max_new_tokens,
                sampling=self.sampling,
                sample_ids=ids[part],
                caches=None if self.make_caches is None else self.make_caches(),
            )
            tokens[part] = made.tokens
            self._generated.append((*made.tokens.shape, made.decode_seconds))
        result = {"sample_id": ids, "prompt": prompt, "continuation": tokens}
        decode = getattr(self.datamodule, "decode", None)
        if decode is None:
            return result
        prompts = [decode(row[keep].tolist()) for row, keep in zip(prompt, mask, strict=True)]
        texts = [decode(row.tolist()) for row in tokens]
        for number, before, after in zip(ids.tolist(), prompts, texts, strict=True):
            self.print_line(f"[{number}] {before} ⟶ {after}")
        return {**result, "prompt_text": prompts, "continuation_text": texts}

    def on_predict_epoch_end(self) -> None:
        """Print the decoding speed of all ranks together."""
        made = sum(rows * count for rows, count, _ in self._generated)
        timed = sum(rows * (count - 1) for rows, count, _ in self._generated)
        seconds = sum(duration for _, _, duration in self._generated)
        rate = timed / seconds if timed else 0.0
        device = self.device
        tokens, speed = sum_over_ranks(torch.tensor([float(made), rate], device=device)).tolist()
        speed_note = f", {speed:.1f} tokens per second after each prompt's first" if speed else ""
        self.print_line(f"{tokens:.0f} tokens generated{speed_note}")

    # ---- checkpoints -------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store size and hash of the vocabulary."""
        super().on_save_checkpoint(checkpoint)
        vocabulary = _vocabulary_of(self.datamodule)
        if vocabulary is not None:
            checkpoint["vocabulary"] = vocabulary

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the state.

        Raises:
            ValueError: the checkpoint was trained with a different vocabulary than the data's.
        """
        check_vocabulary(checkpoint, self.datamodule)
        super().on_load_checkpoint(checkpoint)


def _perplexity(total: float, count: float) -> Tensor:
    mean = total / count if count else float("nan")
    return torch.tensor(mean, dtype=torch.float64).exp()


def check_vocabulary(
    checkpoint: Mapping[str, Any], data: Any, remedy: str = "--data.init_args.vocab_file FILE"
) -> None:
    """Raise if the vocabulary of the data differs from that of a checkpoint.

    Args:
        checkpoint: content of the checkpoint.
        data: the DataModule in use.
        remedy: flag that sets a vocabulary, for the message.

    Raises:
        ValueError: the checkpoint was trained with a different vocabulary than the data's.
    """
    theirs, ours = checkpoint.get("vocabulary"), _vocabulary_of(data)
    if theirs is not None and ours is not None and theirs != ours:
        raise ValueError(
            f"the checkpoint was trained with a different vocabulary: {_describe(theirs)}; the "
            f"data have {_describe(ours)}. Use the text it was trained on, or its vocabulary: "
            f"{remedy}"
        )


def _vocabulary_of(data: Any) -> dict[str, Any] | None:
    """Return size and hash of the vocabulary of a DataModule, or None."""
    vocabulary = getattr(data, "vocabulary", None)
    if vocabulary is None:
        return None
    return {"size": len(vocabulary), "sha256": vocabulary.digest}


def _describe(vocabulary: dict[str, Any]) -> str:
    return f"{vocabulary['size']} words, sha256 {vocabulary['sha256'][:12]}…"
