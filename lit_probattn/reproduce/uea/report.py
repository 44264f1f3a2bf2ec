"""Tables of the benchmark: finished cells beside the published column, and the dry run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from lit_probattn.records.provenance import device_name
from lit_probattn.reproduce.uea.cells import Cell
from lit_probattn.reproduce.uea.predict import Prediction
from lit_probattn.reproduce.uea.recipes import Table

FLAG = "**selected on the test split**"


def summarise(results: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """Mean and standard deviation over seeds, by archive, variant and selection.

    The deviation is that of a sample (n − 1); it is missing for one seed.
    """
    frame = pd.DataFrame(results)
    keys = ["archive", "variant", "selected_on_test"]
    grouped = frame.groupby(keys, sort=False)
    accuracy = grouped["test_accuracy_percent"]
    table = pd.DataFrame(
        {
            "num_seeds": accuracy.count(),
            "mean_percent": accuracy.mean(),
            "std_percent": accuracy.std(ddof=1),
            "lowest_percent": accuracy.min(),
            "published_percent": grouped["published_percent"].first().astype(float),
            "fit_minutes": grouped["fit_minutes"].mean(),
            "any_resumed": grouped["resumed"].any(),
            "epochs": grouped["epochs"].first(),
            "selection": grouped["selection"].first(),
        }
    )
    return table.reset_index()


def result_lines(table: pd.DataFrame, benchmark: Table) -> list[str]:
    """The table as Markdown, with the mean over archives that are complete."""
    lines = [
        "| archive | variant | seeds | accuracy, %, mean ± std | lowest | published, % | "
        "minutes of a fit | epochs | checkpoint |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in table.to_dict("records"):
        flag = f"; {FLAG}" if row["selected_on_test"] else ""
        # A resumed fit counts from its last start: its minutes are not all of them.
        minutes = f"{'at least ' if row['any_resumed'] else ''}{row['fit_minutes']:.1f}"
        lines.append(
            f"| {row['archive']} | {row['variant']} | {row['num_seeds']} | "
            f"{_spread(row['mean_percent'], row['std_percent'])} | {row['lowest_percent']:.2f} | "
            f"{_number(row['published_percent'])} | {minutes} | {row['epochs']} | "
            f"{row['selection']}{flag} |"
        )
    return lines + _average_lines(table, benchmark)


def _average_lines(table: pd.DataFrame, benchmark: Table) -> list[str]:
    lines = []
    published = benchmark.content.get("published_average", {})
    own = set(benchmark.archives)
    for (variant, on_test), part in table.groupby(["variant", "selected_on_test"], sort=False):
        rows = part[part["archive"].isin(own)]
        if set(rows["archive"]) != own:
            continue
        column = benchmark.variants[variant].published if variant in benchmark.variants else None
        lines.append(
            f"| mean of {len(own)} | {variant} | | {rows['mean_percent'].mean():.2f} | | "
            f"{_number(published.get(column))} | | | {FLAG if on_test else 'held-out'} |"
        )
    return lines


def write_results(
    results: Sequence[dict[str, Any]], planned: int, benchmark: Table, out: Path, command: str
) -> str:
    """Write `rows.csv`, `table.csv` and `report.md`; return the table as Markdown."""
    out.mkdir(parents=True, exist_ok=True)
    flat = [
        {k: v for k, v in result.items() if not isinstance(v, dict)}
        | {f"sha256 {Path(k).stem[-5:].strip('_')}": v for k, v in _hashes(result)}
        for result in results
    ]
    pd.DataFrame(flat).to_csv(out / "rows.csv", index=False)
    table = summarise(results)
    table.to_csv(out / "table.csv", index=False)
    text = "\n".join(result_lines(table, benchmark))
    first = results[0]
    (out / "report.md").write_text(
        f"""# UEA: test accuracy beside table 6 of FiSH

Command: `{command}`
Machine: {first["device"]}; {first["versions"]}; revision {first["git_revision"]}. {len(results)} \
of {planned} cells are finished.

{text}

Published numbers come from checkpoints that were selected on the test split. Hashes of the \
archives' files, versions, commands and run folders are in `rows.csv`, one row per cell.
""",
        encoding="utf-8",
    )
    return text


def _hashes(result: dict[str, Any]) -> list[tuple[str, str]]:
    return list(result.get("archive_sha256", {}).items())


def dry_run_lines(
    plan: Sequence[tuple[Cell, Prediction, int]], unknown: dict[str, str]
) -> list[str]:
    """The plan as Markdown.

    Args:
        plan: for each archive and variant the first cell, its prediction, and how many of its seeds
            are to run.
        unknown: archives whose sizes are neither on disk nor published, and why.
    """
    lines = [
        "| archive | variant | protocol | length x dimensions | batch | steps | parameters | "
        "minutes per cell | peak memory, MiB | cells to run | files |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    total, known = 0.0, 0.0
    for cell, prediction, count in plan:
        sizes = cell.sizes
        total += count * prediction.minutes
        known += 0.0 if sizes.missing else count * prediction.minutes
        lines.append(
            f"| {cell.recipe.archive} | {cell.variant.name} | {cell.recipe.protocol} | "
            f"{sizes.max_seq_len} x {sizes.num_features} | {cell.batch_size} | {cell.max_steps} | "
            f"{prediction.num_parameters:,} | {prediction.minutes:.1f} | "
            f"{prediction.peak_bytes / 2**20:,.0f} | {count} | "
            f"{'missing' if sizes.missing else 'present'} |"
        )
    lines += [
        "",
        f"predicted: {total / 60:.1f} hours in all, {known / 60:.1f} with present files; on "
        f"{device_name('cpu')}, as busy as it is now",
    ]
    missing = {cell.recipe.archive: cell.sizes.missing for cell, _, _ in plan if cell.sizes.missing}
    for reason in {**missing, **unknown}.values():
        lines.append(f"missing: {reason}")
    return lines


def _spread(mean: float, std: float) -> str:
    return f"{mean:.2f}" if pd.isna(std) else f"{mean:.2f} ± {std:.2f}"


def _number(value: float | None) -> str:
    return "–" if value is None or pd.isna(value) else f"{value:.2f}"
