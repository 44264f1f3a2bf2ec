"""Pathfinder's generator: parameters, pictures, files that do not depend on who writes them."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from datamodules.lra import pathfinder_generator
from datamodules.lra.pathfinder_contours import Canvas, Draws, GeneratorSettings, paddle
from datamodules.lra.pathfinder_generator import GeneratedImage, draw_image
from lit_probattn.base.errors import DataError
from tests.datamodules.lra.files import contents, write_pathfinder
from tests.datamodules.lra.test_pathfinder import pathfinder

EASY = GeneratorSettings.published(32, "easy", seed=3)


def test_published_parameters() -> None:
    """d.1: Pathfinder32 at contour length 14."""
    hard = GeneratorSettings.published(32, "hard", seed=0)
    assert (hard.side, hard.padding, hard.paddle_margins, hard.paddle_length) == (32, 1, (1,), 2)
    assert (hard.marker_radius, hard.contour_length, hard.paddle_thickness) == (1.5, 14, 0.5)
    assert (hard.antialias, hard.seed_distance, hard.continuity) == (2, 7, 1.0)
    assert (hard.distractor_length, hard.num_distractors) == (4, 5)
    assert (hard.snake_contrast, hard.paddle_contrast) == (2.0, 0.75)
    easy = GeneratorSettings.published(32, "easy", seed=0)
    assert (easy.contour_length, easy.distractor_length, easy.num_distractors) == (6, 2, 10)
    path_x = GeneratorSettings.published(128, "hard", seed=0)
    assert (path_x.side, path_x.distractor_length, path_x.num_distractors) == (128, 4, 8)


def test_a_paddle_points_where_its_angle_says() -> None:
    piece = paddle(0.0, length=5, thickness=1.5, margin=2, antialias=2)
    bright = np.argwhere(piece.brightness > 0.5) - piece.half
    assert bright[:, 1].min() >= -1
    assert bright[:, 1].max() in (5, 6)
    assert np.abs(bright[:, 0]).max() <= 1
    down = paddle(np.pi / 2, length=5, thickness=1.5, margin=2, antialias=2)
    assert (np.argwhere(down.brightness > 0.5)[:, 0] - down.half).max() in (5, 6)
    assert (piece.mask >= piece.brightness - 1e-9).all(), "the mask covers the paddle"
    assert (piece.mask > 0.9).sum() > 2 * (piece.brightness > 0.9).sum()


def test_contours_keep_clear_of_what_is_there() -> None:
    settings = GeneratorSettings.published(128, "hard", seed=0)
    canvas = Canvas(settings, margin=2, draws=Draws(1))
    wall = slice(canvas.border + 60, canvas.border + 128)
    canvas.mask[:, wall] = 1
    for _ in range(40):
        contour = canvas.seed(contrast=1.0)
        while contour is not None and canvas.extend(contour, contrast=1.0):
            pass
        if contour is not None:
            canvas.close(contour)
    assert (canvas.pixels > 0.5).sum() > 500
    assert canvas.pixels[:, 61:].max() < 0.5


@pytest.fixture(scope="module")
def pictures() -> list[GeneratedImage]:
    """The first pictures of the seed 3."""
    return [draw_image(EASY, index) for index in range(40)]


def test_pictures_repeat_differ_and_balance(pictures) -> None:
    assert pictures[7].pixels.tobytes() == draw_image(EASY, 7).pixels.tobytes()
    assert len({picture.pixels.tobytes() for picture in pictures}) == 40
    other = draw_image(GeneratorSettings.published(32, "easy", seed=4), 0)
    assert other.pixels.tobytes() != pictures[0].pixels.tobytes()
    assert 11 <= sum(picture.label for picture in pictures) <= 29
    for picture in pictures:
        assert picture.pixels.shape == (32, 32)
        assert picture.pixels.min() == 0
        assert picture.pixels.max() == 255
    assert 0.02 < np.mean([(picture.pixels > 100).mean() for picture in pictures]) < 0.3


@pytest.fixture
def without_drawing(pictures, monkeypatch) -> None:
    """Files have the pictures that are drawn already."""
    monkeypatch.setattr(pathfinder_generator, "draw_image", lambda _, index: pictures[index])


def files_of(folder: Path) -> dict[Path, bytes]:
    """The files of a release, by their paths in it."""
    paths = [p for p in folder.rglob("*.*") if p.is_file() and p.name != "generator.json"]
    return {path.relative_to(folder): path.read_bytes() for path in paths}


def test_the_number_of_processes_changes_nothing(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(pathfinder_generator, "IMAGES_PER_FILE", 12)
    told: list[int] = []
    for processes in (1, 3):
        folder = tmp_path / str(processes)
        pathfinder_generator.write_images(folder, EASY, 30, processes, told.append)
    assert sum(told) == 60
    assert files_of(tmp_path / "1") == files_of(tmp_path / "3")
    assert len(files_of(tmp_path / "1")) == 33


def test_a_process_that_dies_is_one_error(tmp_path: Path, monkeypatch) -> None:
    parent = os.getpid()

    def die(*_) -> None:
        assert os.getpid() != parent
        os._exit(9)

    monkeypatch.setattr(pathfinder_generator, "draw_image", die)
    with pytest.raises(DataError, match=r"^Pathfinder: generation: a process died"):
        pathfinder_generator.write_images(tmp_path, EASY, 30, 2, lambda _: None)
    assert not any((tmp_path / "metadata").iterdir())


def test_generated_data_is_a_release(tmp_path: Path) -> None:
    """`prepare --source generated` writes the released format, which `released` reads alike."""
    options = {"difficulty": "easy", "split": "in_order"}
    data = pathfinder(
        tmp_path / "a",
        source="generated",
        num_images=20,
        generated_dir=str(tmp_path / "made"),
        **options,
    )
    found = contents(data)
    place = tmp_path / "made" / "pathfinder32" / "curv_baseline"
    lines = (place / "metadata" / "0.npy").read_text(encoding="utf-8").splitlines()
    assert lines[3].split()[:3] == ["imgs/0", "sample_3.png", "3"]
    assert lines[3].split()[4:] == ["1.0", "6", "2", "2", "0.5", "1", "1"]
    assert contents(pathfinder(tmp_path / "made", **options)) == found
    rows = found["train"] + found["val"] + found["test"]
    assert [int(line.split()[3]) for line in lines] == [target for _, target in rows]
    picture = draw_image(GeneratorSettings.published(32, "easy", 0), 11)
    assert rows[11] == (picture.pixels.tobytes(), picture.label)


@pytest.mark.usefixtures("without_drawing")
def test_images_are_written_to_each_folder_that_is_named(tmp_path: Path) -> None:
    options = {"source": "generated", "difficulty": "easy", "num_images": 20}
    for name in ("one", "two"):
        pathfinder(tmp_path, generated_dir=str(tmp_path / name), **options).prepare_data()
        assert len(files_of(tmp_path / name)) == 21


@pytest.mark.usefixtures("without_drawing")
def test_generation_is_taken_up_again_and_never_mixed(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(pathfinder_generator, "IMAGES_PER_FILE", 10)

    def interrupt(count: int) -> None:
        if (tmp_path / "metadata" / "0.npy").is_file():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pathfinder_generator.write_images(tmp_path, EASY, 20, 1, interrupt)
    first = (tmp_path / "imgs/0/sample_0.png").stat().st_mtime_ns
    told: list[int] = []
    pathfinder_generator.write_images(tmp_path, EASY, 20, 1, told.append)
    assert sum(told) == 20
    assert (tmp_path / "imgs/0/sample_0.png").stat().st_mtime_ns == first
    with pytest.raises(DataError, match="other settings; set generated_dir"):
        pathfinder_generator.write_images(tmp_path, EASY, 30, 1, told.append)
    place = write_pathfinder(tmp_path / "release")
    with pytest.raises(DataError, match="is not empty and was not generated"):
        pathfinder_generator.write_images(place, EASY, 20, 1, told.append)


def test_targets_that_cannot_fit_are_an_error(monkeypatch) -> None:
    monkeypatch.setattr("datamodules.lra.pathfinder_generator._MOST_ATTEMPTS", 5)
    with pytest.raises(DataError, match="two contours of 90 paddles do not fit into 32 x 32"):
        draw_image(replace(GeneratorSettings.published(32, "hard", 0), contour_length=90), 0)
