"""Machine translation: label-smoothed training, beam search, BLEU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from lit_probattn.attention.numerics import compute_dtype
from lit_probattn.base.arguments import Count, Rate, WholeNumber, arguments_of, takes
from lit_probattn.models.adaptive_softmax import MAX_LOGITS, in_parts
from lit_probattn.models.decoding import Sampling
from lit_probattn.models.encoder_decoder import EncoderDecoder
from lit_probattn.models.language_model import IGNORE
from lit_probattn.models.search import Beam, Hypothesis, beam_search, sample
from lit_probattn.tasks.base import Batch, Split, Task, real_rows
from lit_probattn.tasks.bleu import FORMS, BLEUForm, BLEUScore, check_installed, corpus_bleu
from lit_probattn.tasks.distributed import gather_objects, num_ranks, sum_over_ranks


class TranslationBatch(Batch):
    """A batch of sentence pairs.

    `source` (B, S) token ids, EOS at the end, padded on the right; `source_mask` (B, S) True for
    real tokens. `inputs` (B, T): EOS, then the target without its last token; `key_mask`
    (B, T). `target` (B, T): the target and EOS, -100 at padding. `global_tokens` (): number of
    target tokens of the optimiser step, over all ranks and accumulation steps; in training only.
    """

    source: Tensor
    source_mask: Tensor
    global_tokens: Tensor


class _Line(NamedTuple):
    """A translated sentence: index, and hypothesis and reference, detokenised and tokenised."""

    number: int
    text: str
    reference: str
    tokens: str
    reference_tokens: str


class _Written(NamedTuple):
    """The lines of a split: detokenised source and reference, tokenised reference."""

    source: list[str]
    reference: list[str]
    tokenised: list[str]


def smoothed_losses(logits: Tensor, target: Tensor, smoothing: float) -> Tensor:
    """Return the losses of tokens with and without label smoothing, in nats.

    The smoothed target has 1 − ε for the correct word and ε / (V − 1) for every other:

        loss = −(1 − ε) log p[target] − ε / (V − 1) Σ_{v ≠ target} log p[v]

    Source: Szegedy et al., 2016, as in fairseq's label_smoothed_cross_entropy.

    Args:
        logits: (n, V).
        target: correct words, (n,).
        smoothing: ε.

    Returns:
        Shape (n, 2), in float32 or float64.
    """
    log_probs = logits.to(compute_dtype(logits)).log_softmax(-1)
    plain = -log_probs.gather(-1, target[:, None])[:, 0]
    others = -log_probs.sum(-1) - plain
    smoothed = (1.0 - smoothing) * plain + smoothing / (logits.shape[-1] - 1) * others
    return torch.stack([smoothed, plain], dim=-1)


class Translation(Task):
    """Encoder–decoder, trained on the mean label-smoothed loss of the tokens of a global batch.

    The mean is over all target tokens of an optimiser step, independent of the distribution over
    ranks and accumulation steps; padding is ignored.

    Logs, in addition to the values of every task: `train/nll`, the training loss without
    smoothing. For `val` and `test`, over every target token once and all ranks: `loss` with
    smoothing and `nll` without, in nats; both in bits, as fairseq prints them, `loss_bits` and
    `nll_bits`; `ppl`, exp(nll); `tokens`. And `bleu` in the selected format, used to select
    checkpoints; in a test all formats, each under its name (`lit_probattn.tasks.bleu`).
    `provenance` contains the signatures.

    `predict` writes source, reference, the `n_best` hypotheses and their scores.

    Source: Vaswani et al., 2017; the translation recipes of fairseq, which MGK (ICML 2022) and FiSH
    (NeurIPS 2022) follow.

    Args:
        label_smoothing: ε, total target probability of the other words.
        bleu: format of `val/bleu` and `test/bleu`.
        beam_size: number of hypotheses in the search, for `test` and `predict`; 1 is greedy.
        val_beam_size: number of hypotheses in the search during validation; 0 skips BLEU.
        temperature: if above 0, `predict` samples tokens instead of searching.

    Raises:
        ValueError: a value is out of range.
    """

    logged: ClassVar[tuple[str, ...]] = (
        *("loss", "nll", "ppl", "tokens", "loss_bits", "nll_bits", "bleu"),
        *(f"bleu_{form}" for form in FORMS),
    )
    num_sums = 3  # smoothed losses, plain losses, tokens

    model: EncoderDecoder

    @takes(
        *(EncoderDecoder, Beam, Sampling, Task),
        without=("attention_bias", "size", "min_length"),
        lr=5e-4,
        betas=(0.9, 0.98),
        eps=1e-8,
        schedule="inverse_sqrt",
        warmup_steps=4000,
    )
    def __init__(
        self,
        *,
        max_logits: Count = MAX_LOGITS,
        label_smoothing: Rate = 0.1,
        bleu: BLEUForm = "detokenised",
        beam_size: Count = 5,
        val_beam_size: WholeNumber = 5,
        **options: Any,
    ) -> None:
        super().__init__(**arguments_of(Task, options))
        self.keep_arguments()
        self.label_smoothing, self.max_logits = label_smoothing, max_logits
        self.bleu_form: BLEUForm = bleu
        self.beam = Beam(size=beam_size, **arguments_of(Beam, options))
        self.val_beam_size = val_beam_size
        self.sampling = Sampling(**arguments_of(Sampling, options))
        self.model = EncoderDecoder(**arguments_of(EncoderDecoder, options))
        self.provenance: dict[str, Any] = {}
        self._plain: list[Tensor] = []  # unsmoothed losses since the last step
        self._lines: list[_Line] = []
        self._texts: dict[str, _Written] = {}

    def setup(self, stage: str) -> None:
        """Check that tied embeddings have one vocabulary, and that BLEU is available.

        Raises:
            ValueError: a check fails; see also `Task.setup`.
        """
        super().setup(stage)
        coder = getattr(self.datamodule, "coder", None)
        if self.model.source_tokens is None and coder is not None and coder.source != coder.target:
            raise ValueError(
                "share=all requires a joint vocabulary, but the data have two: set "
                "--data.init_args.joint_dictionary true, or --model.init_args.share decoder"
            )
        if stage in ("test", "validate", "fit") and (stage == "test" or self.val_beam_size):
            check_installed()

    # ---- losses ------------------------------------------------------------------------------

    def token_losses(self, batch: TranslationBatch) -> Tensor:
        """Return the loss of every target token with and without smoothing, (num_tokens, 2)."""
        hidden = self.model(
            batch["source"],
            batch["inputs"],
            source_mask=batch["source_mask"],
            key_mask=batch["key_mask"],
            rng=self.random_key(batch),
        )
        return self.losses_of(hidden, batch["target"])

    def losses_of(self, hidden: Tensor, target: Tensor) -> Tensor:
        """Return the losses for inputs of the output layer, (B, T, C), and targets (B, T)."""
        scored = target != IGNORE

        def part(rows: Tensor, words: Tensor) -> Tensor:
            return smoothed_losses(self.model.logits(rows), words, self.label_smoothing)

        rows = max(1, self.max_logits // self.model.vocab_size)
        return in_parts(part, hidden[scored], target[scored], rows)

    def batch_loss(self, batch: Any) -> Tensor:
        """Return this micro-batch's contribution to the mean loss over the global batch's tokens.

        Shape (); see `part_of_mean`.
        """
        sums = self.token_losses(batch).sum(0)
        smoothed, plain = self.part_of_mean(sums, batch["global_tokens"])
        if self.training:
            self._plain.append(plain.detach())
        return smoothed

    def on_train_start(self) -> None:
        """Call the base method; also discard the losses of an interrupted step."""
        super().on_train_start()
        self._plain = []

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Call the base method; also log the loss without smoothing."""
        super().on_before_optimizer_step(optimizer)
        plain = sum_over_ranks(torch.stack(self._plain).mean()[None])
        self._plain = []
        self.log("train/nll", plain[0] / num_ranks())

    # ---- evaluation --------------------------------------------------------------------------

    def evaluate(self, batch: Any, split: Split) -> None:
        """Accumulate losses and translations of the real rows of a batch."""
        rows: Any = real_rows(batch)
        if not len(rows["sample_ids"]):
            return
        losses = self.token_losses(rows).double()
        self.add_to_sums(*losses.sum(0), losses.new_tensor(len(losses)))
        size = self.beam.size if self.is_final(split) else self.val_beam_size
        if size:
            found = self._search(rows, replace(self.beam, size=size, n_best=1))
            self._lines += self._lines_of(rows, [best[0] for best in found], split)

    def log_scores(self, split: Split) -> None:
        """Log losses, perplexity and BLEU."""
        smoothed, plain, count = self.summed().tolist()
        per_token = 1.0 / count if count else float("nan")
        loss, nll = smoothed * per_token, plain * per_token
        scores = {"loss": loss, "nll": nll, "ppl": math.exp(min(nll, 700.0)), "tokens": count}
        scores |= {f"{name}_bits": scores[name] / math.log(2) for name in ("loss", "nll")}
        exact = {name: torch.tensor(value, dtype=torch.float64) for name, value in scores.items()}
        self.log_dict({f"{split}/{name}": value for name, value in exact.items()})
        self._log_bleu(split)
        self.reset_scores()

    def reset_scores(self) -> None:
        """Discard the sums and the translated lines."""
        super().reset_scores()
        self._lines = []

    def _log_bleu(self, split: Split) -> None:
        everyone = [line for lines in gather_objects(self._lines) for line in lines]
        if not everyone:
            return
        lines = sorted(everyone)
        is_final = self.is_final(split)
        for form in FORMS if is_final else (self.bleu_form,):
            found = score_lines(lines, form)
            if form == self.bleu_form:
                self.log(f"{split}/bleu", found.score, prog_bar=split == "val")
            if is_final:
                self.log(f"{split}/bleu_{form}", found.score)
                self.print_line(str(found))
            stored = self.provenance.setdefault("bleu", {"form": self.bleu_form})
            stored[form] = {name: value for name, value in asdict(found).items() if name != "form"}

    # ---- translation -------------------------------------------------------------------------

    def translate(
        self, source: Tensor, source_mask: Tensor, sample_ids: Tensor
    ) -> list[list[Hypothesis]]:
        """Return the hypotheses of every row, best first.

        Args:
            source: (B, S) token ids, EOS at the end.
            source_mask: real tokens, (B, S).
            sample_ids: sample ids for the draws of sampling and of noise, (B,).
        """
        rows: Any = {"source": source, "source_mask": source_mask, "sample_ids": sample_ids}
        if not len(source):
            return []
        if self.sampling.temperature:
            key = self.random_key(rows)
            drawn = sample(self.model, source, source_mask, self.sampling, self.beam, rng=key)
            return [[hypothesis] for hypothesis in drawn]
        return self._search(rows, self.beam)

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """Translate the real rows of a batch.

        Returns:
            `sample_id` (R,), and for each of the R rows `source`, `reference` and `hypothesis` as
            text, `score` of the hypothesis, and with `n_best` above 1 `hypotheses` and `scores`.
        """
        rows, data = real_rows(batch), self._coder()
        found = self.translate(rows["source"], rows["source_mask"], rows["sample_ids"])
        written = self._written_lines(data.predict_split)
        numbers = rows["sample_ids"].tolist()
        result: dict[str, Any] = {
            "sample_id": rows["sample_ids"],
            "source": [written.source[number] for number in numbers],
            "reference": [written.reference[number] for number in numbers],
            "hypothesis": [data.detokenise(row[0].tokens) for row in found],
            "score": [row[0].score for row in found],
        }
        if self.beam.n_best > 1:
            result["hypotheses"] = [[data.detokenise(h.tokens) for h in row] for row in found]
            result["scores"] = [[h.score for h in row] for row in found]
        return result

    def _search(self, rows: Any, beam: Beam) -> list[list[Hypothesis]]:
        key = self.random_key(rows)
        return beam_search(self.model, rows["source"], rows["source_mask"], beam, rng=key)

    def _lines_of(self, rows: Any, best: Sequence[Hypothesis], split: Split) -> list[_Line]:
        """Return hypotheses and references in the formats that BLEU compares."""
        data, written = self._coder(), self._written_lines(split)
        return [
            _Line(
                number,
                data.detokenise(hypothesis.tokens),
                written.reference[number],
                data.tokenised(hypothesis.tokens),
                written.tokenised[number],
            )
            for number, hypothesis in zip(rows["sample_ids"].tolist(), best, strict=True)
        ]

    def _written_lines(self, split: str) -> _Written:
        """Return the lines of a split; cached."""
        if split not in self._texts:
            data = self._coder()
            self._texts[split] = _Written(
                data.source_lines(split), data.references(split), data.tokenised_references(split)
            )
        return self._texts[split]

    def _coder(self) -> Any:
        """Return the DataModule, which decodes ids.

        Raises:
            ValueError: the DataModule cannot decode ids.
        """
        data = self.datamodule
        if not hasattr(data, "detokenise"):
            kind = type(data).__name__
            raise ValueError(
                "BLEU and predictions require data that decode ids (Translation), received "
                f"{kind}; set val_beam_size to 0 to train without BLEU"
            )
        return data


def score_lines(lines: Sequence[_Line], form: BLEUForm) -> BLEUScore:
    """Return the BLEU of translated lines in a format."""
    if form == "detokenised":
        return corpus_bleu([x.text for x in lines], [x.reference for x in lines], form)
    return corpus_bleu([x.tokens for x in lines], [x.reference_tokens for x in lines], form)
