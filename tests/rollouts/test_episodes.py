"""Episodes: side by side as one by one, windows written out, caches, ends, real environments."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from lit_probattn.attention import FiSHAttention, LinearAttention
from lit_probattn.models.decision_transformer import DecisionTransformer
from lit_probattn.randomness import RandomKey
from lit_probattn.rollouts.environments import make_environment
from lit_probattn.rollouts.episodes import Player
from lit_probattn.rollouts.facts import EvaluationFacts
from tests.rollouts.toy import ACT, CONTEXT, Pendulum, facts, policy, softmax


def gfish(c, head_dim, **more):
    more |= {"num_global_heads": 2, "mixer": "mlp", "noise": "global", "noise_at_eval": True}
    return FiSHAttention(c, 4, head_dim=head_dim, **more)


def linear(c, head_dim, **more):
    return LinearAttention(c, 2, head_dim=head_dim, **more)


VARIANTS = pytest.mark.parametrize("attention", [softmax, gfish, linear])


@functools.cache
def played_by(attention):
    """The seven episodes of `play`, by the policy with this attention; played once."""
    return play(policy(attention))


def play(model, count=7, numbers=None, target=30.0, **options):
    names = list(range(count)) if numbers is None else numbers
    made = [Pendulum() for _ in names]
    more = {k: options.pop(k) for k in ("max_steps", "watch") if k in options}
    player = Player(model, facts(), context_length=CONTEXT, seed=3, **options)
    seeds = [100 + name for name in names]
    return player.play(made, target, seeds, numbers=names, keep_actions=True, **more)


def written_out(model: DecisionTransformer, known: EvaluationFacts, target: float, number: int):
    """One episode, every window built by hand from the whole history."""
    environment = Pendulum()
    state, _ = environment.reset(seed=100 + number)
    states, actions, rewards, end = [], [], [], False
    while not end:
        mean, std = np.array(known.observation_mean), np.array(known.observation_std)
        states.append((state - mean) / std)
        first = max(0, len(states) - CONTEXT)
        left = [target - sum(rewards[:i]) for i in range(len(states))]
        acts = [*actions, np.full(ACT, 7.0)]  # that of this step is not read
        with torch.no_grad():
            predicted = model(
                torch.tensor(np.array(states[first:]))[None],
                torch.tensor(np.array(acts[first:]))[None],
                torch.tensor(left[first:], dtype=torch.float64)[None, :, None] / known.return_scale,
                torch.arange(first, len(states))[None],
                rng=RandomKey(3, 0, torch.tensor([number])),
            )
        actions.append(predicted[0, -1].numpy())
        state, reward, end, _, _ = environment.step(actions[-1])
        rewards.append(reward)
    return np.array(actions), sum(rewards)


@VARIANTS
def test_an_episode_is_the_one_written_out(attention):
    """Windows before and after they slide, the target less the rewards, steps since the start."""
    model = policy(attention).eval()
    for number in (2, 5):
        episode = played_by(attention)[number]
        actions, total = written_out(model, facts(), 30.0, number)
        assert episode.length == len(actions) > CONTEXT
        np.testing.assert_allclose(episode.actions, actions, rtol=0.0, atol=1e-9)
        assert episode.total == pytest.approx(total, abs=1e-9)


@VARIANTS
def test_side_by_side_equals_one_by_one(attention):
    """Also with the noise that an attention draws in evaluation."""
    model = policy(attention)
    together = played_by(attention)
    assert len({episode.length for episode in together}) > 3, "they end at different steps"
    for episode in together[1::3]:
        (alone,) = play(model, numbers=[episode.number])
        assert alone.length == episode.length
        np.testing.assert_allclose(episode.actions, alone.actions, rtol=0.0, atol=1e-9)
        assert episode.total == pytest.approx(alone.total, abs=1e-9)


@VARIANTS
def test_caches_change_nothing(attention):
    for cached, anew in zip(
        played_by(attention), play(policy(attention), use_cache=False), strict=True
    ):
        assert cached.length == anew.length
        np.testing.assert_allclose(cached.actions, anew.actions, rtol=0.0, atol=1e-9)


def test_caches_are_used_until_the_window_slides_and_ended_episodes_leave(monkeypatch):
    """Tokens that the model reads at every step, and for how many episodes."""
    read: list[tuple[int, int]] = []
    model = policy()
    inner = model.encoder.forward

    def counted(x, **more):
        read.append(tuple(x.shape[:2]))
        return inner(x, **more)

    monkeypatch.setattr(model.encoder, "forward", counted)
    episodes = play(model, count=5)
    longest = max(episode.length for episode in episodes)
    running = [sum(e.length > step for e in episodes) for step in range(longest)]
    tokens = [2, *[3] * (CONTEXT - 1), *[3 * CONTEXT - 1] * (longest - CONTEXT)]
    assert read == list(zip(running, tokens, strict=True))
    assert len(set(running)) > 2


def test_episodes_that_end_within_the_first_window_leave_the_caches():
    """A window longer than any episode: caches alone, rows leave one after the other."""
    model = policy()
    names = list(range(3))
    seeds = [100 + name for name in names]
    found = []
    for use_cache in (True, False):
        player = Player(model, facts(), context_length=45, seed=3, use_cache=use_cache)
        made = [Pendulum() for _ in names]
        found.append(player.play(made, 30.0, seeds, numbers=names, keep_actions=True))
    for cached, anew in zip(*found, strict=True):
        np.testing.assert_allclose(cached.actions, anew.actions, rtol=0.0, atol=1e-9)


def test_the_target_and_the_seed_matter():
    model = policy()
    first = played_by(softmax)
    assert all(a.total != b.total for a, b in zip(first, play(model, target=5.0), strict=True))
    assert len({episode.total for episode in first}) == len(first)
    assert [episode.total for episode in play(model)] == [episode.total for episode in first]


def test_it_stops_where_it_is_told_and_watches_every_step():
    seen: list[tuple[int, int]] = []
    episodes = play(policy(), max_steps=4, watch=lambda step, running: seen.append((step, running)))
    assert [episode.length for episode in episodes] == [4] * 7
    assert seen == [(1, 7), (2, 7), (3, 7), (4, 0)]


def test_the_policy_is_left_in_the_mode_it_was_in_and_plays_without_dropout():
    model = policy().train()
    first, second = play(model), play(model)
    assert model.training
    np.testing.assert_array_equal(first[0].actions, second[0].actions)


def test_time_beyond_the_table_is_refused():
    model = policy(max_timestep=5)
    with pytest.raises(
        ValueError, match=r"exceeds step 5, but the policy supports 5 time steps: train"
    ):
        play(model)


def test_seeds_must_match_environments():
    player = Player(policy(), facts(), context_length=CONTEXT)
    with pytest.raises(ValueError, match="received 1 environments, 2 seeds and 2 numbers"):
        player.play([Pendulum()], 30.0, [1, 2])


def test_a_window_needs_a_step():
    with pytest.raises(ValueError, match="context_length must be at least 1, received 0"):
        Player(policy(), facts(), context_length=0)


def test_a_window_of_one_step_plays():
    player = Player(policy(), facts(), context_length=1)
    (episode,) = player.play([Pendulum()], 30.0, [1])
    assert episode.length >= 9


# ---- a real simulator --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "obs_dim", "act_dim", "options", "least"),
    [
        ("Hopper", 11, 3, {}, 5),  # it falls, at different steps
        pytest.param(
            *("Hopper", 11, 3, {"terminate_when_unhealthy": False}, 20), marks=pytest.mark.slow
        ),
        pytest.param("HalfCheetah", 17, 6, {}, 20, marks=pytest.mark.slow),
    ],
)
def test_episodes_of_mujoco_side_by_side_equal_them_one_by_one(
    name, obs_dim, act_dim, options, least
):
    """A policy in float64, the first 20 steps: the window slides; noise in evaluation is on."""
    pytest.importorskip("gymnasium")
    pytest.importorskip("mujoco")
    model = policy(gfish, obs_dim=obs_dim, act_dim=act_dim, max_timestep=1000)
    zeros = {"observation_mean": np.zeros(obs_dim), "observation_std": np.ones(obs_dim)}
    player = Player(model, facts(**zeros, return_scale=1000.0), context_length=12, seed=3)

    def played(numbers):
        environments = [make_environment(name, **options) for _ in numbers]
        seeds = [100 + number for number in numbers]
        more = {"numbers": numbers, "max_steps": 20, "keep_actions": True}
        found = player.play(environments, 3600.0, seeds, **more)
        for environment in environments:
            environment.close()
        return found

    together = played(list(range(4)))
    for episode in together[::3]:
        (alone,) = played([episode.number])
        assert alone.length == episode.length >= least
        np.testing.assert_allclose(episode.actions, alone.actions, rtol=0.0, atol=1e-9)
        assert episode.total == pytest.approx(alone.total, abs=1e-6)


@pytest.mark.parametrize("steps", [0, -1])
def test_an_episode_without_steps_is_refused(steps):
    with pytest.raises(ValueError, match="max_steps"):
        play(policy(), max_steps=steps)


def test_modules_in_eval_mode_stay_in_it():
    model = policy()
    model.train()
    first, *others = [module for module in model.modules() if module is not model]
    first.eval()
    play(model, max_steps=1)
    assert not first.training
    assert model.training
    assert all(module.training for module in others if module not in set(first.modules()))
