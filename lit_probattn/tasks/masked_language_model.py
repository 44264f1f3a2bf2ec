"""Masked language modelling with bidirectional encoders."""

from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim import AdamW, Optimizer

from lit_probattn.attention.numerics import compute_dtype
from lit_probattn.attention.packing import packing_of
from lit_probattn.base.arguments import Range, WholeNumber, arguments_of, takes
from lit_probattn.models.language_model import IGNORE
from lit_probattn.models.masked_language_model import MaskedLanguageModel, mask_tokens
from lit_probattn.tasks.base import Batch, Split, Task, real_rows
from lit_probattn.tasks.counted import CountedTask
from lit_probattn.tasks.parameter_order import groups_of_bert


class MaskedLanguageModeling(CountedTask):
    """Masked language model, trained on the mean loss of the masked tokens of a global batch.

    A batch's `target` (B, N) contains the original tokens, -100 for tokens that are never masked.
    Tokens are masked here, as a pure function of seed, optimiser step, sample and position: with
    new masks in every training epoch, and fixed masks in evaluation. Training batches can be
    packed: `cu_seqlens` instead of `key_mask` (`datamodules.core.packing`).

    Logs, in addition to the values of every task, for `val` and `test`: `mlm_error`, the
    percentage of masked tokens whose most likely prediction is wrong; `mlm_loss`, their mean −log
    p; `mlm_tokens`, their number. All are sums over all ranks, each token once. With
    `next_sentence` also `nsp_error`, the percentage of misclassified pairs, and `nsp_loss`, their
    mean −log p.

    With `next_sentence` the loss is Σ −log p(word) / W + Σ w_s −log p(s) / W, over the W masked
    tokens and the sequences s of a global batch, with w_s the expected number of masked tokens in
    s. Departs from the source (BERT), which adds the mean over sequences: w_s makes that a mean
    weighted by length, so that W is the only number that ranks must sum.

    Biases and layer norms have no weight decay, as in BERT's code.

    Source: value-aware attention (Gupta and Berant, 2021), section 4 and A.1; RoBERTa.
    Departs from the source: the paper does not define its error; this is the usual definition.

    Args:
        vocab_size: number of token ids, the last three being begin, end and mask, unless
            `mask_token` is set.
        mask_probability: fraction of tokens that are masked.
        mask_token: id of the mask token of an imported vocabulary; random tokens are then drawn
            from all ids. Default: the tokeniser's mask token; without a tokeniser the last id, and
            random tokens are drawn below the last three ids.

    Raises:
        ValueError: `mask_probability` is not in (0, 1), or `mask_token` is not an id.
    """

    logged: ClassVar[tuple[str, ...]] = (
        *("mlm_error", "mlm_loss", "mlm_tokens"),
        *("nsp_error", "nsp_loss"),
    )
    num_sums = 6  # losses, wrong tokens, masked tokens; losses, wrong pairs, pairs

    model: MaskedLanguageModel

    @takes(MaskedLanguageModel, Task)
    def __init__(
        self,
        *,
        mask_probability: Annotated[float, Range(above=0, below=1)] = 0.15,
        mask_token: WholeNumber | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**arguments_of(Task, options))
        vocab_size: int = options["vocab_size"]
        if mask_token is not None and mask_token >= vocab_size:
            raise ValueError(
                f"mask_token must be an id, from 0 to {vocab_size - 1}, received {mask_token}"
            )
        self.keep_arguments()
        self.mask_probability, self.mask_token = mask_probability, mask_token
        self.model = MaskedLanguageModel(**arguments_of(MaskedLanguageModel, options))
        self.next_sentence: bool = options["next_sentence"]

    def configure_optimizers(self) -> Optimizer:
        """Return AdamW, without weight decay on biases and layer norms."""
        return self.make_optimizer(AdamW, groups_of_bert(self.model))

    # ---- losses ------------------------------------------------------------------------------

    def encode(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Mask tokens; return the input of the output layer, (B, N, C), and the target (B, N)."""
        hidden, target, _ = self.encode_pairs(batch, with_pairs=False)
        return hidden, target

    def encode_pairs(
        self, batch: Batch, with_pairs: bool = True
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the results of `encode`, and the logits of pairs, (B, 2)."""
        bounds: Any = batch.get("cu_seqlens")
        key, packing = self.random_key(batch), packing_of(bounds)
        inputs, target = mask_tokens(
            batch["inputs"],
            batch["target"],
            key,
            vocab_size=self.model.vocab_size,
            probability=self.mask_probability,
            mask_token=self.mask_token,
            packing=packing,
        )
        given: Any = {"token_types": batch.get("token_types"), "cu_seqlens": packing}
        if packing is None:
            given["key_mask"] = batch["key_mask"]
        if not with_pairs:
            return self.model(inputs, **given, rng=key), target, None
        hidden, logits = self.model(inputs, **given, rng=key, with_pairs=True)
        return hidden, target, logits

    def token_losses(self, batch: Batch) -> Tensor:
        """Return the loss of every masked token, in order, (num_masked,) float32."""
        return self.model.token_losses(*self.encode(batch))

    def token_results(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return every masked token's loss, and whether its prediction is wrong; (num_masked,)."""
        return self._scored(*self.encode(batch))

    def _scored(self, hidden: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        wrong = self.model.predictions(hidden, target) != target[target != IGNORE]
        return self.model.token_losses(hidden, target), wrong

    def pair_losses(self, logits: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        """Return every pair's loss, and whether it is misclassified; (B,) each.

        Raises:
            ValueError: the batch has no pairs.
        """
        if "elsewhere" not in batch:
            raise ValueError(
                "next_sentence requires sentence pairs, which the data do not have: use "
                "datamodules.PretrainingText with next_sentence true, or set it to false here"
            )
        wide = logits.to(compute_dtype(logits))
        elsewhere = batch["elsewhere"]
        losses = functional.cross_entropy(wide, elsewhere, reduction="none")
        return losses, wide.argmax(-1) != elsewhere

    def loss_sum(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses of a batch's masked tokens, and their number; both ().

        With `next_sentence` the sum includes the weighted losses of pairs.
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
        """Return the maximum number of masked tokens of a batch with this many rows."""
        return len(batch["inputs"]) * self.model.max_seq_len

    # ---- evaluation --------------------------------------------------------------------------

    def evaluate(self, batch: Batch, split: Split) -> None:
        """Accumulate losses and errors of the real rows of a batch."""
        rows: Any = real_rows(batch)
        if not len(rows["sample_ids"]):
            return
        hidden, target, logits = self.encode_pairs(rows, self.next_sentence)
        losses, wrong = self._scored(hidden, target)
        sums = [losses.double().sum(), wrong.double().sum(), losses.new_tensor(len(losses))]
        if logits is not None:
            losses, wrong = self.pair_losses(logits, rows)
            sums += [losses.double().sum(), wrong.double().sum(), losses.new_tensor(len(losses))]
        self.add_to_sums(*sums)

    def log_scores(self, split: Split) -> None:
        """Log error, loss and number of masked tokens, and the same for pairs."""
        loss, wrong, count, *pairs = self.summed().tolist()
        per_word = 1.0 / count if count else float("nan")
        self.log(f"{split}/mlm_error", 100.0 * wrong * per_word, prog_bar=split == "val")
        self.log(f"{split}/mlm_loss", loss * per_word)
        self.log(f"{split}/mlm_tokens", count)
        if self.next_sentence:
            per_pair = 1.0 / pairs[2] if pairs[2] else float("nan")
            self.log(f"{split}/nsp_error", 100.0 * pairs[1] * per_pair, prog_bar=split == "val")
            self.log(f"{split}/nsp_loss", pairs[0] * per_pair)
        self.reset_scores()
