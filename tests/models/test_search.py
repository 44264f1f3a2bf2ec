"""Beam search against every translation there is, and against the rule written out; sampling."""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest
import torch

from lit_probattn.models.decoding import Sampling
from lit_probattn.models.encoder_decoder import EOS, PAD, EncoderDecoder
from lit_probattn.models.search import Beam, beam_search, sample
from lit_probattn.randomness import RandomKey
from tests.models.test_encoder_decoder import VARIANTS, factory, moved, pairs, softmax, tiny
from tests.support.slow import mostly_slow

NEVER = float("-inf")
SOURCES = 4


def toy(words=5, sharpness=6.0, seed=0):
    """A model of few words whose probabilities are far from equal."""
    torch.manual_seed(seed)
    model = moved(tiny(vocab_size=words, share="none"))
    with torch.no_grad():
        model.output.weight.normal_(std=sharpness / 12**0.5)
    return model


def sentences():
    """Sources of several lengths, padded on the right."""
    torch.manual_seed(1)
    source = torch.randint(4, 17, (SOURCES, 6))
    mask = torch.arange(6) < torch.tensor([[6], [3], [5], [3]])
    return source.masked_fill(~mask, PAD), mask


def log_probs(model, source, tokens):
    """Log-probabilities of the token after each of `tokens`, without cache: a list of rows."""
    return log_probs_of_all(model, source, [tokens])[0]


def log_probs_of_all(model, source, translations):
    """The same of several translations of one length."""
    inputs = torch.tensor([[EOS, *tokens] for tokens in translations])
    with torch.no_grad():
        hidden = model(source.expand(len(inputs), -1), inputs)
        found = model.logits(hidden).log_softmax(-1)
    found[..., PAD] = NEVER
    return found


def every_translation(model, source, longest):
    """All translations of up to `longest` tokens: (tokens, log-probability of each and of EOS)."""
    words = [word for word in range(model.vocab_size) if word not in (EOS, PAD)]
    found = []
    for length in range(longest + 1):
        translations = list(itertools.product(words, repeat=length))
        every = log_probs_of_all(model, source, translations)
        for tokens, rows in zip(translations, every, strict=True):
            chosen = zip(rows, (*tokens, EOS), strict=True)
            found.append((list(tokens), [float(row[word]) for row, word in chosen]))
    return found


@pytest.fixture(scope="module")
def exhaustive():
    """A model and all its translations of up to three tokens of each sentence."""
    model, (source, mask) = toy(), sentences()
    rows = [every_translation(model, source[row, mask[row]], 3) for row in range(SOURCES)]
    return model, rows


@pytest.mark.parametrize(("penalty", "min_length"), [(0.0, 1), (0.6, 0), (2.0, 1)])
def test_wide_beam_finds_all_that_an_exhaustive_search_finds(exhaustive, penalty, min_length):
    """5 words, at most 4 tokens with EOS: 40 translations, in the order of their scores."""
    (model, every), (source, mask) = exhaustive, sentences()
    number = sum(3**n for n in range(min_length, 4))
    rule = {"length_penalty": penalty, "min_length": min_length}
    beam = Beam(40, max_length_a=0.0, max_length_b=3, n_best=40, **rule)
    found = beam_search(model, source, mask, beam)
    for row, translations in enumerate(found):
        scored = [(sum(s) / len(s) ** penalty, t) for t, s in every[row] if len(t) >= min_length]
        expected = sorted(scored, reverse=True)
        assert len(expected) == len(translations) == number
        assert [one.tokens for one in translations] == [tokens for _, tokens in expected]
        for one, (score, _) in zip(translations, expected, strict=True):
            assert one.score == pytest.approx(score, rel=1e-12)
            assert len(one.token_scores) == len(one.tokens) + 1
            assert sum(one.token_scores) / len(one.token_scores) ** penalty == pytest.approx(score)


def written_out(model, source, beam, longest, known=None):
    """The rule of the search for one sentence, by lists and full passes.

    `known` keeps the log-probabilities after each beginning, for other beams.
    """
    known = {} if known is None else known
    alive, done = [([], [])], []
    for step in range(longest + 1):
        candidates = []
        unknown = [tokens for tokens, _ in alive if tuple(tokens) not in known]
        if unknown:
            rows = log_probs_of_all(model, source, unknown)[:, -1].tolist()
            known.update(zip(map(tuple, unknown), rows, strict=True))
        for rank, (tokens, scores) in enumerate(alive):
            row = known[tuple(tokens)]
            for word, value in enumerate(row):
                barred = value == NEVER or (word == EOS and step < beam.min_length)
                if not barred and (word == EOS or step < longest):
                    new = ([*tokens, word], [*scores, value])
                    candidates.append((-sum(new[1]), rank, word, new))
        candidates.sort(key=lambda one: one[:3])
        best = [one[-1] for one in candidates[: 2 * beam.size]]
        for tokens, scores in best[: beam.size]:
            if tokens[-1] == EOS and len(done) < beam.size:
                done.append((sum(scores) / len(scores) ** beam.length_penalty, tokens[:-1]))
        alive = [one for one in best if one[0][-1] != EOS][: beam.size]
        if len(done) == beam.size or not alive:
            break
    return sorted(done, key=lambda one: -one[0])


@pytest.fixture(scope="module")
def beginnings():
    """Log-probabilities after the beginnings of translations, by seed and sentence."""
    return defaultdict(dict)


@pytest.mark.parametrize(("size", "seeds"), mostly_slow([(1, 4), (2, 2), (3, 4), (5, 2)], [(2, 2)]))
def test_beam_search_follows_the_rule(beginnings, size, seeds):
    """Batched, cached and reordered, against one sentence by full passes."""
    source, mask = sentences()
    ended = set()
    for seed in range(seeds):
        model = toy(7, 2.0, seed)
        beam = Beam(size, length_penalty=0.7, max_length_a=1.0, max_length_b=2, n_best=size)
        found = beam_search(model, source, mask, beam)
        for row, translations in enumerate(found):
            own = source[row, mask[row]]
            expected = written_out(model, own, beam, len(own) + 2, beginnings[seed, row])
            assert [one.tokens for one in translations] == [tokens for _, tokens in expected]
            for one, (score, _) in zip(translations, expected, strict=True):
                assert one.score == pytest.approx(score, rel=1e-12)
            ended |= {len(one.tokens) == len(own) + 2 for one in translations}
    assert ended == {True, False}


def test_sentences_that_leave_as_the_beam_opens_take_their_sources_along():
    """Four rows of four sentences become four rows of two."""
    model, (source, mask) = toy(7, 2.0), sentences()
    mask[2] = True
    source[2, 5] = 9
    beam = Beam(2, max_length_a=0.3, max_length_b=0, min_length=0, n_best=2)
    assert beam.limits(mask.sum(1), 29).tolist() == [1, 0, 1, 0]
    for row, translations in enumerate(beam_search(model, source, mask, beam)):
        own = source[row, mask[row]]
        expected = written_out(model, own, beam, int(len(own) * 0.3))
        found = [(one.score, one.tokens) for one in translations]
        assert [tokens for _, tokens in found] == [tokens for _, tokens in expected]
        assert [score for score, _ in found] == pytest.approx([score for score, _ in expected])


def test_greedy_is_a_beam_of_one_and_takes_the_largest():
    source, mask = sentences()
    model, lengths = toy(7, 4.0), {"max_length_a": 1.0, "max_length_b": 2}
    found = sample(model, source, mask, beam=Beam(**lengths))
    one = [best[0] for best in beam_search(model, source, mask, Beam(1, **lengths))]
    assert [x.tokens for x in found] == [x.tokens for x in one]
    assert [x.score for x in found] == pytest.approx([x.score for x in one])
    for row, translation in enumerate(found):
        tokens = [*translation.tokens, EOS]
        rows = log_probs(model, source[row, mask[row]], translation.tokens)
        rows[0, EOS] = NEVER  # min_length
        limit = int(mask[row].sum()) + 2
        for step, word in enumerate(tokens):
            assert word == (EOS if step == limit else int(rows[step].argmax()))


def test_batch_and_padding_change_nothing():
    source, mask = sentences()
    model = toy(7, 4.0)
    together = beam_search(model, source, mask, Beam(3, n_best=3))
    wider = torch.nn.functional.pad(source, (0, 4), value=PAD)
    padded = beam_search(model, wider, torch.nn.functional.pad(mask, (0, 4)), Beam(3, n_best=3))
    for row, translations in enumerate(together):
        [alone] = beam_search(model, source[row : row + 1, mask[row]], None, Beam(3, n_best=3))
        for a, b, c in zip(translations, alone, padded[row], strict=True):
            assert a.tokens == b.tokens == c.tokens
            assert a.score == pytest.approx(b.score, rel=1e-12)
            assert a.score == pytest.approx(c.score, rel=1e-12)


class Counting(EncoderDecoder):
    """Counts the rows that the decoder reads, by sentence."""

    def decode(self, inputs, *args, state=None, rng=None, **options):
        assert inputs.shape[1] == 1
        for name in rng.sample_ids.tolist():
            self.rows[name] = self.rows.get(name, 0) + 1
        return super().decode(inputs, *args, state=state, rng=rng, **options)


@pytest.mark.parametrize("size", [1, 3])
def test_finished_sentences_are_not_computed_again(size):
    """A sentence's rows: one for its first token, then `size` for every step until it is done."""
    source, mask = sentences()
    model = toy(7, 4.0)
    model.__class__, model.rows = Counting, {}
    beam = Beam(size, n_best=size, max_length_a=2.0)
    found = beam_search(model, source, mask, beam, rng=RandomKey(0, 0, torch.tensor([7, 5, 3, 2])))
    steps = []
    for name, translations in zip((7, 5, 3, 2), found, strict=True):
        # The step that finishes the last translation reads the token before its EOS.
        last = max(len(one.tokens) for one in translations)
        assert model.rows[name] == 1 + size * last
        steps.append(last)
    assert len(set(steps)) > 1


def test_as_many_positions_are_reserved_as_the_longest_translation_decodes(monkeypatch):
    model, (source, mask), reserved, decoded = toy(7), sentences(), [], []
    new_state, decode = model.new_state, model.decode

    def recorded(memory, memory_mask, capacity):
        reserved.append(capacity)
        return new_state(memory, memory_mask, capacity)

    def counted(tokens, **options):
        decoded.append(tokens.shape[1])
        return decode(tokens, **options)

    monkeypatch.setattr(model, "new_state", recorded)
    monkeypatch.setattr(model, "decode", counted)
    beam_search(model, source, mask, Beam(2, max_length_a=0.0, max_length_b=3, min_length=3))
    assert reserved == [sum(decoded)] == [4]


def test_limits_follow_from_each_source():
    lengths = torch.tensor([10, 3, 1, 60])
    beam = Beam(max_length_a=1.2, max_length_b=10, min_length=12)
    assert beam.limits(lengths, 64).tolist() == [22, 13, 12, 63]


@pytest.mark.parametrize("name", ["fish", "mgk", "smgk", "linear", "mlk", "lfish", "ast"])
def test_variants_search_as_full_passes_do(name):
    """Greedy through caches and states, with noise at evaluation, against full passes."""
    model = moved(tiny(factory(VARIANTS[name])))
    source, _, mask, _ = pairs()
    names = RandomKey(3, 0, torch.tensor([4, 9, 6]))
    beam = Beam(max_length_a=0.0, max_length_b=6)
    found = sample(model, source, mask, beam=beam, rng=names)
    for row, one in enumerate(found):
        own = source[row : row + 1, mask[row]]
        inputs = torch.tensor([[EOS, *one.tokens]])
        with torch.no_grad():
            key = RandomKey(3, 0, names.sample_ids[row : row + 1])
            rows = model.logits(model(own, inputs, rng=key))[0].log_softmax(-1)
        rows[:, PAD] = NEVER
        rows[0, EOS] = NEVER
        for step, word in enumerate(one.tokens):
            assert word == int(rows[step].argmax())
            assert one.token_scores[step] == pytest.approx(float(rows[step, word]), abs=1e-11)


def test_samples_follow_the_probabilities_and_their_names_alone():
    model, count = toy(5, 3.0), 4000
    source = torch.tensor([[5, 9, 4]])
    beam = Beam(max_length_a=0.0, max_length_b=1, min_length=0)
    hot = Sampling(temperature=1.0, seed=3)
    many = sample(model, source.expand(count, -1), None, hot, beam)
    expected = log_probs(model, source[0], [])[0].exp()
    first = torch.tensor([(one.tokens or [EOS])[0] for one in many])
    shares = torch.bincount(first, minlength=5) / count
    torch.testing.assert_close(shares.double(), expected, rtol=0, atol=0.02)
    assert expected.max() < 0.9
    longer = Beam(max_length_a=0.0, max_length_b=6)
    ids = torch.arange(count)[100:104]
    four = sample(model, source.expand(4, -1), None, hot, longer, rng=RandomKey(0, 0, ids))
    one = sample(model, source, None, hot, longer, rng=RandomKey(0, 0, ids[2:3]))
    assert four[2].tokens == one[0].tokens
    assert len({tuple(x.tokens) for x in four}) > 1
    cold = sample(model, source, None, Sampling(temperature=1.0, top_k=1), longer)
    assert cold[0].tokens == sample(model, source, beam=longer)[0].tokens


def test_bad_searches_are_refused():
    model, (source, mask) = toy(), sentences()
    for rule, message in (
        ({"size": 0}, "size must be at least 1, received 0"),
        ({"size": 2, "n_best": 3}, "n_best must be at most the beam's size, received n_best=3"),
        ({"min_length": -1}, "min_length must be at least 0"),
        ({"length_penalty": float("nan")}, "length_penalty must be "),
        ({"max_length_a": -0.1}, "max_length_a must be at least 0"),
    ):
        with pytest.raises(ValueError, match=message):
            Beam(**rule)
    with pytest.raises(ValueError, match=r"source has shape \(2, 0\)"):
        beam_search(model, source[:2, :0])
    with pytest.raises(ValueError, match=r"call model.eval\(\) before translating"):
        sample(model.train(), source, mask)
    with torch.no_grad():
        model.eval().output.weight[3] = float("nan")
    with pytest.raises(ValueError, match="logits are NaN"):
        beam_search(model, source, mask)


def test_dropout_free_defaults_are_fairseqs():
    assert Beam() == Beam(5, 1.0, 1.2, 10, 1, 1)
    assert softmax(12, head_dim=5).dropout == 0.0
