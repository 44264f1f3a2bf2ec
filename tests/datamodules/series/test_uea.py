"""UEA archives: names, places, splits, normalisation, batches, hashes."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch

from datamodules import UEA
from datamodules.__main__ import main
from datamodules.core.order import FILL
from datamodules.series.archive import ARCHIVES
from datamodules.series.samples import Normalizer, fill_missing
from lit_probattn.base.errors import DataError, MissingDataError
from tests.support.helpers import error_of

pytest.importorskip("aeon")

LENGTHS = {"TRAIN": [3, 5, 1, 4, 2, 5, 3, 4, 2, 1], "TEST": [4, 1, 7]}


def text_of(part: str, missing: bool = False, labels: str = "ab") -> str:
    """Series of different lengths; value = 100 series + 10 dimension + step, classes in turn."""
    lines = [f"@missing {str(missing).lower()}", "@univariate false", "@dimensions 3"]
    lines += ["@equalLength false", f"@classLabel true {' '.join(labels)}", "@data"]
    for row, length in enumerate(LENGTHS[part]):
        dims = [[str(100 * row + 10 * d + t) for t in range(length)] for d in range(3)]
        if missing and length > 2:
            dims[1][1] = "?"
        lines.append(":".join([*(",".join(values) for values in dims), labels[row % 2]]))
    return "\n".join(lines) + "\n"


def write(folder: Path, name: str = "Libras", **options) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for part in LENGTHS:
        (folder / f"{name}_{part}.ts").write_text(text_of(part, **options))
    return folder


def made(tmp_path: Path, **options) -> UEA:
    data = UEA("Libras", data_dir=str(tmp_path), **{"batch_size": 2, **options})
    data.setup()
    return data


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    write(tmp_path / "Libras")
    return tmp_path


# ---- names and places ---------------------------------------------------------------------------


def test_collection_has_thirty_names_of_which_aeon_knows_all():
    datasets = pytest.importorskip("aeon.datasets.tsc_datasets")
    if hasattr(datasets, "UEA"):  # aeon 1.4
        assert set(ARCHIVES) == set(datasets.UEA)
    assert len(ARCHIVES) == 30
    assert set(ARCHIVES) <= set(datasets.multivariate)


@pytest.mark.parametrize("num_features", [1, 2])
def test_files_of_ones_own_are_read_under_their_name(tmp_path, num_features):
    kind = "@univariate true" if num_features == 1 else "@univariate false\n@dimensions 2"
    head = f"@missing false\n{kind}\n@equalLength true\n@seriesLength 3\n@classLabel true a b\n"
    for part, count in (("TRAIN", 6), ("TEST", 4)):
        rows = [
            ":".join([*[f"{row},{row + d},2" for d in range(num_features)], "ab"[row % 2]])
            for row in range(count)
        ]
        (tmp_path / f"Mine_{part}.ts").write_text(head + "@data\n" + "\n".join(rows) + "\n")
    data = UEA("Mine", data_dir=str(tmp_path), normalization="none", batch_size=2)
    assert (data.num_features, data.num_classes, data.max_seq_len) == (num_features, 2, 3)
    data.setup()
    assert data.published == {}
    expected = np.array([[3] * num_features, [3 + d for d in range(num_features)]])
    np.testing.assert_array_equal(data.split("test")[3].values[:2], expected)
    for part in ("TRAIN", "TEST"):
        (tmp_path / f"Mine_{part}.ts").unlink()
    again = UEA("Mine", data_dir=str(tmp_path), normalization="none", batch_size=2)
    assert again.num_classes == 2  # from the cache


def test_a_missing_file_is_named(tmp_path):
    for name in ("Heartbeat", "Mine[1]"):
        place = tmp_path / name
        place.mkdir()
        (place / f"{name}_TRAIN.ts").write_text("x")
        with pytest.raises(MissingDataError) as caught:
            UEA(name, data_dir=str(tmp_path)).setup()
        assert str(caught.value).endswith(f"but missing {place}/{name}_TEST.ts")
    with pytest.raises(MissingDataError, match=r"JapaneseVowels_TRAIN\.ts.* source to bundled"):
        UEA("JapaneseVowels", data_dir=str(tmp_path)).setup()


@pytest.mark.parametrize("folder", ["Libras", ".", "UEA/Libras", "Multivariate_ts/Libras"])
def test_files_are_found_in_the_usual_places(tmp_path, folder):
    write(tmp_path / folder)
    assert len(made(tmp_path).split("test")) == 3


def test_bundled_archive_has_its_published_size(tmp_path, capsys):
    options = ["uea", "--name", "BasicMotions", "--source", "bundled", "--data_dir", str(tmp_path)]
    line = error_of(["check", *options], main, 1)
    assert "prepare uea --name BasicMotions --source bundled" in line
    assert main(["prepare", *options]) == 0
    assert main(["check", *options]) == 0
    printed = capsys.readouterr().out
    assert "published train+val: 40; here 40: equal" in printed
    assert "0 = Standing, 1 = Running, 2 = Walking, 3 = Badminton" in printed
    with pytest.raises(MissingDataError, match="aeon does not include Heartbeat"):
        UEA("Heartbeat", source="bundled", data_dir=str(tmp_path)).setup()


# ---- sizes, splits ------------------------------------------------------------------------------


def test_sizes_are_known_before_setup(archive):
    data = UEA("Libras", data_dir=str(archive))
    assert (data.vocab_size, data.num_features, data.num_classes) == (None, 3, 2)
    assert data.max_seq_len == 5  # the longest training series; a test series has 7
    assert data.classes == ["a", "b"]


def test_validation_is_a_stratified_part_of_the_training_file(archive):
    data = made(archive, val_fraction=0.4)
    assert not data.select_on_test
    counts = {name: np.bincount(data.split(name).targets) for name in ("train", "val", "test")}
    assert counts["train"].tolist() == [3, 3]
    assert counts["val"].tolist() == [2, 2]
    first = [data.split(name).series(i)[0, 0] for name in ("train", "val") for i in range(4)]
    assert len(set(first)) == 8  # the first value names the series: none is in both
    assert max(first) >= 100

    def chosen(**options):
        split = made(archive, val_fraction=0.4, **options).split("val")
        return [float(split.series(i)[0, 0]) for i in range(len(split))]

    assert chosen() == chosen(seed=5, batch_size=1)
    assert any(chosen() != chosen(split_seed=seed) for seed in range(5))


def test_select_on_test_is_flagged_and_trains_on_the_whole_file(archive):
    data = made(archive, select_on="test")
    assert data.select_on_test
    assert [len(data.split(name)) for name in ("train", "val", "test")] == [10, 3, 3]
    assert data.provenance["select_on"] == "test"
    assert data.provenance["split_seed"] is None


def test_classes_of_one_series_name_the_archive_and_the_remedy(archive):
    path = archive / "Libras" / "Libras_TRAIN.ts"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:8]))  # a series per class
    with pytest.raises(DataError, match=r"^Libras: .*; add samples, or set select_on=test$"):
        made(archive)
    assert len(made(archive, select_on="test").split("train")) == 2


def test_provenance_holds_the_hashes_of_the_files(archive):
    provenance = made(archive).provenance
    for part in LENGTHS:
        content = (archive / "Libras" / f"Libras_{part}.ts").read_bytes()
        found = provenance["archive_sha256"][f"Libras_{part}.ts"]
        assert found == hashlib.sha256(content).hexdigest()
    assert provenance["archive_version"] == "unknown"
    assert provenance["split_seed"] == 1337


def test_class_without_series_is_left_out_and_told(archive):
    for part in LENGTHS:
        path = archive / "Libras" / f"Libras_{part}.ts"
        path.write_text(text_of(part).replace("true a b", "true z a b"))
    data = made(archive)
    assert data.classes == ["a", "b"]
    assert any("classes without series: z" in note for note in data.notes)


# ---- values -------------------------------------------------------------------------------------


def test_batches_are_padded_with_zeros_and_masked(archive):
    data = made(archive, pad_multiple=2, normalization="none", select_on="test")
    samples = [data.split("test")[i] for i in (0, 1, FILL)]
    batch = data.collate()(samples)
    assert batch["inputs"].shape == (3, 4, 3)
    assert batch["inputs"].dtype == torch.float32
    assert batch["key_mask"].tolist() == [[True] * 4, [True, False, False, False], [True] * 4]
    assert batch["sample_ids"].tolist() == [0, 1, FILL]
    assert batch["target"].tolist() == [0, 1, 0]
    np.testing.assert_array_equal(batch["inputs"][1], [[100, 110, 120], *[[0, 0, 0]] * 3])
    cut = data.collate()([data.split("test")[2]])
    assert cut["inputs"].shape == (1, 5, 3)  # 7 steps, of which the model takes 5
    assert data.split("test").num_cut == 1


def test_standardisation_uses_the_series_that_train_and_no_others(archive):
    data = made(archive)
    train = [data.split("train").series(i).astype(np.float64) for i in range(8)]
    steps = np.concatenate(train)
    mean, std = steps.mean(0), steps.std(0, ddof=1)
    expected = (data.split("test").series(0) - mean) / std
    np.testing.assert_allclose(data.split("test")[0].values, expected, rtol=1e-5)
    done = np.concatenate([data.split("train")[i].values for i in range(8)])
    np.testing.assert_allclose(done.mean(0), 0, atol=1e-6)
    np.testing.assert_allclose(done.std(0, ddof=1), 1, rtol=1e-6)


def test_a_series_is_normalised_whole_and_then_cut_off(archive):
    """7 steps, of which the model takes 5: mean and deviation are those of 7."""
    split = made(archive, normalization="per_sample_std", select_on="test").split("test")
    whole = split.series(2).astype(np.float64)
    assert whole.shape == (7, 3)
    expected = (whole - whole.mean(0)) / whole.std(0, ddof=1)
    np.testing.assert_allclose(split[2].values, expected[:5], rtol=1e-5)


def test_other_normalisations_by_their_formulas():
    series = [np.float32([[1, 7], [3, 7], [8, 7]]), np.float32([[5, 7]])]
    minmax = Normalizer.fit("minmax", lambda: series)
    np.testing.assert_allclose(minmax(series[0]), [[0, 0], [2 / 7, 0], [1, 0]], rtol=1e-6)
    own = Normalizer.fit("per_sample_minmax", lambda: series)
    np.testing.assert_allclose(own(series[0]), [[0, 0], [2 / 7, 0], [1, 0]], rtol=1e-6)
    std = Normalizer.fit("per_sample_std", lambda: series)
    spread = np.sqrt((9 + 1 + 16) / 2)
    np.testing.assert_allclose(std(series[0])[:, 0], np.array([-3, -1, 4]) / spread, rtol=1e-6)
    for kind in (own, std):  # one step: nothing to scale by
        np.testing.assert_array_equal(kind(series[1]), [[0, 0]])


def test_missing_values_are_interpolated_within_the_series():
    nan = np.nan
    series = np.float32([[nan, 1], [2, nan], [nan, nan], [8, 4], [nan, nan]])
    expected = [[2, 1], [2, 2], [5, 3], [8, 4], [8, 4]]
    np.testing.assert_allclose(fill_missing(series), expected)


def test_declared_missing_values_reach_no_batch(tmp_path):
    write(tmp_path / "Libras", missing=True)
    data = made(tmp_path, normalization="none")
    values = np.concatenate([data.split("train").series(i) for i in range(8)])
    assert np.isfinite(values).all()
    assert data.split("test").series(0)[1, 1] == 11.0  # between 10 and 12
    assert any("8 missing values, interpolated" in note for note in data.notes)


def _mine(folder: Path, name: str, classes: str = "a b", present: str = "ab") -> UEA:
    (folder / name).mkdir()
    head = f"@univariate true\n@classLabel true {classes}\n@data\n"
    rows = [f"{i},{i + 1}:{present[i % len(present)]}\n" for i in range(20)]
    for part in ("TRAIN", "TEST"):
        (folder / name / f"{name}_{part}.ts").write_text(head + "".join(rows))
    made = UEA(name, data_dir=str(folder), batch_size=4)
    made.setup()
    return made


def test_a_checkpoint_rejects_another_order_of_classes(tmp_path):
    state = _mine(tmp_path, "One").state_dict()
    with pytest.raises(DataError, match="class 0 was a and is now b"):
        _mine(tmp_path, "Two", "b a").load_state_dict(state)


def test_one_class_cannot_be_learned(tmp_path):
    with pytest.raises(DataError, match="only one class, 'a'"):
        _mine(tmp_path, "One", present="a")


def test_a_fraction_without_effect_is_reported(tmp_path):
    _mine(tmp_path, "One")
    with pytest.warns(UserWarning, match="val_fraction=0.5 has no effect with select_on=test"):
        UEA("One", data_dir=str(tmp_path), select_on="test", val_fraction=0.5)


def test_a_version_that_is_added_or_changed_is_read(tmp_path):
    assert _mine(tmp_path, "One").provenance["archive_version"] == "unknown"
    for version in ("2018", "2020"):
        (tmp_path / "One" / "VERSION").write_text(version)
        made = UEA("One", data_dir=str(tmp_path), batch_size=4)
        assert made.provenance["archive_version"] == version
