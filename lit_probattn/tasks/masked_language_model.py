"""Hidden words: masked language models over text in two directions."""

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from lit_probattn.base.arguments import arguments_of, takes
from lit_probattn.models.language_model import IGNORE
from lit_probattn.models.masked_language_model import MaskedLanguageModel, mask_tokens
from lit_probattn.tasks.base import Batch, Split, Task
from lit_probattn.tasks.counted import CountedTask
from lit_probattn.tasks.distributed import sum_over_ranks


class MaskedLanguageModeling(CountedTask):
    """Masked language model, trained on the mean loss of the hidden words of a global batch.

    A batch's `target` (B, N) holds the words themselves, -100 where nothing may be hidden. Words
    are hidden here, as a pure function of seed, optimiser step, sample and position: anew in every
    epoch of training, always alike in evaluation.

    Logged beside what every task logs, for `val` and `test`: `mlm_error`, the percentage of hidden
    words whose likeliest prediction is wrong; `mlm_loss`, their mean −log p; `mlm_tokens`, their
    number. All are sums over all ranks, each word once. With `next_sentence` also `nsp_error`, the
    percentage of pairs that are wrongly told apart, and `nsp_loss`, their mean −log p.

    With `next_sentence` the loss is Σ −log p(word) / W + Σ w_s −log p(s) / W, over the W hidden
    words and the sequences s of a global batch, w_s the words that are hidden in s on average.
    Departs from the source (BERT), which adds the mean over sequences: w_s makes that a mean
    weighted by length, so that W is all that ranks must agree on.

    Source: value-aware attention (Gupta and Berant, 2021), section 4 and A.1; RoBERTa.
    Departs from the source: the paper does not define its error; this is the usual reading.

    Args:
        vocab_size: number of token ids, the last three begin, end and mask, unless `mask_token` is
            given.
        mask_probability: share of words that are hidden.
        mask_token: id of the mask token of an imported vocabulary; random words are then drawn from
            all ids. None means that of the data's tokeniser; without one the last id, and words
            below the last three.

    Raises:
        ValueError: `mask_probability` is not in (0, 1), or `mask_token` is not an id.
    """

    logged: ClassVar[tuple[str, ...]] = (
        *("mlm_error", "mlm_loss", "mlm_tokens"),
        *("nsp_error", "nsp_loss"),
    )

    model: MaskedLanguageModel

    @takes(MaskedLanguageModel, Task)
    def __init__(
        self,
        *,
        mask_probability: float = 0.15,
        mask_token: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**arguments_of(Task, options))
        vocab_size: int = options["vocab_size"]
        if not 0.0 < mask_probability < 1.0:
            raise ValueError(f"mask_probability must be in (0, 1), received {mask_probability}")
        if mask_token is not None and not 0 <= mask_token < vocab_size:
            raise ValueError(
                f"mask_token must be an id, from 0 to {vocab_size - 1}, received {mask_token}"
            )
        self.keep_arguments()
        self.mask_probability, self.mask_token = mask_probability, mask_token
        self.model = MaskedLanguageModel(**arguments_of(MaskedLanguageModel, options))
        self.next_sentence: bool = options["next_sentence"]
        # Losses, wrong words, hidden words; losses, wrong pairs, pairs.
        self._sums = torch.zeros(6, dtype=torch.float64)

    # ---- losses ------------------------------------------------------------------------------

    def encode(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Hide words; return what the output layer reads, (B, N, C), and the target (B, N)."""
        hidden, target, _ = self.encode_pairs(batch, with_pairs=False)
        return hidden, target

    def encode_pairs(
        self, batch: Batch, with_pairs: bool = True
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return these, and the logits of pairs, (B, 2)."""
        key = self.random_key(batch)
        inputs, target = mask_tokens(
            batch["inputs"],
            batch["target"],
            key,
            vocab_size=self.model.vocab_size,
            probability=self.mask_probability,
            mask_token=self.mask_token,
        )
        given: Any = {"key_mask": batch["key_mask"], "token_types": batch.get("token_types")}
        if not with_pairs:
            return self.model(inputs, **given, rng=key), target, None
        hidden, logits = self.model(inputs, **given, rng=key, with_pairs=True)
        return hidden, target, logits

    def token_losses(self, batch: Batch) -> Tensor:
        """Return the loss of every hidden word, in their order, (num_hidden,) float32."""
        return self.model.token_losses(*self.encode(batch))

    def token_results(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return every hidden word's loss, and whether it is predicted wrongly; (num_hidden,)."""
        return self._scored(*self.encode(batch))

    def _scored(self, hidden: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        wrong = self.model.predictions(hidden, target) != target[target != IGNORE]
        return self.model.token_losses(hidden, target), wrong

    def pair_losses(self, logits: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        """Return every pair's loss, and whether it is told wrongly; (B,) each.

        Raises:
            ValueError: the batch has no pairs.
        """
        if "elsewhere" not in batch:
            raise ValueError(
                "next_sentence needs pairs of parts, which these data do not have: take "
                "datamodules.PretrainingText with next_sentence true, or set it false here"
            )
        wide = logits if logits.dtype == torch.float64 else logits.float()
        elsewhere = batch["elsewhere"]
        losses = functional.cross_entropy(wide, elsewhere, reduction="none")
        return losses, wide.argmax(-1) != elsewhere

    def loss_sum(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses of a batch's hidden words, and their number; both ().

        With `next_sentence` the losses of pairs are in the sum, weighted.
        """
        hidden, target, logits = self.encode_pairs(batch, self.next_sentence)
        losses = self.model.token_losses(hidden, target)
        total = losses.sum()
        if logits is not None:
            words = (batch["target"] != IGNORE).sum(-1)  # (B,)
            pairs, _ = self.pair_losses(logits, batch)
            total = total + self.mask_probability * (words * pairs).sum()
        return total, torch.tensor(len(losses), device=losses.device)

    def places(self, batch: Batch) -> int:
        """Return how many words a batch of so many rows could hide."""
        return len(batch["inputs"]) * self.model.max_seq_len

    # ---- evaluation --------------------------------------------------------------------------

    def evaluate(self, batch: Batch, split: Split) -> None:
        """Add losses and errors of the real rows of a batch."""
        real = batch["sample_ids"] >= 0
        if not bool(real.any()):
            return
        rows: Any = {name: value[real] for name, value in batch.items() if torch.is_tensor(value)}
        hidden, target, logits = self.encode_pairs(rows, self.next_sentence)
        losses, wrong = self._scored(hidden, target)
        sums = [losses.double().sum(), wrong.double().sum(), losses.new_tensor(len(losses))]
        if logits is not None:
            losses, wrong = self.pair_losses(logits, rows)
            sums += [losses.double().sum(), wrong.double().sum(), losses.new_tensor(len(losses))]
        self._sums[: len(sums)] += torch.stack([x.double() for x in sums]).to(self._sums)

    def log_scores(self, split: Split) -> None:
        """Log error, loss and number of hidden words, and those of pairs."""
        loss, wrong, count, *pairs = sum_over_ranks(self._sums.to(self.device)).tolist()
        per_word = 1.0 / count if count else float("nan")
        self.log(f"{split}/mlm_error", 100.0 * wrong * per_word, prog_bar=split == "val")
        self.log(f"{split}/mlm_loss", loss * per_word)
        self.log(f"{split}/mlm_tokens", count)
        if self.next_sentence:
            per_pair = 1.0 / pairs[2] if pairs[2] else float("nan")
            self.log(f"{split}/nsp_error", 100.0 * pairs[1] * per_pair, prog_bar=split == "val")
            self.log(f"{split}/nsp_loss", pairs[0] * per_pair)
        self._sums = torch.zeros(6, dtype=torch.float64)
