"""The stages around a tuned table: it is kept in the results, put in place, and named by rows."""

from __future__ import annotations

import json

import pytest

from lit_probattn.kernels import runtime
from lit_probattn.kernels.runtime import Launch, tuned_file, write_tuned
from profiling.kernels.speed import place_name
from profiling.stages import speed, tuned
from profiling.stages.place import Place
from profiling.stages.tuned import speed_tuned, tuned_page, tuning
from profiling.stages.units import Skipped


@pytest.fixture
def place(monkeypatch, tmp_path):
    """A GPU whose tables are in an empty folder, and whose measurements are fakes."""

    def rows(point, ceiling, green):
        return [{"place": place_name(point), "side": name} for name in point.sides]

    monkeypatch.setattr(speed, "measured_rows", rows)
    monkeypatch.setattr(runtime, "TUNED", tmp_path / "package")
    runtime.forget_tuned()
    (tmp_path / "out" / "tuning").mkdir(parents=True)
    yield Place(tmp_path / "out", "cuda", 90)
    runtime.forget_tuned()


def keep(place, **launches):
    """Store a table in the results, as another machine has left it."""
    entries = {name: vars(launch) for name, launch in launches.items()}
    kept = place.out / "tuning" / "sm_90.json"
    kept.write_text(json.dumps({"about": "a GPU", "launches": entries}))


def timing(place):
    """The unit of the first point, after those that compile."""
    return speed_tuned(place)[-1].units[0]


def test_it_times_our_kernels_and_what_gates_compare_them_with(place):
    compiling, parity, points = speed_tuned(place)
    assert len(parity.units) == 4 * len(tuned.tuned_cases())
    assert "parity: mgk soft, not causal, bfloat16, 128;" in " ".join(
        unit.key for unit in parity.units
    )
    assert [unit.key.split(", bfloat16")[0] for unit in points.units] == [
        f"N = 4096, head size {size}, batch 4" for size in (64, 64, 128, 128)
    ]
    assert sum("forward + backward" in unit.key for unit in points.units) == 2
    assert not any("causal" in unit.key for unit in points.units)
    sides = set(tuned._tuned_config(place).sides)
    assert {"softmax8_flash", "softmax8_reference", "mgk4_triton", "fish_2_of_8_triton"} <= sides
    assert {name for name in sides if not name.endswith("_triton")} == {
        "softmax8_flash",
        "softmax8_reference",
    }
    assert len(compiling.units) == 4 * (len(sides) - 2)


def test_without_a_table_it_is_skipped_until_there_is_one(place):
    before = timing(place)
    with pytest.raises(Skipped, match=r"there is no sm_90\.json, neither in the package nor"):
        before.work()
    row = {"unit": before.key, "status": "skipped", "reason": "there is no sm_90.json"}
    assert "Not measured: there is no sm_90.json." in tuned_page(place, [row])
    write_tuned(90, {"a": Launch(64, 32)}, "a GPU")
    first = timing(place)
    write_tuned(90, {"a": Launch(32, 32)}, "a GPU")
    assert len({before.key, first.key, timing(place).key}) == 3, "another table: measured again"
    assert "Not measured" not in tuned_page(place, [row])


def test_a_table_of_a_machine_that_is_gone_is_put_in_place(place):
    keep(place, a=Launch(64, 32))
    unit = timing(place)
    assert not tuned_file(90).exists()
    rows = unit.work()
    assert runtime._tuned(90) == {"a": Launch(64, 32)}
    assert timing(place).key == unit.key, "the same table under the same name"
    assert {row["tuned"] for row in rows} == {"sm_90.json"}
    keep(place, a=Launch(16, 16))
    unit.work()
    assert runtime._tuned(90) == {"a": Launch(64, 32)}, "the package's own table stays"


def test_ratios_with_a_table_need_kernels_that_are_right_with_it(place, monkeypatch):
    monkeypatch.setattr(tuned, "checked", lambda place: "passed: all of the others")
    write_tuned(90, {"a": Launch(64, 32)}, "a GPU")
    _, parity, points = speed_tuned(place)
    ratio = {"time_ratio": 0.5, "time_ratio_p20": 0.4, "time_ratio_p80": 0.6, "memory_ratio": 1.0}
    compared = {"comparison": "MGK / own", "timed": "graph", "required": "", "holds": None}
    rows = [{"unit": points.units[0].key, "place": "N = 4096", **ratio, **compared}]
    rows += [{"unit": unit.key, "status": "ok"} for unit in parity.units]
    rows = [{"status": "ok", **row} for row in rows]
    page = tuned_page(place, rows)
    assert "0.500 (0.400 – 0.600)" in page
    assert "passed: all of the others" in page
    for bad in ([*rows[:-1], {**rows[-1], "status": "failed"}], rows[:-1]):
        page = tuned_page(place, bad)
        assert "0.500" not in page
        assert "FAILED: " in page


def test_rows_of_other_stages_say_that_they_have_no_table(place):
    point = speed.gate_points(speed.gate_config(place), place)[0]
    assert {row["tuned"] for row in speed.point_unit(point, place).work()} == {None}


def test_tuning_goes_on_with_the_table_that_the_results_kept(place, monkeypatch):
    def tune(head_dims, dtypes, cases):
        return str(write_tuned(90, {"b": Launch(32, 32)}, "a GPU")), [{"kernel": "b"}]

    monkeypatch.setattr(tuned, "tune", tune)
    keep(place, a=Launch(64, 32))
    assert tuning(place)[1].units[0].work() == [{"kernel": "b"}]
    kept = json.loads((place.out / "tuning" / "sm_90.json").read_text())["launches"]
    assert set(kept) == {"a", "b"}


def test_a_rehearsal_needs_no_table(place, tmp_path):
    write_tuned(90, {"a": Launch(64, 32)}, "a GPU")
    unit = timing(Place(tmp_path / "out", "cpu"))
    with pytest.raises(Skipped, match="the interpreter takes no configurations"):
        unit.work()
