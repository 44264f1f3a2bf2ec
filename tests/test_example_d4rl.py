"""Data made by policy search: the algorithm, and files that are read as D4RL's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from datamodules import Trajectories
from datamodules.trajectories.environments import ENVIRONMENTS, environment_named
from datamodules.trajectories.files import read_steps
from datamodules.trajectories.toy_environment import TOY
from examples.sets import d4rl_by_search
from examples.sets.d4rl_by_search import SEARCHING, Policy, Search, Simulator, main


def made(folder: Path, quality: str, *more: str, env: str = "Toy") -> Path:
    main(["--env", env, "--quality", quality, "--out", str(folder), "--num_steps", "311", *more])
    (path,) = folder.glob(f"{env.lower()}_{quality.replace('-', '_')}-*.hdf5")
    return path


def test_an_iteration_is_that_of_the_paper() -> None:
    """Algorithm 2 of the paper, written out with loops over its symbols."""
    simulator = Simulator(TOY)
    search, settings = Search(simulator, 0), Search(simulator, 0).settings
    weights, seen = np.zeros((2, 5)), np.zeros((0, 5))
    for iteration in range(3):
        mean, std = np.zeros(5), np.ones(5)
        if len(seen):
            mean, std = seen.mean(axis=0), seen.std(axis=0) + 1e-6
        rng = np.random.default_rng((0, 0, iteration))
        deltas = [rng.standard_normal((2, 5)) for _ in range(settings.num_directions)]
        returns = []
        for k, delta in enumerate(deltas):
            pair = []
            for j, sign in enumerate((1, -1)):
                policy = Policy(weights + sign * settings.noise * delta, mean, std)
                episode = simulator.play(policy, (0, SEARCHING, iteration, k, j))
                pair.append(episode["rewards"].sum())
                seen = np.concatenate([seen, episode["observations"]])
            returns.append(pair)
        order = sorted(range(len(deltas)), key=lambda k: -max(returns[k]))
        best = order[: settings.num_best]
        sigma = np.std([returns[k] for k in best])
        move = sum((returns[k][0] - returns[k][1]) * deltas[k] for k in best)
        weights = weights + settings.step_size / (len(best) * sigma) * move
        search.iterate()
        np.testing.assert_allclose(search.weights, weights, rtol=1e-6)
        np.testing.assert_allclose(search.mean, seen.mean(axis=0))
        assert search.count == len(seen)


def test_qualities_are_ordered_read_back_and_found_by_the_data_module(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setitem(ENVIRONMENTS, "toy", TOY)
    means = {}
    for quality in ("random", "medium", "expert"):
        steps = read_steps(made(tmp_path, quality), TOY)
        assert steps.ends[-1] + 1 == len(steps.rewards) >= 311
        starts = np.r_[0, steps.ends[:-1] + 1]
        means[quality] = TOY.score(np.add.reduceat(steps.rewards.astype(float), starts).mean())
    (path,) = tmp_path.glob("toy_random-*.hdf5")
    assert Trajectories(env="Toy", quality="random", data_dir=str(tmp_path)).file() == path
    assert means["random"] < 10 < 25 < means["medium"] < 80 < means["expert"]
    replay = read_steps(made(tmp_path, "medium-replay"), TOY)
    assert len(replay.rewards) == 284  # every step of the search, fewer than asked for
    monkeypatch.setattr(d4rl_by_search, "episodes", None)  # nothing is searched
    with pytest.raises(SystemExit, match=r"toy_random-toy.hdf5 exists: remove it"):
        made(tmp_path, "random")


def test_a_score_that_is_not_reached_needs_accept(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"score 95.0 was not reached in \d+ steps.*--accept"):
        made(tmp_path, "expert", "--budget", "300")
    assert not list(tmp_path.iterdir())
    assert made(tmp_path, "expert", "--budget", "300", "--accept").is_file()


@pytest.mark.slow
def test_hopper_is_found_by_the_data_module(tmp_path: Path) -> None:
    pytest.importorskip("mujoco")
    path = made(tmp_path, "random", env="Hopper")
    steps = read_steps(path, environment_named("Hopper"))
    assert np.abs(steps.actions).max() <= 1
    data = Trajectories(env="Hopper", quality="random", data_dir=str(tmp_path))
    assert data.file() == path
