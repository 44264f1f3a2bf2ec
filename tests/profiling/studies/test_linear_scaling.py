"""The scaling command: its exponent, its rows, its refusals."""

from __future__ import annotations

import csv

import pytest

from profiling.studies import study
from profiling.studies.linear_scaling import LENGTHS, fitted_exponent, main

SOFTMAX = ("softmax (fused)",)


def test_exponent_of_a_power_law():
    assert abs(fitted_exponent(LENGTHS, [3.0 * n**1.7 for n in LENGTHS]) - 1.7) < 1e-12
    with pytest.raises(ValueError, match="two lengths and positive values"):
        fitted_exponent([8], [1.0])
    with pytest.raises(ValueError, match="two lengths and positive values"):
        fitted_exponent([8, 16], [1.0, 0.0])


@pytest.mark.parametrize("mode", ["forward", "forward_backward"])
def test_command_measures_every_side_at_every_length(tmp_path, capsys, monkeypatch, mode):
    """Softmax takes N² and the others 3N nanoseconds: ratios and exponents follow."""

    def time_sides(sides, **limits):
        for run in sides.values():
            run()
        return {(name, n): [1e-9 * (n**2 if name in SOFTMAX else 3 * n)] for name, n in sides}

    monkeypatch.setattr(study, "time_sides", time_sides)
    command = ["--lengths", "32", "64", "--repeats", "1", "--mode", mode, "--out", str(tmp_path)]
    assert main(command) == 0
    printed = capsys.readouterr().out
    with (tmp_path / "rows.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert {(row["side"], row["seq_len"]) for row in rows} == {
        (side, length)
        for side in ("softmax (fused)", "linear", "mlk", "smlk")
        for length in ("32", "64")
    }
    assert all(int(row["peak_memory_bytes"]) > 0 for row in rows)
    for row in rows:
        expected = 1.0 if row["side"] in SOFTMAX else 3 / int(row["seq_len"])
        assert float(row["time_over_softmax"]) == pytest.approx(expected)
    exponents = printed.split("Exponent of time and of memory over the length:")[1]
    lines = [line.split(" | ")[:2] for line in exponents.splitlines() if line.startswith("| ")][2:]
    slopes = {side.removeprefix("| "): float(slope) for side, slope in lines}
    assert slopes == {"softmax (fused)": 2.0, "linear": 1.0, "mlk": 1.0, "smlk": 1.0}


def test_bad_numbers_are_refused(capsys):
    for words in (["--repeats", "0"], ["--lengths", "8", "0"]):
        with pytest.raises(SystemExit):
            main(words)
        assert f"argument {words[0]}: expected at least 1, received 0" in capsys.readouterr().err
