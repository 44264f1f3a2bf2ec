"""The command line: whole flags only, one readable line for every error, every shipped file."""

from __future__ import annotations

import pytest
import yaml

from lit_probattn.base.config_files import comment_of
from lit_probattn.configs import read_yaml
from lit_probattn.experiments.page import read
from profiling.cli import main
from profiling.kernels.config import load_kernels
from profiling.measure.rows import read_rows
from profiling.sweep.config import load_sweep
from profiling.sweep.plan import make_plan
from tests.profiling.helpers import attention, sweep
from tests.support.helpers import error_of
from tests.support.paths import ROOT, shipped

CONFIGS = shipped("measurement")
SWEEPS = [path for path in CONFIGS if "sides" not in read_yaml(path)]
KERNELS = [path for path in CONFIGS if "sides" in read_yaml(path)]


@pytest.mark.parametrize("path", SWEEPS, ids=lambda p: p.stem)
def test_shipped_sweeps_make_a_plan(path):
    config = load_sweep(path)
    points = make_plan(config, ROOT)
    assert points
    assert all(point.problem is None for point in points)
    assert len({point.point_id for point in points}) == len(points)
    assert config.name == path.stem
    assert f"--config configs/profiling/{path.name}" in " ".join(comment_of(path))


@pytest.mark.parametrize("path", KERNELS, ids=lambda p: p.stem)
def test_shipped_kernel_files_parse(path):
    config = load_kernels(path)
    assert config.comparisons
    assert all((ROOT / t.split("::")[0]).exists() for t in config.parity_tests)


def run(capsys, *arguments):
    status = main(arguments)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("sweep", "--conf", "x.yaml"),
        ("sweep", "--config", "x.yaml", "--dry"),
        ("report", "--config", "x.yaml", "--htm"),
        ("swee", "--config", "x.yaml"),
        (),
    ],
)
def test_flags_are_never_matched_by_prefix(arguments):
    error_of(arguments, main)


PUBLISHED = {"what": "w", "value": 1, "source": "s", "metric": "macs", "variant": "mgk"}


def published(change):
    return lambda c: c.update(report={"title": "t", "published": [PUBLISHED | change]})


OF_MODELS = {"num_layers": 2, "mlp_dim": 8, "mlp_ratio": 2.0, "vocab_size": 9, "num_classes": 2}
OF_MODELS |= {"dropout": 0.1, "include_output_layer": False}


def broken(tmp_path, change):
    content = sweep().model_dump(mode="json", exclude_none=True)
    change(content)
    path = tmp_path / "broken.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda c: c.update(measur=["cost"]), "did you mean 'measure'"),
        (lambda c: c["grid"].update(embed_dim=["wide"]), "grid.embed_dim.0"),
        (lambda c: c.update(baseline="nobody"), "'nobody' is not among the variants"),
        (lambda c: c["model"].pop("head_dim"), "needs head_dim"),
        (lambda c: c["model"].update(head_dim_divisor=2), "not both"),
        (lambda c: c["variants"]["mgk"].update(attention={"config": "no.yaml"}), "no.yaml"),
        (lambda c: c.update(measure=["flops"]), "measure.0"),
        (lambda c: c.update(name="../../up"), "name: "),
        (lambda c: c["grid"].update(seq_len=[0]), "grid.seq_len.0"),
        (lambda c: c["variants"].update(a=attention("nowhere.X")), "variants.a: unknown class"),
        (published({"metric": "mac"}), "unknown column 'mac'; did you mean 'macs'"),
        (
            published({"where": {"seq_lens": 8}}),
            "'seq_lens'; did you mean 'seq_len'",
        ),
        (published({"where": {"num_heads": 8}, "is_ratio": True}), "unknown column 'num_heads'"),
        (published({"variant": "mgkk"}), "'mgkk'"),
        (published({"value": 0}), "must not be 0"),
        (published({"scale": 0}), "must not be 0"),
        *((lambda c, d=d: c.update(device=d), "device: ") for d in ("gpu", "cuda:", "mps", "meta")),
        *(
            (lambda c, n=n, v=v: c["model"].update({n: v}), f"{n}: no effect with kind attention")
            for n, v in OF_MODELS.items()
        ),
        (lambda c: c["model"].update(kind="classifier", is_causal=True), "is_causal: no effect"),
        (lambda c: c["model"].update(kind="language_model", num_classes=2), "num_classes: no eff"),
    ],
)
def test_wrong_files_are_one_line(tmp_path, change, expected):
    path = broken(tmp_path, change)
    words = ["sweep", "--config", str(path), "--out", str(tmp_path / "out")]
    assert expected in error_of(words, main)


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [(BrokenPipeError(), 141, ""), (OSError(28, "No space left"), 2, "error: no space left\n")],
)
def test_output_that_cannot_be_written_is_a_status(error, status, told, capsys, monkeypatch):
    """Also of a command without --out."""

    def fails(_):
        raise error

    monkeypatch.setattr("profiling.cli._kernels", fails)
    monkeypatch.setattr("profiling.cli.leave_closed_output", lambda: 141)
    assert run(capsys, "kernels", "--model") == (status, "", told)


def test_a_sweep_whose_points_all_fail_says_why_and_fails(capsys, tmp_path):
    path = broken(tmp_path, lambda c: c.update(variants={"softmax": attention(nonsense=1)}))
    status, out, err = run(capsys, "sweep", "--config", str(path), "--out", str(tmp_path / "out"))
    assert status == 1
    assert "4 failed" in out
    assert "'nonsense' is not accepted" in err


@pytest.mark.parametrize("text", ["", "- a\n", "a: [", None])
def test_unreadable_files_are_one_line(tmp_path, text):
    path = tmp_path / "file.yaml"
    if text is not None:
        path.write_text(text)
    error_of(["sweep", "--config", str(path)], main)


@pytest.mark.usefixtures("sketches")
def test_sweep_and_report_by_command(capsys, tmp_path):
    path, grid = tmp_path / "small.yaml", {"embed_dim": [8], "seq_len": [8, 16]}
    path.write_text(yaml.safe_dump(sweep(grid=grid).model_dump(mode="json", exclude_none=True)))
    dry = run(capsys, "sweep", "--config", str(path), "--dry-run")
    assert "4 points" in dry[1]
    assert not list(tmp_path.glob("results*"))
    results, out = str(tmp_path / "results"), str(tmp_path / "out")
    status, text, _ = run(capsys, "sweep", "--config", str(path), "--out", results)
    assert status == 0
    assert "4 ok" in text
    status, text, _ = run(
        capsys, "report", "--config", str(path), "--results", results, "--out", out
    )
    assert status == 0
    assert (tmp_path / "out/report.md").exists()
    nowhere = str(tmp_path / "nowhere")
    words = ["report", "--config", str(path), "--results", nowhere, "--out", nowhere]
    assert "no results in" in error_of(words, main)


@pytest.mark.usefixtures("uncounted")
def test_torchrun_ranks_share_the_points(capsys, tmp_path, monkeypatch):
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(sweep().model_dump(mode="json", exclude_none=True)))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    status, text, _ = run(capsys, "sweep", "--config", str(path), "--out", str(tmp_path / "o"))
    assert status == 0
    assert "4 ok" in text
    assert len({row.point_id for row in read_rows(tmp_path / "o/rows.jsonl")}) == 4


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (
            ("--model", "--seq-lens", "64"),
            "--seq-lens has no effect with --model, only with --config",
        ),
        (("--model", "--head-dims", "32,0"), "argument --head-dims: "),
        (("--config", "kernels_cpu", "--seq-lens", "0"), "argument --seq-lens: "),
        (("--config", "kernels_cpu", "--threads", "-1"), "argument --threads: "),
        (("--parity", "--threads", "1"), "--threads has no effect with --parity"),
        (("--config", "a.yaml", "--device", "cuda"), "--device has no effect with --config, only"),
        (("--train-steps", "1", "--cases", "mgk"), "--cases has no effect with --train-steps"),
        (
            ("--compile-table", "--dtypes", "float32,float16"),
            "--compile-table requires exactly",
        ),
    ],
)
def test_flags_of_other_kinds_of_runs_are_refused(flags, expected):
    assert error_of(["kernels", *flags], main).startswith(f"error: {expected}")


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_threads", [0]), ("seq_lens", [0]), ("head_dims", [-1]), ("device", "gpu")],
)
def test_wrong_files_of_kernels_are_one_line(capsys, tmp_path, name, value):
    content = read_yaml(next(path for path in KERNELS if path.stem == "kernels_cpu"))
    (content if name == "device" else content["grid"][0])[name] = value
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(content))
    status, _, err = run(capsys, "kernels", "--config", str(path))
    assert status == 2
    assert name in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("text", ["{", "", "[]"])
def test_a_results_folder_with_a_corrupt_sweep_is_one_line(capsys, tmp_path, text):
    path = broken(tmp_path, lambda _: None)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/sweep.json").write_text(text)
    status, _, err = run(capsys, "sweep", "--config", str(path), "--out", str(tmp_path / "out"))
    assert status == 2
    assert "sweep.json" in err
    assert err.count("\n") == 1


def test_commands_of_committed_reports_read_results():
    """A report folder has no rows that `report` reads."""
    paths = [*(ROOT / "reports").rglob("report.json"), *(ROOT / "reports").rglob("report.md")]
    assert not [path for path in paths if "--results reports/" in path.read_text(encoding="utf-8")]


@pytest.mark.slow
def test_a_committed_sweep_and_its_report_are_made_again(tmp_path, monkeypatch, capsys):
    """Every count, ratio and verdict is the same."""
    monkeypatch.chdir(ROOT)
    rows, report, committed = tmp_path / "rows", tmp_path / "report", ROOT / "reports/mgk_figure4"
    assert main(["sweep", "--config", "mgk_figure4", "--out", str(rows)]) == 0
    words = ["--results", str(rows), "--out", str(report)]
    assert main(["report", "--config", "mgk_figure4", *words]) == 0
    for name in ("rows.csv", "ratios.csv"):
        assert (report / name).read_bytes() == (committed / name).read_bytes()
    found, known = (read(folder) for folder in (report, committed))
    assert {**found, "made": {}} == {**known, "made": {}}
