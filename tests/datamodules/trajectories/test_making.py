"""Policies that are searched for, and the files that they write; on an environment of NumPy."""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import h5py
import numpy as np
import pytest

from datamodules import Trajectories
from datamodules.__main__ import main
from datamodules.core.errors import DataError
from datamodules.trajectories.crew import Crew
from datamodules.trajectories.environments import ENVIRONMENTS, environment_named
from datamodules.trajectories.files import KEYS, read_steps
from datamodules.trajectories.making import TrajectoryMaker
from datamodules.trajectories.search import SETTINGS, Search
from datamodules.trajectories.simulators import make
from datamodules.trajectories.toy_environment import TOY
from tests.support.paths import ROOT

STEPS = 311


def arrays_of(path: Path) -> dict[str, np.ndarray]:
    with h5py.File(path) as file:
        return {key: file[key][()] for key in KEYS}


def search(seed: int = 0) -> Search:
    return Search(TOY, SETTINGS["Toy"], seed)


def ran(found: Search, iterations: int) -> Search:
    with Crew.of(TOY, 1) as crew:
        for _ in range(iterations):
            found.iterate(crew)
    return found


# ---- the search --------------------------------------------------------------------------------


def test_an_iteration_is_that_of_the_paper() -> None:
    """Algorithm 2 of the paper, written out with loops over its symbols."""
    found = ran(search(), 3)
    settings = found.settings
    seen: list[np.ndarray] = []
    weights = np.zeros((2, 5))
    with Crew.of(TOY, 1) as crew:
        for iteration in range(3):
            if seen:
                past = np.concatenate(seen)
                mean, std = past.mean(axis=0), past.std(axis=0) + 1e-6
            else:
                mean, std = np.zeros(5), np.ones(5)
            rng = np.random.default_rng((0, 0, iteration))
            deltas = [rng.standard_normal((2, 5)) for _ in range(settings.num_directions)]
            plays = list(found.plays(iteration))
            returns = []
            for k, delta in enumerate(deltas):
                pair = []
                for j, sign in enumerate((1, -1)):
                    play = plays[2 * k + j]
                    np.testing.assert_allclose(
                        play.policy.weights, weights + sign * settings.noise * delta
                    )
                    np.testing.assert_allclose(play.policy.mean, mean, atol=1e-14)
                    np.testing.assert_allclose(play.policy.std, std)
                    (episode,) = crew.play([play])
                    pair.append(episode.total)
                    seen.append(episode.observations)
                returns.append(pair)
            order = sorted(range(len(deltas)), key=lambda k: -max(returns[k]))
            best = order[: settings.num_best]
            sigma = np.std([returns[k] for k in best])
            move = sum((returns[k][0] - returns[k][1]) * deltas[k] for k in best)
            weights = weights + settings.step_size / (len(best) * sigma) * move
            np.testing.assert_allclose(found.weights[iteration + 1], weights, rtol=1e-6)
            assert found.counts[iteration + 1] == sum(map(len, seen))


def test_the_bonus_for_being_alive_is_taken_off() -> None:
    plain = search()
    settings = dataclasses.replace(plain.settings, alive_bonus=1.0)
    other = Search(TOY, settings, 0)
    assert not np.allclose(ran(plain, 1).weights[1], ran(other, 1).weights[1])


def test_it_finds_a_better_policy_and_says_when() -> None:
    found = search()
    with Crew.of(TOY, 1) as crew:
        at = found.run(crew, 90.0, 20_000, lambda s: None)
        assert at is not None
        assert found.scores[at] >= 90
        assert at == max(found.scores) == len(found.weights) - 1
        assert found.first_at(90.0) == at == found.best()
        assert found.first_at(1e9) is None
        again = found.num_steps
        assert found.run(crew, 90.0, 20_000, lambda s: None) == at  # without another step
        assert found.num_steps == again
        assert Search(TOY, SETTINGS["Toy"], 0).run(crew, 1e9, 500, lambda s: None) is None


def test_an_interrupted_search_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    whole, part, path = search(), search(), tmp_path / "a.npz"
    with Crew.of(TOY, 1) as crew:
        whole.run(crew, 1e9, 3000, lambda s: None)
        part.run(crew, 1e9, 900, lambda s: s.save(path))
        resumed = search()
        assert resumed.resume(path)
        assert 0 < resumed.num_steps < whole.num_steps
        resumed.run(crew, 1e9, 3000, lambda s: None)
    assert resumed.counts == whole.counts
    assert resumed.scores == whole.scores
    for name in ("weights", "means", "squares"):
        assert np.array_equal(getattr(resumed, name), getattr(whole, name))
    assert [p.name for p in tmp_path.iterdir()] == ["a.npz"]


def test_a_history_of_another_search_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    ran(search(), 1).save(path)
    with pytest.raises(DataError, match="begun with seed 0, now 1; delete it"):
        search(seed=1).resume(path)
    path.write_bytes(b"PK no")
    with pytest.raises(DataError, match="not the history of a search"):
        search().resume(path)


# ---- files -------------------------------------------------------------------------------------


def made(folder: Path, quality: str, **options) -> Path:
    steps = {} if quality == "medium-replay" else {"num_steps": STEPS}
    return TrajectoryMaker(**{**steps, "jobs": 1, **options}).make(TOY, quality, folder)


@pytest.mark.parametrize(
    "quality", ["random", "medium", "medium-replay", "medium-expert", "expert"]
)
def test_files_are_those_of_d4rl_and_read_back(tmp_path: Path, quality: str, capsys) -> None:
    path = made(tmp_path, quality)
    assert path.name == f"toy_{quality.replace('-', '_')}-toy.hdf5"
    a = arrays_of(path)
    count = len(a["rewards"])
    kinds = {"terminals": "bool", "timeouts": "bool", "infos/qpos": "f8", "infos/qvel": "f8"}
    for key, values in a.items():
        assert values.dtype == np.dtype(kinds.get(key, "f4")), key
        assert len(values) == count
    with h5py.File(path) as file:
        assert isinstance(file["metadata/algorithm"][()], bytes)
        assert file["metadata/iteration"].shape == ()
    ends = a["terminals"] | a["timeouts"]
    assert ends[-1]
    assert not (a["terminals"] & a["timeouts"]).any()
    inside = ~ends[:-1]
    assert np.array_equal(a["next_observations"][:-1][inside], a["observations"][1:][inside])
    assert np.abs(a["actions"]).max() <= 1
    np.testing.assert_allclose(a["observations"][:, :2], a["infos/qpos"], rtol=1e-6)
    distance = np.hypot(*a["next_observations"][:, :2].T)
    np.testing.assert_allclose(a["rewards"], 1 - distance, atol=1e-6)
    steps = read_steps(path, TOY)
    assert np.array_equal(steps.observations, a["observations"])
    assert steps.ends.tolist() == np.flatnonzero(ends).tolist()
    assert steps.notes == []
    if quality in ("random", "medium", "expert"):
        assert STEPS <= count < STEPS + TOY.max_steps
    assert f"{path.name}: {count} steps" in capsys.readouterr().err
    assert not list(tmp_path.glob(".*.hdf5.*"))


def test_medium_replay_is_what_the_search_saw_until_medium(tmp_path: Path) -> None:
    a = arrays_of(made(tmp_path, "medium-replay"))
    found = search()
    with Crew.of(TOY, 1) as crew:
        seen = []
        while (medium := found.first_at(100 / 3)) is None:
            for _ in range(found.settings.judge_every):
                seen += crew.play(found.plays(len(found.weights) - 1))
                found.iterate(crew)
            found.judge(crew)
    assert medium == len(found.weights) - 1
    whole = np.concatenate([episode.observations for episode in seen]).astype(np.float32)
    assert np.array_equal(a["observations"], whole)


def test_a_search_that_cannot_be_played_again_is_refused(tmp_path: Path, monkeypatch) -> None:
    """As on another machine, where the same episode may end elsewhere."""
    made(tmp_path, "medium")
    plays = Search.plays

    def fewer(self, iteration: int, record: bool = False):
        return itertools.islice(plays(self, iteration, record), 3)

    monkeypatch.setattr(Search, "plays", fewer)
    with pytest.raises(DataError, match="when played again: it was done on another machine"):
        made(tmp_path, "medium-replay")
    assert not list(tmp_path.glob("*replay*"))


def test_medium_expert_is_both(tmp_path: Path) -> None:
    both = arrays_of(made(tmp_path, "medium-expert"))
    parts = [arrays_of(tmp_path / f"toy_{quality}-toy.hdf5") for quality in ("medium", "expert")]
    for key, values in both.items():
        assert np.array_equal(values, np.concatenate([part[key] for part in parts])), key
    returns = [part["rewards"].sum() / len(part["rewards"]) for part in parts]
    assert returns[0] < returns[1]


def test_actions_and_densities_are_those_of_the_policy_in_the_file(tmp_path: Path) -> None:
    path = made(tmp_path, "medium", num_steps=3000)
    a = arrays_of(path)
    with h5py.File(path) as file:
        policy = {name: file[f"metadata/policy/{name}"][()] for name in file["metadata/policy"]}
    centre = (a["observations"] - policy["mean"]) / policy["std"] @ policy["weights"].T
    uncut = (np.abs(a["actions"]) < 1).all(axis=1)
    draw = (a["actions"] - centre)[uncut] / 0.1
    assert policy["noise"] == 0.1
    assert uncut.sum() > 100
    # Of a normal deviate, the deviation of n draws has an error of 1 / sqrt(2 n); three of them.
    whole = ((a["actions"] - centre) / 0.1)[np.abs(centre).max(axis=1) < 0.5]
    assert len(whole) > 50
    assert whole.std() == pytest.approx(1, abs=3 / np.sqrt(2 * whole.size))
    assert abs(whole.mean()) < 3 / np.sqrt(whole.size)
    density = -0.5 * (draw**2).sum(axis=1) - np.log(2 * np.pi * 0.01)
    np.testing.assert_allclose(a["infos/action_log_probs"][uncut], density, atol=1e-3)


def test_files_do_not_depend_on_the_number_of_processes(tmp_path: Path) -> None:
    one = arrays_of(made(tmp_path / "one", "medium"))
    two = arrays_of(made(tmp_path / "two", "medium", jobs=2))
    for key in KEYS:
        assert np.array_equal(one[key], two[key]), key
    assert not np.array_equal(
        one["rewards"], arrays_of(made(tmp_path / "x", "medium", policy_seed=1))["rewards"]
    )


def test_a_score_that_was_not_reached_is_an_error_unless_accepted(tmp_path: Path, capsys) -> None:
    with pytest.raises(DataError, match=r"Toy: score 95\.0 \(expert\) was not reached.*--budget"):
        made(tmp_path, "expert", budget=300)
    assert not list(tmp_path.glob("*.hdf5"))
    path = made(tmp_path, "expert", budget=300, accept=True)
    told = capsys.readouterr().err
    assert "the search goes on at" in told
    assert "the best policy is taken" in told
    assert path.exists()


def test_a_file_that_is_there_is_kept_and_another_one_is_not_taken_for_it(tmp_path: Path) -> None:
    path = made(tmp_path, "random")
    before = path.stat().st_mtime_ns
    assert made(tmp_path, "random") == path
    assert path.stat().st_mtime_ns == before
    with pytest.raises(DataError, match="num_steps 311, now 313; delete it"):
        made(tmp_path, "random", num_steps=313)


def test_nothing_is_left_of_a_file_that_could_not_be_finished(tmp_path: Path, monkeypatch) -> None:
    def fail(self, episodes):
        raise KeyboardInterrupt

    monkeypatch.setattr("datamodules.trajectories.files.EpisodeFile.append", fail)
    with pytest.raises(KeyboardInterrupt):
        made(tmp_path, "random")
    assert list(tmp_path.iterdir()) == []


def test_processes_end_when_their_parent_is_killed() -> None:
    code = (
        "import time\n"
        "from datamodules.trajectories.crew import Crew\n"
        "from datamodules.trajectories.search import SETTINGS, Search\n"
        "from datamodules.trajectories.toy_environment import TOY\n"
        "if __name__ == '__main__':\n"
        "    with Crew.of(TOY, 2) as crew:\n"
        "        crew.play(Search(TOY, SETTINGS['Toy'], 0).plays(0))\n"
        "        print(*crew._pool._processes, flush=True)\n"
        "        time.sleep(300)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        children = [int(word) for word in parent.stdout.readline().split()]
        parent.send_signal(signal.SIGKILL)
    assert len(children) == 2
    for _ in range(600):
        if not any(_runs(child) for child in children):
            return
        time.sleep(0.1)
    raise AssertionError("they still run")


def _runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# ---- the command -------------------------------------------------------------------------------


@pytest.fixture
def toy(monkeypatch) -> None:
    """The toy in the place of Hopper."""
    monkeypatch.setitem(ENVIRONMENTS, "hopper", TOY)


def test_prepare_makes_the_file_and_check_shows_it(tmp_path: Path, toy, capsys) -> None:
    names = ["trajectories", "--env", "Hopper", "--quality", "medium", "--data_dir", str(tmp_path)]
    assert main(["check", *names]) == 1
    missing = capsys.readouterr().err
    assert "prepare trajectories --env Toy --quality medium" in missing
    assert missing.count("\n") == 1
    assert main(["prepare", *names, "--num_steps", "311", "--jobs", "1"]) == 0
    told = capsys.readouterr()
    assert "medium (score 33.3) reached after" in told.err
    assert "sha256" in told.out
    assert main(["check", *names]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("Trajectories: Toy, obs_dim 5, act_dim 2, max_timestep 1000\n")
    a = arrays_of(tmp_path / "toy_medium-toy.hdf5")
    ends = np.flatnonzero(a["terminals"] | a["timeouts"])
    returns = np.add.reduceat(a["rewards"].astype(np.float64), np.r_[0, ends[:-1] + 1])
    low, mean, high = (
        f"{x:.1f} (score {100 * (x - 0.3) / 29.1:.1f})"
        for x in (returns.min(), returns.mean(), returns.max())
    )
    assert f"returns: min {low}, mean {mean}, max {high}" in shown
    assert f"{len(ends)} episodes, {len(a['rewards'])} steps; " in shown
    assert f"actions: {a['actions'][:, 0].min():.3f} to {a['actions'][:, 0].max():.3f}, " in shown
    assert "steps of an episode: min " in shown
    assert len([line for line in shown.splitlines() if line.startswith("row ")]) == 3


def test_accept_is_a_flag(tmp_path: Path, toy, capsys) -> None:
    names = ["trajectories", "--env", "Hopper", "--quality", "expert", "--data_dir", str(tmp_path)]
    few = ["--num_steps", "50", "--budget", "300", "--jobs", "1", "--val_fraction", "0"]
    few += ["--batch_size", "4"]
    assert main(["prepare", *names, *few]) == 1
    assert "--accept" in capsys.readouterr().err
    assert main(["prepare", *names, "--accept", *few]) == 0


def test_options_without_effect_are_refused(tmp_path: Path, toy) -> None:
    for quality, option in (("random", {"budget": 5}), ("random", {"accept": True})):
        with pytest.raises(DataError, match=f"leave out --{next(iter(option))}"):
            made(tmp_path, quality, **option)
    with pytest.raises(DataError, match="leave out --num_steps"):
        made(tmp_path, "medium-replay", num_steps=5)
    (tmp_path / "toy_random-v2.hdf5").touch()
    data = Trajectories(env="Hopper", quality="random", data_dir=str(tmp_path))
    TrajectoryMaker().prepare(data)
    with pytest.raises(DataError, match="is a release, and nothing is made; leave out --jobs"):
        TrajectoryMaker(jobs=1).prepare(data)


def test_walker2d_needs_its_release(tmp_path: Path) -> None:
    walker = environment_named("walker2d")
    with pytest.raises(DataError, match=r"put D4RL's release walker2d_medium-v2\.hdf5 into"):
        TrajectoryMaker(jobs=1).make(walker, "medium", tmp_path)


# ---- MuJoCo ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Hopper", "HalfCheetah"])
def test_real_environments(tmp_path: Path, name: str, monkeypatch, capfd) -> None:
    pytest.importorskip("mujoco")
    pytest.importorskip("gymnasium")
    monkeypatch.chdir(tmp_path)
    environment = environment_named(name)
    folder = tmp_path / "data"
    path = TrajectoryMaker(num_steps=61, jobs=1).make(environment, "random", folder)
    told = capfd.readouterr()
    assert "deprecated" not in told.err + told.out
    assert not list(tmp_path.glob("*.TXT"))
    assert path.name == f"{name.lower()}_random-v5.hdf5"
    steps = read_steps(path, environment)
    assert steps.observations.shape[1] == environment.obs_dim
    env = make(environment)
    assert env.action_space.low.tolist() == [-1.0] * environment.act_dim
    assert env.action_space.high.tolist() == [1.0] * environment.act_dim
    a = arrays_of(path)
    env.reset(seed=0)
    for row in (0, 7, 19):
        env.unwrapped.set_state(a["infos/qpos"][row], a["infos/qvel"][row])
        new, reward, *_ = env.step(a["actions"][row])
        np.testing.assert_allclose(new, a["next_observations"][row], atol=1e-5)
        assert reward == pytest.approx(a["rewards"][row], abs=1e-5)
