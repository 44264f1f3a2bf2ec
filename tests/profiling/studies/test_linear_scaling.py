"""The scaling command: its exponent, its rows, its refusals."""

from __future__ import annotations

import csv

import pytest

from profiling.studies.linear_scaling import LENGTHS, fitted_exponent, main


def test_exponent_of_a_power_law():
    assert abs(fitted_exponent(LENGTHS, [3.0 * n**1.7 for n in LENGTHS]) - 1.7) < 1e-12
    with pytest.raises(ValueError, match="two lengths and positive values"):
        fitted_exponent([8], [1.0])
    with pytest.raises(ValueError, match="two lengths and positive values"):
        fitted_exponent([8, 16], [1.0, 0.0])


@pytest.mark.parametrize("mode", ["forward", "forward_backward"])
def test_command_measures_every_side_at_every_length(tmp_path, capsys, mode):
    out = tmp_path / "rows.csv"
    command = ["--lengths", "32", "64", "--repeats", "1", "--mode", mode, "--output", str(out)]
    assert main(command) == 0
    printed = capsys.readouterr().out
    with out.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert {(row["side"], row["seq_len"]) for row in rows} == {
        (side, length)
        for side in ("softmax (fused)", "linear", "mlk", "smlk")
        for length in ("32", "64")
    }
    assert all(float(row["median_s"]) > 0 and int(row["peak_memory_bytes"]) > 0 for row in rows)
    assert printed.count("exponent of time") == 4


def test_bad_numbers_are_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--repeats", "0"])
    assert "--lengths and --repeats must be at least 1" in capsys.readouterr().err
