"""The masked language model: what is hidden, the losses, learning, repetition, positions."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from lit_probattn.attention import LinearAttention, SoftmaxAttention
from lit_probattn.models.language_model import IGNORE
from lit_probattn.models.masked_language_model import (
    MaskedLanguageModel,
    mask_tokens,
)
from lit_probattn.models.text_encoder import PeriodicPositions
from lit_probattn.randomness import RandomKey
from lit_probattn.tasks import MaskedLanguageModeling

VOCAB = 103  # 100 words, begin, end, mask


softmax = partial(SoftmaxAttention, num_heads=3)


def tokens(rows=400, length=101):
    inputs = torch.randint(100, (rows, length), generator=torch.Generator().manual_seed(1))
    inputs[:, 0], inputs[:, -1] = 100, 101
    target = inputs.clone()
    target[:, [0, -1]] = IGNORE
    return inputs, target


# ---- what is hidden ----------------------------------------------------------------------------


def test_shares_of_hidden_words():
    """15 % chosen; of these 80 % masked, 10 % random, 10 % kept; five standard deviations."""
    inputs, target = tokens()
    hidden, chosen = mask_tokens(inputs, target, RandomKey(3, 7), vocab_size=VOCAB)
    count, total = int((chosen != IGNORE).sum()), int((target != IGNORE).sum())
    assert abs(count / total - 0.15) < 5 * (0.15 * 0.85 / total) ** 0.5
    picked = chosen != IGNORE
    masked = (hidden == VOCAB - 1)[picked].double().mean()
    same = (hidden == inputs)[picked].double().mean()
    # A random word is by chance the word itself once in a hundred times.
    spread = 5 * (0.25 / count) ** 0.5
    assert abs(float(masked) - 0.8) < spread
    assert abs(float(same) - (0.1 + 0.1 / 100)) < spread
    random = hidden[picked & (hidden != inputs) & (hidden != VOCAB - 1)]
    assert int(random.max()) < 100
    assert abs(float(random.double().mean()) - 49.5) < 5 * 28.9 / len(random) ** 0.5


def test_what_was_not_chosen_stays_and_special_tokens_are_never_hidden():
    inputs, target = tokens()
    hidden, chosen = mask_tokens(inputs, target, RandomKey(3, 7), vocab_size=VOCAB)
    kept = chosen == IGNORE
    assert torch.equal(hidden[kept], inputs[kept])
    assert torch.equal(chosen[~kept], inputs[~kept])
    assert (chosen[:, [0, -1]] == IGNORE).all()


def test_masks_are_functions_of_seed_step_and_sample_only():
    inputs, target = tokens(6)
    ids = torch.tensor([4, 9, 2, 30, 7, 1])

    def draw(rows, seed=3, step=7):
        key = RandomKey(seed, step, ids[rows])
        return mask_tokens(inputs[rows], target[rows], key, vocab_size=VOCAB)[0]

    whole = draw(slice(None))
    assert torch.equal(whole, draw(slice(None)))
    assert torch.equal(whole[[4, 1]], draw(torch.tensor([4, 1])))
    assert torch.equal(
        whole[:, :50],
        mask_tokens(inputs[:, :50], target[:, :50], RandomKey(3, 7, ids), vocab_size=VOCAB)[0],
    )
    assert not torch.equal(whole, draw(slice(None), step=8))
    assert not torch.equal(whole, draw(slice(None), seed=4))


def test_with_a_mask_token_random_words_are_any_ids():
    """As in BERT; the choice of words and the numbers drawn are the same."""
    inputs, target = tokens()
    plain = mask_tokens(inputs, target, RandomKey(3, 7), vocab_size=VOCAB)
    hidden, chosen = mask_tokens(inputs, target, RandomKey(3, 7), vocab_size=VOCAB, mask_token=5)
    assert torch.equal(chosen, plain[1])
    masked = plain[0] == VOCAB - 1
    assert (hidden[masked] == 5).all()
    random = (plain[0] != inputs) & ~masked
    assert int(plain[0][random].max()) == 99
    assert int(hidden[random].max()) == VOCAB - 1
    kept = chosen == IGNORE
    assert torch.equal(hidden[kept], inputs[kept])


# ---- the model ---------------------------------------------------------------------------------


def model(**options) -> MaskedLanguageModel:
    torch.manual_seed(0)
    sizes = {"embed_dim": 14, "head_dim": 5, "num_layers": 2, "mlp_dim": 17, "max_seq_len": 11}
    made = MaskedLanguageModel(softmax, **{"vocab_size": VOCAB, **sizes, **options})
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return made.eval()


def test_every_position_sees_every_other_and_padding_changes_nothing():
    m = model()
    inputs = tokens(2, 11)[0]
    other = inputs.clone()
    other[:, -2] = (other[:, -2] + 1) % 100
    assert ((m(inputs) - m(other)).abs().amax(-1) > 0).all()
    mask = torch.arange(11) < torch.tensor([[11], [6]])
    torch.testing.assert_close(m(inputs, key_mask=mask)[1:, :6], m(inputs[1:, :6]))


def test_losses_and_predictions_by_definition():
    m = model(max_logits=150)  # two rows of logits at a time
    inputs, target = tokens(2, 11)
    hidden, chosen = mask_tokens(inputs, target, RandomKey(1), vocab_size=VOCAB, probability=0.6)
    encoded = m(hidden)
    logits = (encoded @ m.tokens.weight.T + m.output.bias).double()
    losses, predictions = m.token_losses(encoded, chosen), m.predictions(encoded, chosen)
    expected, best = [], []
    for b in range(2):
        for n in range(11):
            if chosen[b, n] != IGNORE:
                row = logits[b, n]
                expected.append(row.exp().sum().log() - row[chosen[b, n]])
                best.append(int(row.argmax()))
    assert len(expected) > 5
    torch.testing.assert_close(losses.double(), torch.stack(expected), rtol=0, atol=1e-5)
    assert predictions.tolist() == best


def test_size_of_roberta_base():
    """The published checkpoint has 124,697,433, of which 768 are its single token type."""
    options = {"vocab_size": 50265, "max_seq_len": 514}
    with torch.device("meta"):
        m = MaskedLanguageModel(partial(softmax, num_heads=12), **options)
    block = 4 * (768 * 768 + 768) + 2 * 768 * 3072 + 3072 + 768 + 4 * 768
    head = 768 * 768 + 768 + 2 * 768 + 50265
    expected = 50265 * 768 + 514 * 768 + 2 * 768 + 12 * block + head
    assert sum(p.numel() for p in m.parameters()) == expected == 124697433 - 768


def test_positions_of_long_inputs_add_two_tables():
    table = PeriodicPositions(max_seq_len=11, embed_dim=4, position_period=3)
    assert (table.offsets.num_embeddings, table.blocks.num_embeddings) == (3, 4)
    found = table(torch.arange(11))
    torch.testing.assert_close(found[7], table.offsets.weight[1] + table.blocks.weight[2])
    assert PeriodicPositions(max_seq_len=11, embed_dim=4).blocks is None


def test_refusals():
    with pytest.raises(ValueError, match="max_seq_len is 11"):
        model()(tokens(1, 12)[0])
    with pytest.raises(ValueError, match="vocab_size must exceed the 3 special tokens"):
        model(vocab_size=3)
    with pytest.raises(ValueError, match=r"mask_probability must be in \(0, 1\), received 1.0"):
        MaskedLanguageModeling(softmax, vocab_size=9, max_seq_len=7, mask_probability=1.0)
    with pytest.raises(ValueError, match="mask_token must be an id, from 0 to 8, received 9"):
        MaskedLanguageModeling(softmax, vocab_size=9, max_seq_len=7, mask_token=9)


# ---- the task ----------------------------------------------------------------------------------


def make_task(attention=softmax, **options) -> MaskedLanguageModeling:
    torch.manual_seed(0)
    sizes = {"embed_dim": 12, "head_dim": 5, "num_layers": 1, "mlp_dim": 9}
    return MaskedLanguageModeling(
        attention, vocab_size=VOCAB, max_seq_len=11, **{**sizes, **options}
    )


def batch(rows=8):
    inputs, target = tokens(rows, 11)
    return {
        "inputs": inputs,
        "target": target,
        "key_mask": torch.ones(rows, 11, dtype=torch.bool),
        "sample_ids": torch.arange(rows),
        "form": "masked",
    }


@pytest.mark.parametrize(
    "attention",
    [softmax, partial(LinearAttention, num_heads=2)],
    ids=["softmax", "elu"],
)
def test_steps_lower_the_loss(attention):
    task, data = make_task(attention).eval(), batch()
    optimiser = torch.optim.Adam(task.parameters(), lr=1e-2)
    losses = []
    for _ in range(12):
        optimiser.zero_grad()
        loss = task.batch_loss(data)
        loss.backward()
        assert all(p.grad is not None for p in task.parameters())
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.5


def test_weight_decay_leaves_out_biases_and_norms():
    """A step without gradients changes the decayed parameters only, as BERT's optimiser does."""
    task = make_task(next_sentence=True, num_token_types=2, weight_decay=0.25, lr=0.5)
    optimiser = task.configure_optimizers()
    before = {name: p.detach().clone() for name, p in task.model.named_parameters()}
    for parameter in task.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimiser.step()
    for name, after in task.model.named_parameters():
        share = 1.0 if after.ndim == 1 else 1 - 0.5 * 0.25
        torch.testing.assert_close(after.detach(), share * before[name], msg=name)
    assert {before[name].ndim for name in before} == {1, 2}


def test_mask_token_types_and_epsilon_reach_the_model():
    task = make_task(mask_token=5, num_token_types=2, norm_eps=3e-3).eval()
    assert all(m.eps == 3e-3 for m in task.modules() if isinstance(m, torch.nn.LayerNorm))
    data = batch()
    seen = {}
    task.model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.update(kwargs, inputs=args[0]), with_kwargs=True
    )
    plain = task.encode(data)[0]
    changed = seen["inputs"] != data["inputs"]
    assert (seen["inputs"] == 5)[changed].double().mean() > 0.6
    assert not (seen["inputs"] == VOCAB - 1).any()
    typed = task.encode({**data, "token_types": torch.ones_like(data["inputs"])})[0]
    assert not torch.allclose(plain, typed)
    assert task.hparams["mask_token"] == 5


def test_error_counts_wrong_words_and_fill_up_rows_count_for_nothing():
    task, data = make_task().eval(), batch()
    losses, wrong = task.token_results(data)
    assert len(losses) == len(wrong) > 3
    filled = {k: torch.cat([v, v[:2]]) if torch.is_tensor(v) else v for k, v in data.items()}
    filled["sample_ids"][-2:] = -1
    with torch.no_grad():
        task.validation_step(filled, 0)
    expected = [float(losses.detach().double().sum()), float(wrong.sum()), float(len(losses))]
    assert task._sums[:3].tolist() == pytest.approx(expected)


def test_what_stands_in_padding_changes_no_loss():
    task, data = make_task().double().eval(), batch()
    data["key_mask"][1, 8:] = False
    data["target"][1, 8:] = IGNORE
    other = {**data, "inputs": torch.where(data["key_mask"], data["inputs"], 3)}
    found, expected = (task.token_losses(one).detach() for one in (other, data))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    unmasked = {**data, "key_mask": torch.ones_like(data["key_mask"])}
    assert not torch.allclose(task.token_losses(unmasked), expected)


def test_packed_sequences_have_the_masks_and_losses_that_they_have_padded():
    task, data = make_task(mask_probability=0.4).double().eval(), batch(3)
    real = torch.arange(11) < torch.tensor([4, 11, 7])[:, None]
    data |= {"key_mask": real, "sample_ids": torch.tensor([31, 4, 17])}
    data["target"] = data["target"].masked_fill(~real, IGNORE)
    packed = {name: data[name][real][None] for name in ("inputs", "target")}
    packed |= {"cu_seqlens": torch.tensor([0, 4, 15, 22]), "sample_ids": data["sample_ids"]}
    expected, found = task.token_results(data), task.token_results(packed)
    assert len(expected[0]) > 5
    torch.testing.assert_close(found[0], expected[0], rtol=1e-10, atol=0)
    assert torch.equal(found[1], expected[1])


def pairs(rows=8):
    data = batch(rows)
    data["elsewhere"] = torch.arange(rows) % 2
    data["token_types"] = (torch.arange(11) >= 5).long().expand(rows, 11)
    data["key_mask"][1, 8:] = False
    data["target"][1, 8:] = IGNORE
    return data


def test_the_loss_of_pairs_is_weighted_by_the_words_that_are_hidden_on_average():
    """Σ −log p(word) / W + Σ w_s −log p(s) / W, written out."""
    task, data = make_task(next_sentence=True, num_token_types=2).double().eval(), pairs()
    hidden, target, _ = task.encode_pairs(data)
    words = task.model.token_losses(hidden, target).double()
    seen = []
    task.model.encoder.register_forward_hook(lambda _, args, out: seen.append(out))
    task.encode(data)
    encoded = seen[0]
    total = 0.0
    for row in range(8):
        first = torch.tanh(task.model.pooler(encoded[row, 0]))
        logits = task.model.next_sentence(first).tolist()
        label = int(data["elsewhere"][row])
        loss = math.log(math.exp(logits[0]) + math.exp(logits[1])) - logits[label]
        total += 0.15 * (7 if row == 1 else 9) * loss
    expected = (words.sum().item() + total) / len(words)
    assert task.batch_loss(data).item() == pytest.approx(expected, rel=1e-6)
    task.batch_loss(data).backward()
    assert all(p.grad is not None for p in task.parameters())


def test_errors_of_pairs_are_counted_and_pairs_are_needed():
    task, data = make_task(next_sentence=True, num_token_types=2).eval(), pairs()
    data["sample_ids"][-1] = -1
    with torch.no_grad():
        task.validation_step(data, 0)
        *_, logits = task.encode_pairs(data)
        wrong = (logits.argmax(-1) != data["elsewhere"])[:-1]
    assert task._sums[4:].tolist() == [float(wrong.sum()), 7.0]
    del data["elsewhere"]
    with pytest.raises(ValueError, match="next_sentence requires sentence pairs"):
        task.batch_loss(data)
    del data["token_types"]
    with pytest.raises(ValueError, match="with next_sentence=True"):
        make_task().eval().encode_pairs(data)


def test_losses_of_pairs_have_at_least_float32():
    task, data = make_task(next_sentence=True, num_token_types=2).eval(), pairs()
    logits = task.encode_pairs(data)[2].double()
    for dtype, wide in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        losses, _ = task.pair_losses(logits.to(dtype), data)
        picked = logits.to(dtype).to(wide).log_softmax(-1)[range(8), data["elsewhere"]]
        assert losses.dtype == wide
        assert torch.equal(losses, -picked)


def test_every_evaluation_counts_from_zero(monkeypatch):
    task, data, logged = make_task(next_sentence=True, num_token_types=2).eval(), pairs(), []
    monkeypatch.setattr(task, "log", lambda name, value, **_: logged.append((name, value)))
    for _ in range(2):
        with torch.no_grad():
            task.validation_step(data, 0)
        task.log_scores("val")
    half = len(logged) // 2
    assert logged[:half] == logged[half:]
    assert dict(logged)["val/mlm_tokens"] == len(task.token_results(data)[0])


def test_a_batch_without_hidden_words_has_a_loss():
    task, data = make_task().eval(), batch()
    data["target"] = torch.full_like(data["target"], IGNORE)
    loss = task.batch_loss(data)
    loss.backward()
    assert loss.item() == 0.0
