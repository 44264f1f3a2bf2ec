"""Scores, standardised states, what a checkpoint keeps; environments by name; GIF files."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from lit_probattn.base.errors import ConfigError
from lit_probattn.rollouts.environments import (
    check_sizes,
    describe_environment,
    environment_id,
    make_environment,
)
from lit_probattn.rollouts.episodes import Player
from lit_probattn.rollouts.facts import EvaluationFacts
from lit_probattn.rollouts.video import Filmed, filmed_environment, write_gif
from tests.rollouts.toy import CONTEXT, Pendulum, facts, policy


def test_scores_are_those_of_d4rl():
    """0 and 100 at the references; the numbers of a random and a trained policy as computed."""
    known = facts()
    assert known.score(-20.272305) == 0.0
    assert known.score(3234.3) == pytest.approx(100.0)
    assert known.score(18.1) == pytest.approx(1.179, abs=1e-3)


def test_states_are_standardised_in_double_precision():
    known = facts(observation_mean=[1.0, 2.0, 3.0, 4.0], observation_std=[0.5, 1.0, 2.0, 4.0])
    states = np.arange(8, dtype=np.float32).reshape(2, 4)
    expected = [[-2.0, -1.0, -0.5, -0.25], [6.0, 3.0, 1.5, 0.75]]
    found = known.standardised(states)
    assert found.dtype == np.float64
    np.testing.assert_array_equal(found, expected)


def test_they_come_from_the_data_and_return_from_a_checkpoint():
    evaluation = {
        "env_name": "Hopper",
        "observation_mean": [0.1, 0.2],
        "observation_std": [1.0, 2.0],
        "target_returns": [3600.0, 1800.0],
        "reference_returns": [-20.0, 3234.3],
        "return_scale": 1000.0,
        "context_length": 20,
    }
    found = EvaluationFacts.of(SimpleNamespace(evaluation=evaluation))
    assert found is not None
    assert found.target_returns == (3600.0, 1800.0)
    assert EvaluationFacts(**found.state()) == found
    assert all(isinstance(value, str | float | tuple) for value in found.state().values())
    assert EvaluationFacts.of(SimpleNamespace()) is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"observation_std": [1.0] * 3}, "equal lengths, received 4 and 3"),
        ({"observation_std": [1.0, 1.0, 0.0, 1.0]}, "must be positive, received 0.0"),
        ({"return_scale": 0.0}, "return_scale must be positive"),
        ({"target_returns": (1.0,)}, r"target_returns must be two numbers, received \[1.0\]"),
        ({"reference_returns": (2.0, 2.0)}, "reference_returns must differ"),
        ({"observation_mean": [0.0, np.nan, 0.0, 0.0]}, "observation_mean must be finite"),
    ],
)
def test_numbers_without_a_meaning_are_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        facts(**changed)


# ---- environments ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "full"),
    [
        ("Hopper", "Hopper-v5"),
        ("Toy", "Toy"),
        ("Walker2d", "Walker2d-v5"),
        ("Hopper-v4", "Hopper-v4"),
    ],
)
def test_full_names(name, full):
    assert environment_id(name) == full


def test_an_unknown_name_is_refused():
    pytest.importorskip("gymnasium")
    with pytest.raises(ConfigError, match="cannot create Nothing-v5"):
        make_environment("Nothing")


@pytest.mark.parametrize("package", ["gymnasium", "mujoco"])
def test_a_missing_package_is_one_line_with_the_remedy(monkeypatch, package):
    if package == "mujoco":
        pytest.importorskip("gymnasium")
        for name in [n for n in sys.modules if n.startswith("gymnasium.envs.mujoco")]:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError) as error:
        make_environment("Hopper")
    text = str(error.value)
    assert text.startswith(f"Hopper-v5 needs the package {package}")
    assert 'pip install "lit-probattn[rl]"' in text
    assert "\n" not in text


def test_other_sizes_are_refused():
    check_sizes("toy", Pendulum(), 4, 2)
    with pytest.raises(ValueError, match=r"toy has observations of shape \(4,\), but the policy"):
        check_sizes("toy", Pendulum(), 11, 2)
    with pytest.raises(ValueError, match=r"toy has actions of shape \(2,\), but the policy was"):
        check_sizes("toy", Pendulum(), 4, 3)


def test_a_result_names_versions_and_warns_of_the_physics():
    found = describe_environment("Hopper")
    assert found["environment"] == "Hopper-v5"
    assert {"gymnasium", "mujoco"} < found.keys()
    assert "older physics" in found["warning"]


# ---- pictures that move ------------------------------------------------------------------------


def test_an_episode_becomes_a_gif(tmp_path):
    film = Filmed(Pendulum(), every=3)
    player = Player(policy(), facts(), context_length=CONTEXT)
    (episode,) = player.play([film], 30.0, [5])
    steps = [*range(3, episode.length, 3), episode.length]
    assert len(film.frames) == 1 + len(steps)
    write_gif(tmp_path / "toy.gif", film.frames)
    with Image.open(tmp_path / "toy.gif") as picture:
        assert picture.format == "GIF"
        assert picture.size == (30, 20)
        assert picture.n_frames > 1
    assert [path.name for path in tmp_path.iterdir()] == ["toy.gif"]


def test_no_picture_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no frames to write to toy\.gif"):
        write_gif(tmp_path / "toy.gif", [])


def test_without_a_renderer_there_is_one_line(monkeypatch):
    def broken(name, **options):
        raise RuntimeError("an OpenGL platform library\nhas not been loaded")

    monkeypatch.setattr("lit_probattn.rollouts.video.make_environment", broken)
    found = filmed_environment("Hopper")
    assert isinstance(found, str)
    assert found.startswith("no video: rendering is not available (RuntimeError)")
    assert "\n" not in found
