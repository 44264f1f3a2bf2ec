"""The study of returns: its rows, its sentences, its picture, a GIF or the line in its place."""

from __future__ import annotations

import functools

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from lit_probattn.analysis.__main__ import main
from lit_probattn.analysis.studies.returns import Returns, compared, draw, findings, means
from lit_probattn.rollouts.episodes import Episode
from lit_probattn.rollouts.facts import EvaluationFacts
from lit_probattn.rollouts.video import Filmed
from tests.rollouts.toy import Pendulum, facts
from tests.support.helpers import with_options
from tests.support.patching import check_figures
from tests.support.runs import arguments, only_version, run


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    short = ["--trainer.max_steps", "2", "--trainer.limit_val_batches", "0"]
    run(arguments("fit", folder, *short, task="tiny/d4rl"))
    return only_version(folder)


@pytest.fixture(autouse=True)
def _check_figures(monkeypatch):
    check_figures(monkeypatch)


def study(trained, out, *more):
    words = ["returns", "--checkpoint", str(trained), "--out", str(out), "--device", "cpu"]
    return main(with_options([*words, "--episodes", "2"], *more))


def test_rows_are_the_episodes_of_the_policy(trained, tmp_path):
    """Without the data: facts and weights come from the checkpoint."""
    assert study(trained, tmp_path, "--targets", "20", "5", "--behaviour", "12") == 0
    rows = pd.read_csv(tmp_path / "returns/returns_episodes.csv")
    assert rows["target"].tolist() == [5.0] * 2 + [20.0] * 2
    assert rows["seed"].tolist() == [100, 101] * 2
    assert rows["score"].to_numpy() == pytest.approx(100 * (rows["return"] - 0.3) / 29.1, abs=1e-3)
    table = pd.read_csv(tmp_path / "returns/returns.csv")
    expected = rows.groupby("target")["return"].mean().to_numpy()
    assert table["return"].to_numpy() == pytest.approx(expected, rel=1e-5)
    assert (tmp_path / "returns/figures/returns.png").is_file()
    text = (tmp_path / "returns/report.md").read_text(encoding="utf-8")
    assert "The best mean return is" in text
    assert "mean return of the data, 12" in text
    assert "its scores are not comparable" in text


@pytest.mark.usefixtures("sketches")
def test_targets_default_to_six_up_to_the_larger_of_the_data(trained, tmp_path, monkeypatch):
    """The episodes of all of them are those of the first."""
    play = functools.cache(Returns._play)

    def played(study, target):
        return [{**row, "target": target} for row in play(study, 0.3)]

    monkeypatch.setattr(Returns, "_play", played)
    assert study(trained, tmp_path, "--episodes", "1") == 0
    targets = pd.read_csv(tmp_path / "returns/returns.csv")["target"].to_numpy()
    np.testing.assert_allclose(targets, np.linspace(0.3, 28.0, 6), rtol=1e-5)


@pytest.mark.usefixtures("sketches")
def test_episodes_side_by_side_stand_beside_the_same_one_by_one(trained, tmp_path):
    assert study(trained, tmp_path / "out", "--targets", "9", "--one_by_one") == 0
    rows = pd.read_csv(tmp_path / "out/returns/returns_one_by_one.csv")
    assert rows["seed"].tolist() == [100, 101]
    np.testing.assert_allclose(rows["in parallel"], rows["one at a time"], rtol=1e-5)
    assert rows["steps"].tolist() == rows["steps one at a time"].tolist()
    assert rows["largest difference between actions"].max() < 1e-9
    text = (tmp_path / "out/returns/report.md").read_text(encoding="utf-8")
    assert "Target 9, policy in float64" in text
    assert "Mean returns" in text


def test_episodes_that_end_at_different_steps_are_not_alike():
    def episode(length: int, shift: float = 0.0) -> Episode:
        return Episode(0, 100, 5.0, 1.0, length, np.full((length, 1), shift))

    name = "largest difference between actions"
    assert compared(episode(7), episode(7, 0.25))[name] == 0.25
    assert compared(episode(120), episode(130))[name] == 0.0
    assert compared(episode(7), episode(8))[name] == np.inf


@pytest.mark.usefixtures("sketches")
def test_a_video_is_drawn_or_said_to_be_missing_in_one_line(trained, tmp_path, monkeypatch):
    few = ("--episodes", "1", "--video")
    assert study(trained, tmp_path / "none", "--targets", "5", *few) == 0
    text = (tmp_path / "none/returns/report.md").read_text(encoding="utf-8")
    assert "\nNo video: rendering is not available" in text
    assert not list((tmp_path / "none/returns").glob("*.gif"))

    class Seen(Pendulum):
        """With the toy's sizes."""

        def reset(self, *, seed=None):
            state, told = super().reset(seed=seed)
            return np.append(state, 0.0), told

        def step(self, action):
            state, *more = super().step(action)
            return (np.append(state, 0.0), *more)

    monkeypatch.setattr(
        "lit_probattn.analysis.studies.returns.filmed_environment", lambda name: Filmed(Seen())
    )
    assert study(trained, tmp_path / "film", "--targets", "5", "9", *few) == 0
    with Image.open(tmp_path / "film/returns/returns.gif") as picture:
        assert picture.n_frames > 1
    assert "Target 9, seed 100: return" in (tmp_path / "film/returns/report.md").read_text(
        encoding="utf-8"
    )


def table(*pairs: tuple[float, float]) -> pd.DataFrame:
    rows = [{"target": t, "return": r, "length": 3} for t, r in pairs for _ in range(2)]
    return means(pd.DataFrame(rows), facts(env_name="Hopper"))


def test_sentences_follow_the_numbers():
    rising = findings(table((100.0, 110.0), (200.0, 190.0), (300.0, 240.0)), 150.0)
    assert "best mean return is 240.0" in rising
    assert "for the target 300" in rising
    assert "correlation of targets and mean returns 1.00" in rising
    assert "the best mean return is above the mean return of the data, 150" in rising.lower()
    assert "not above" in findings(table((100.0, 110.0), (200.0, 90.0)), 150.0)
    assert "-1.00" in findings(table((100.0, 110.0), (200.0, 90.0)))
    assert "no rank correlation" in findings(table((100.0, 5.0), (200.0, 5.0))).lower()
    assert "correlation" not in findings(table((100.0, 5.0)))


def test_one_episode_has_no_deviation():
    known: EvaluationFacts = facts(env_name="Hopper")
    alone = means(pd.DataFrame([{"target": 5.0, "return": 7.0, "length": 3}]), known)
    assert alone["std"].isna().all()
    names = draw(alone, known, "Hopper-v5").axes[0].get_legend_handles_labels()[1]
    assert "policy, one episode each" in names


def test_the_picture_shows_references_that_fit():
    known: EvaluationFacts = facts(env_name="Hopper")
    axis = draw(table((100.0, 110.0), (200.0, 190.0)), known, "Hopper-v5", 150.0).axes[0]
    names = axis.get_legend_handles_labels()[1]
    assert {"return = target", "random -20", "data 150", "policy, ± std"} == set(names)
    assert axis.get_xlabel() == "target return"
