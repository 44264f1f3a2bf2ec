"""Translation: the smoothed loss, its mean over a global batch, BLEU, predictions, vocabularies."""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from datamodules import ToyTranslation
from lit_probattn.attention import MGKAttention
from lit_probattn.models.encoder_decoder import EOS, PAD
from lit_probattn.models.language_model import IGNORE
from lit_probattn.tasks import Translation
from lit_probattn.tasks.translation import smoothed_losses
from tests.tasks.tiny import softmax, trainer

SOURCE, TARGET = 17, 13  # words of each side


def make_task(attention=softmax, **options: Any) -> Translation:
    torch.manual_seed(3)
    sizes = {"source_vocab_size": SOURCE, "vocab_size": TARGET, "max_seq_len": 19}
    small = {"embed_dim": 12, "head_dim": 6, "mlp_dim": 10, "dropout": 0.0}
    layers = {"num_encoder_layers": 1, "num_decoder_layers": 1}
    return Translation(attention, **{**sizes, **small, **layers, **options}).eval()


def batch(lengths=((5, 7), (3, 2), (6, 4)), seed=0) -> dict[str, Any]:
    """Pairs of these numbers of source and target tokens, EOS among them."""
    generator = torch.Generator().manual_seed(seed)

    def padded(rows, fill):
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill)

    def words(count, size):
        return torch.randint(4, size, (count,), generator=generator)

    end = torch.tensor([EOS])
    source = [torch.cat([words(s - 1, SOURCE), end]) for s, _ in lengths]
    target = [torch.cat([words(t - 1, TARGET), end]) for _, t in lengths]
    inputs = [torch.cat([end, row[:-1]]) for row in target]
    return {
        "source": padded(source, PAD),
        "source_mask": padded(source, PAD) != PAD,
        "inputs": padded(inputs, PAD),
        "key_mask": padded(inputs, PAD) != PAD,
        "target": padded(target, IGNORE),
        "sample_ids": torch.arange(len(lengths)),
        "global_tokens": torch.tensor(sum(t for _, t in lengths)),
    }


# ---- the loss ----------------------------------------------------------------------------------


def test_defaults_are_those_of_the_transformer_in_fairseq():
    """fairseq's recipe for IWSLT'14: Adam of Vaswani et al., 4000 steps up to 5e-4, ε 0.1."""
    task = make_task()
    expected = {"lr": 5e-4, "betas": (0.9, 0.98), "eps": 1e-8, "warmup_steps": 4000}
    expected |= {"schedule": "inverse_sqrt", "label_smoothing": 0.1, "beam_size": 5}
    assert {name: task.hparams[name] for name in expected} == expected


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.37])
def test_the_smoothed_loss_is_the_sum_written_out(smoothing):
    """Cross entropy with a target that gives ε / (V − 1) to every wrong word."""
    logits = torch.randn(5, TARGET, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    target = torch.tensor([3, 0, 12, 7, 7])
    found = smoothed_losses(logits, target, smoothing)
    for row, word in enumerate(target.tolist()):
        total = sum(math.exp(float(x)) for x in logits[row])
        loss = 0.0
        for other in range(TARGET):
            weight = 1 - smoothing if other == word else smoothing / (TARGET - 1)
            loss -= weight * (float(logits[row, other]) - math.log(total))
        assert float(found[row, 0]) == pytest.approx(loss, rel=1e-13)
        plain = math.log(total) - float(logits[row, word])
        assert float(found[row, 1]) == pytest.approx(plain, rel=1e-13)


def test_without_smoothing_both_losses_are_one():
    found = smoothed_losses(torch.randn(4, TARGET), torch.tensor([1, 5, 2, 8]), 0.0)
    torch.testing.assert_close(found[:, 0], found[:, 1])


@pytest.mark.parametrize("max_logits", [TARGET, 4 * TARGET])
def test_losses_in_parts_are_those_of_the_whole(max_logits):
    """Values and gradients; padding is left out."""
    tasks = [make_task().double(), make_task(max_logits=max_logits).double()]
    results = []
    for task in tasks:
        losses = task.token_losses(batch())
        losses[:, 0].sum().backward()
        results.append((losses.detach(), task.model.tokens.weight.grad))
    assert results[0][0].shape == (13, 2)
    torch.testing.assert_close(results[1], results[0], rtol=1e-13, atol=1e-15)


def test_padding_changes_nothing():
    task, data = make_task().double(), batch()
    more = {
        "source": torch.nn.functional.pad(data["source"], (0, 3), value=PAD),
        "source_mask": torch.nn.functional.pad(data["source_mask"], (0, 3)),
        "inputs": torch.nn.functional.pad(data["inputs"], (0, 2), value=PAD),
        "key_mask": torch.nn.functional.pad(data["key_mask"], (0, 2)),
        "target": torch.nn.functional.pad(data["target"], (0, 2), value=IGNORE),
    }
    torch.testing.assert_close(
        task.batch_loss({**data, **more}), task.batch_loss(data), rtol=1e-13, atol=0.0
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_parts_of_a_global_batch_sum_to_its_mean(dtype):
    """Micro-batches of unlike numbers of tokens; Lightning takes the mean of their losses."""
    task, whole = make_task().to(dtype), batch()
    expected = task.batch_loss(whole)
    (gradient,) = torch.autograd.grad(expected, [task.model.tokens.weight])
    task._trainer = SimpleNamespace(accumulate_grad_batches=2)
    parts, total = [], torch.zeros_like(gradient)
    for rows in (slice(0, 1), slice(1, 3)):
        part = {k: v[rows] if v.dim() else v for k, v in whole.items()}
        loss = task.batch_loss(part)
        parts.append(loss.detach())
        total += torch.autograd.grad(loss / 2, [task.model.tokens.weight])[0]
    tolerance = {"rtol": 1e-12, "atol": 1e-14} if dtype == torch.float64 else {}
    torch.testing.assert_close(sum(parts) / 2, expected.detach(), **tolerance)
    torch.testing.assert_close(total, gradient, **tolerance)


def test_the_logged_loss_without_smoothing_is_a_mean_over_ranks_and_micro_batches(monkeypatch):
    """As if two ranks had the same data; without smoothing it is the loss of training."""
    for module in ("lit_probattn.tasks.base", "lit_probattn.tasks.translation"):
        monkeypatch.setattr(f"{module}.num_ranks", lambda: 2)
        monkeypatch.setattr(f"{module}.sum_over_ranks", lambda x: 2 * x)
    data = ToyTranslation(num_train=16, num_val=4, num_test=4, num_words=6, max_tokens=64)
    data.prepare_data()
    data.setup("fit")
    sizes = {name: getattr(data, name) for name in ("source_vocab_size", "vocab_size")}
    task = make_task(**sizes, max_seq_len=64, label_smoothing=0.0).train()
    run = trainer(2, accumulate_grad_batches=2)
    run.fit(task, data)
    loss, plain = (float(run.callback_metrics[f"train/{name}"]) for name in ("loss", "nll"))
    assert plain == pytest.approx(loss, rel=1e-6)


def test_a_micro_batch_of_filling_rows_has_a_loss_of_zero():
    task, data = make_task(), batch()
    data |= {"target": torch.full_like(data["target"], IGNORE), "sample_ids": -torch.ones(3).long()}
    loss = task.batch_loss(data)
    loss.backward()
    assert float(loss.detach()) == 0.0


def test_each_attention_may_be_another():
    mgk = partial(MGKAttention, num_heads=2, num_components=2)
    task = make_task(cross_attention=mgk)
    kinds = [type(m).__name__ for m in task.modules() if type(m).__name__.endswith("Attention")]
    assert kinds == ["SoftmaxAttention", "SoftmaxAttention", "MGKAttention"]
    assert "cross_attention" not in task.hparams


# ---- evaluation --------------------------------------------------------------------------------


class Coder:
    """Data that write ids as numbers."""

    predict_split = "test"

    def __init__(self, rows):
        self.rows = rows

    def detokenise(self, ids):
        return " ".join(f"w{number}" for number in ids)

    tokenised = detokenise

    def references(self, split):
        return [self.detokenise([w for w in row if w not in (IGNORE, EOS)]) for row in self.rows]

    source_lines = tokenised_references = references


def evaluated(task, batches, split):
    logged = {}
    task.log = lambda name, value, **_: logged.__setitem__(name, float(value))
    task.log_dict = lambda values, **_: logged.update({k: float(v) for k, v in values.items()})
    with torch.no_grad():
        for data in batches:
            task.evaluate(data, split)
        task.log_scores(split)
    return logged


def with_coder(task, data):
    coder = Coder(data["target"].tolist())
    counts = {"accumulate_grad_batches": 1, "global_step": 0, "state": SimpleNamespace(fn="test")}
    task._trainer = SimpleNamespace(datamodule=coder, is_global_zero=True, **counts)
    return task


def test_scores_of_batches_are_those_of_the_whole_and_filling_rows_count_for_nothing():
    data = batch()
    task = with_coder(make_task().double(), data)
    parts = [{k: v[i : i + 1] if v.dim() else v for k, v in data.items()} for i in range(3)]
    filled = {k: torch.cat([v, v[:2]]) if v.dim() else v for k, v in data.items()}
    filled["sample_ids"][3:] = -1
    whole, by_parts = evaluated(task, [filled], "test"), evaluated(task, parts, "test")
    assert whole == pytest.approx(by_parts, rel=1e-12)
    losses = task.token_losses(data).detach()
    assert whole["test/loss"] == pytest.approx(float(losses[:, 0].mean()), rel=1e-12)
    assert whole["test/nll"] == pytest.approx(float(losses[:, 1].mean()), rel=1e-12)
    assert whole["test/nll_bits"] == pytest.approx(whole["test/nll"] / math.log(2))
    assert whole["test/loss_bits"] == pytest.approx(whole["test/loss"] / math.log(2))
    assert whole["test/ppl"] == pytest.approx(2 ** whole["test/nll_bits"])
    assert whole["test/tokens"] == 13.0


def test_a_test_scores_every_form_and_says_which(capsys):
    data = batch()
    task = with_coder(make_task(bleu="tokenised"), data)
    found = evaluated(task, [data], "test")
    assert found["test/bleu"] == found["test/bleu_tokenised"]
    forms = {"detokenised", "tokenised", "compound_split"}
    assert {f"test/bleu_{form}" for form in forms} <= set(found)
    assert set(task.provenance["bleu"]) == {"form", *forms}
    assert task.provenance["bleu"]["form"] == "tokenised"
    assert "case:lc" in task.provenance["bleu"]["tokenised"]["signature"]
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_validation_has_one_form_or_none():
    data = batch()
    found = evaluated(with_coder(make_task(), data), [data], "val")
    assert "val/bleu" in found
    assert "val/bleu_tokenised" not in found
    found = evaluated(with_coder(make_task(val_beam_size=0), data), [data], "val")
    assert "val/bleu" not in found
    assert "val/nll" in found


def test_predictions_name_source_reference_hypotheses_and_scores():
    data = batch()
    task = with_coder(make_task(n_best=2, beam_size=3), data)
    made = task.predict_step(data, 0)
    assert made["reference"] == task.trainer.datamodule.references("test")
    assert [len(row) for row in made["hypotheses"]] == [2, 2, 2]
    for row, scores, best, score in zip(
        made["hypotheses"], made["scores"], made["hypothesis"], made["score"], strict=True
    ):
        assert (row[0], scores[0]) == (best, score)
        assert scores[0] >= scores[1]


def test_a_model_that_knows_its_lines_scores_100():
    """Trained on three pairs until it repeats them."""
    data = batch()
    task = with_coder(make_task(embed_dim=24), data).train()
    optimizer = torch.optim.Adam(task.parameters(), lr=0.02)
    for _ in range(60):
        optimizer.zero_grad()
        task.batch_loss(data).backward()
        optimizer.step()
    found = evaluated(task.eval(), [data], "test")
    assert task.trainer.datamodule.references("test") == task.predict_step(data, 0)["hypothesis"]
    assert found["test/bleu_detokenised"] == pytest.approx(100.0)


def test_data_that_make_no_text_are_refused():
    data = batch()
    task = with_coder(make_task(), data)
    task.trainer.datamodule = object()
    with pytest.raises(ValueError, match="require data that decode ids"):
        evaluated(task, [data], "val")
