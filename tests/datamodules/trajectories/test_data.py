"""Trajectories from files to batches."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import torch

from datamodules import ToyTrajectories, Trajectories
from datamodules.core.order import FILL
from lit_probattn.base.errors import DataError, MissingDataError
from tests.datamodules.trajectories import made

K = 5
OFFSETS = np.concatenate([[0], np.cumsum(made.LENGTHS)])


def opened(path: Path, **options) -> Trajectories:
    options = {
        "context_length": K,
        "batch_size": 8,
        "return_scale": 7.0,
        "env": "hopper",
        **options,
    }
    module = Trajectories(path=str(path), **options)
    module.prepare_data()
    module.setup()
    return module


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return made.write(tmp_path / "hopper_medium-v2.hdf5")


def expected_segment(first: int, episode: int) -> dict[str, np.ndarray]:
    """A segment from the arrays of the file, step by step in float64."""
    a = made.arrays()
    observations = a["observations"].astype(np.float64)
    mean = observations.sum(axis=0) / len(observations)
    std = np.sqrt(((observations - mean) ** 2).sum(axis=0) / len(observations)) + 1e-6
    found = {
        "observations": np.zeros((K, made.OBS_DIM)),
        "actions": np.full((K, made.ACT_DIM), -10.0),
        "returns_to_go": np.zeros((K, 1)),
        "timesteps": np.zeros(K),
        "mask": np.zeros(K, dtype=bool),
    }
    for place in range(K):
        row = first + place
        if row >= OFFSETS[episode + 1]:
            break
        found["observations"][place] = (observations[row] - mean) / std
        found["actions"][place] = a["actions"][row]
        rest = a["rewards"][row : OFFSETS[episode + 1]].astype(np.float64)
        found["returns_to_go"][place] = rest.sum() / 7.0
        found["timesteps"][place] = row - OFFSETS[episode]
        found["mask"][place] = True
    return found


def test_every_segment_is_that_of_the_file(path: Path) -> None:
    module = opened(path, val_fraction=0)
    train, collate = module.split("train"), module.collate()
    firsts = [(f, e) for e, n in enumerate(made.LENGTHS) for f in range(OFFSETS[e], OFFSETS[e] + n)]
    assert len(train) == len(firsts) == sum(made.LENGTHS)
    for index, (first, episode) in enumerate(firsts):
        batch = collate([train[index]])
        for name, values in expected_segment(first, episode).items():
            np.testing.assert_allclose(batch[name][0].numpy(), values, rtol=2e-6, atol=1e-6)
    assert train.lengths.tolist() == [min(K, OFFSETS[e + 1] - f) for f, e in firsts]


def test_a_batch_and_a_row_that_only_fills_up(path: Path) -> None:
    module = opened(path)
    batch = next(iter(module.train_dataloader()))
    assert {name: (tuple(v.shape), v.dtype) for name, v in batch.items()} == {
        "observations": ((8, K, made.OBS_DIM), torch.float32),
        "actions": ((8, K, made.ACT_DIM), torch.float32),
        "returns_to_go": ((8, K, 1), torch.float32),
        "timesteps": ((8, K), torch.int64),
        "mask": ((8, K), torch.bool),
        "sample_ids": ((8,), torch.int64),
    }
    val = module.split("val")
    filled = module.collate()([val[0], val[FILL]])
    assert filled["sample_ids"].tolist() == [0, -1]
    assert filled["mask"].any(dim=1).tolist() == [True, False]


def test_validation_holds_out_whole_episodes_and_reads_each_step_once(path: Path) -> None:
    module = opened(path, val_fraction=0.3)
    train, val = module.split("train"), module.split("val")
    assert len(val.chosen) == 2
    assert sorted([*train.chosen, *val.chosen]) == list(range(len(made.LENGTHS)))
    assert len(train) == sum(made.LENGTHS[e] for e in train.chosen)
    batches = list(module.val_dataloader())
    real = sum(int(batch["mask"].sum()) for batch in batches)
    assert real == sum(made.LENGTHS[e] for e in val.chosen)
    assert opened(path, val_fraction=0.3, split_seed=1).split("val").chosen.tolist() != (
        val.chosen.tolist()
    )
    both = opened(path, val_fraction=0)
    assert "val_fraction 0" in " ".join(both.notes)
    assert both.split("val").chosen.tolist() == list(range(len(made.LENGTHS)))


@pytest.mark.parametrize("named", ["path", "quality"])
def test_a_cache_is_used_when_its_file_is_gone(path: Path, named) -> None:
    options = {"path": str(path)} if named == "path" else {"env": "hopper", "quality": "medium"}
    options["data_dir"] = str(path.parent)
    built = Trajectories(**options)
    hashes = built.source_hashes
    path.unlink()
    again = Trajectories(**options)
    assert again.present_hashes() == hashes != {}
    again.setup()
    assert len(again.split("train")) > 0
    again.cache_dir = path.parent / "other"
    with pytest.raises(MissingDataError, match="medium"):
        again.prepare_data()


def test_what_evaluation_needs_is_in_the_checkpoint(path: Path) -> None:
    module = opened(path)
    state = json.loads(json.dumps(module.state_dict()))["evaluation"]
    observations = made.arrays()["observations"].astype(np.float64)
    assert state["env_name"] == "Hopper"
    np.testing.assert_allclose(state["observation_mean"], observations.mean(axis=0), rtol=1e-14)
    np.testing.assert_allclose(state["observation_std"], observations.std(axis=0) + 1e-6)
    assert state["target_returns"] == [3600.0, 1800.0]
    assert state["reference_returns"] == [-20.272305, 3234.3]
    assert (state["return_scale"], state["context_length"], state["max_timestep"]) == (7.0, K, 1000)
    assert state == module.evaluation
    assert (module.obs_dim, module.act_dim, module.max_seq_len) == (11, 3, 15)
    opened(path).load_state_dict(module.state_dict())
    other = made.write(path.with_name("other.hdf5"), actions=made.arrays(seed=1)["actions"])
    opened(other).load_state_dict(module.state_dict())  # its observations are the same
    with pytest.raises(DataError, match=r"return_scale is 11\.0, was 7\.0"):
        opened(path, return_scale=11.0).load_state_dict(module.state_dict())
    changed = made.write(path.with_name("x.hdf5"), observations=made.arrays(seed=1)["observations"])
    with pytest.raises(DataError, match="observation_mean are others"):
        opened(changed).load_state_dict(module.state_dict())


def test_the_longest_episode_decides_the_table_of_time_steps(tmp_path: Path) -> None:
    arrays = made.arrays((1013, 17))
    assert opened(made.write(tmp_path / "a.hdf5", **arrays)).max_timestep == 1013


# ---- files -----------------------------------------------------------------------------------


def test_releases_are_found_by_name_and_before_our_own(tmp_path: Path) -> None:
    options = {"env": "Hopper", "quality": "medium-replay", "data_dir": str(tmp_path)}
    with pytest.raises(MissingDataError, match=r"hopper_medium_replay-v2\.hdf5.*--env Hopper --q"):
        Trajectories(**options).prepare_data()
    for version in ("v5", "v2"):
        made.write(tmp_path / f"hopper_medium_replay-{version}.hdf5")
        assert Trajectories(**options).file().name == f"hopper_medium_replay-{version}.hdf5"
    module = Trajectories(**options)
    module.prepare_data()
    assert list(module.source_hashes) == ["hopper_medium_replay-v2.hdf5"]


@pytest.mark.parametrize("kind", [np.bool_, np.float32, np.int64])
def test_flags_of_any_kind(tmp_path: Path, kind: type) -> None:
    flags = {key: made.arrays()[key].astype(kind) for key in ("terminals", "timeouts")}
    episodes = opened(made.write(tmp_path / "a.hdf5", **flags)).episodes
    assert episodes.lengths.tolist() == list(made.LENGTHS)
    assert episodes.terminated.tolist() == list(made.TERMINATED)


def test_without_timeouts_an_episode_ends_at_step_1000(tmp_path: Path) -> None:
    arrays = made.arrays((1000, 3, 1000, 1000, 7, 11))
    count = len(arrays["rewards"])
    terminals = np.zeros(count, dtype=bool)
    terminals[[1002, 3009]] = True  # the third and fourth episode are cut off, the last is not over
    path = made.write(tmp_path / "a.hdf5", ("timeouts",), **{**arrays, "terminals": terminals})
    module = opened(path)
    assert module.episodes.lengths.tolist() == [1000, 3, 1000, 1000, 7]
    assert module.episodes.terminated.tolist() == [False, True, False, False, True]
    assert module.episodes.num_steps == count - 11
    assert "has no timeouts: an episode ends at a terminal or at step 1000" in module.notes[0]
    assert module.notes[1].startswith("11 steps after the end of the last episode")


class FakeMinari:
    """The part of the package that is used; rewards are multiplied by the number in a file."""

    def __init__(self, folder: Path) -> None:
        (folder / "data").mkdir(parents=True)
        self.storage = SimpleNamespace(data_path=folder / "data")
        self.scale = folder / "data" / "scale"
        self.scale.write_text("1")

    def load_dataset(self, name: str) -> FakeMinari:
        if name != "mujoco/hopper/medium-v0":
            raise FileNotFoundError(name)
        return self

    def iterate_episodes(self):
        a = made.arrays()
        for e, (first, stop) in enumerate(itertools.pairwise(OFFSETS)):
            yield SimpleNamespace(
                observations=np.concatenate([a["observations"][first:stop], np.ones((1, 11))]),
                actions=a["actions"][first:stop],
                rewards=a["rewards"][first:stop].astype(np.float64) * int(self.scale.read_text()),
                terminations=np.arange(first, stop) == (stop - 1 if made.TERMINATED[e] else -1),
                truncations=None,
            )


@pytest.fixture
def minari(tmp_path: Path, monkeypatch) -> FakeMinari:
    package = FakeMinari(tmp_path / "medium-v0")
    monkeypatch.setitem(sys.modules, "minari", package)
    return package


def of_minari(name: str = "medium") -> Trajectories:
    module = Trajectories(
        path=f"minari:mujoco/hopper/{name}-v0", context_length=K, return_scale=7.0
    )
    module.prepare_data()
    module.setup()
    return module


def test_minari_gives_the_same_segments(path: Path, minari: FakeMinari) -> None:
    ours, theirs = opened(path), of_minari()
    assert theirs.environment.name == "Hopper"
    assert theirs.episodes.terminated.tolist() == list(made.TERMINATED)
    for name in ("observations", "actions", "returns_to_go", "offsets", "moments"):
        assert np.array_equal(getattr(ours.episodes, name), getattr(theirs.episodes, name)), name
    with pytest.raises(MissingDataError, match="minari download mujoco/hopper/expert-v0"):
        of_minari("expert")


def test_a_changed_set_of_minari_is_read_again(minari: FakeMinari, monkeypatch) -> None:
    before = of_minari()
    minari.scale.write_text("2")
    after = of_minari()
    assert np.array_equal(after.episodes.returns, 2 * before.episodes.returns)
    assert before.source_hashes.keys() == after.source_hashes.keys() == {"medium-v0"}
    assert before.source_hashes != after.source_hashes
    monkeypatch.setitem(sys.modules, "minari", None)  # the cache is enough
    assert np.array_equal(of_minari().episodes.returns, after.episodes.returns)


def test_an_environment_that_contradicts_the_name_is_refused(tmp_path: Path) -> None:
    """HalfCheetah and Walker2d have equal sizes, so the content does not show the difference."""
    message = "walker2d_medium-v2.hdf5: the name contains Walker2d, received env=HalfCheetah"
    with pytest.raises(DataError, match=message):
        Trajectories(path=str(tmp_path / "walker2d_medium-v2.hdf5"), env="HalfCheetah")
    both = Trajectories(path=str(tmp_path / "walker2d_to_hopper.hdf5"), env="hopper")
    assert both.environment.name == "Hopper"


# ---- toy -------------------------------------------------------------------------------------


def test_toy_episodes_are_made_in_memory_from_their_seed_and_better_with_skill(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    module, again, other = ToyTrajectories(), ToyTrajectories(), ToyTrajectories(data_seed=1)
    assert np.array_equal(module.episodes.observations, again.episodes.observations)
    assert not np.array_equal(module.episodes.rewards[:99], other.episodes.rewards[:99])
    returns = module.episodes.returns
    assert returns[:16].mean() + 9 < returns[-16:].mean()
    assert 0 < module.episodes.terminated.sum() < len(module.episodes)
    assert module.episodes.lengths.max() == 31


@pytest.mark.parametrize("key", ["actions", "timeouts"])
@pytest.mark.parametrize("kind", ["soft", "external"])
def test_a_link_that_leads_nowhere_is_a_missing_key(path: Path, key: str, kind: str) -> None:
    with h5py.File(path, "a") as file:
        if key in file:
            del file[key]
        file[key] = h5py.SoftLink("/gone") if kind == "soft" else h5py.ExternalLink("gone", "/x")
    with pytest.raises(DataError, match=f"missing {key}; D4RL's files"):
        opened(path)


def test_two_rewards_a_step_are_refused(path: Path) -> None:
    made.write(path, rewards=np.zeros((sum(made.LENGTHS), 2), dtype=np.float32))
    with pytest.raises(DataError, match=r"rewards must have one number per step.*, 2\)"):
        opened(path)
