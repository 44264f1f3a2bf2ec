"""`lit-probattn report`: tables, figures and text of one sweep, as a folder or an HTML page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from lit_probattn.base.errors import ConfigError, nearest
from lit_probattn.experiments.expectations import Finding
from lit_probattn.experiments.page import Made, Page, as_csv, findings_table, image
from lit_probattn.measure.counters import CONVENTION
from lit_probattn.records.markdown import one_line
from lit_probattn.records.tables import markdown_lines, unequal_sides
from profiling.cost.exact import layer_of_row
from profiling.measure.rows import PLACE, SETTING, ProfileRow, read_rows, to_frame
from profiling.report.claims import judge
from profiling.report.figures import figures_of
from profiling.report.ratios import METRICS, crossovers, found_by, ratio_table, relative_errors
from profiling.report.tables import (
    crossover_table,
    dearer_lines,
    excesses,
    extremes_table,
    failures_table,
    published_table,
    quantity_tables,
    variants_of,
    variants_table,
)
from profiling.sweep.config import SweepConfig

_PROVENANCE = ["sweep", "device_name", "versions", "git_revision", "command"]
_READABLE = {
    *("model", "num_layers", "mlp_dim", "head_dim", "embed_dim", "seq_len", "batch_size"),
    *("mode", "backend", "dtype", "device", "grid_heads"),
}
_EXPECTED_BY = {"analytic": "closed form", "predicted": "prediction on fake tensors"}


def write_report(
    config: SweepConfig, results: Path, out: Path, *, html: bool = False, command: str = ""
) -> list[Path]:
    """Write the report of a sweep, optionally also as one HTML page; return the files.

    Args:
        config: the sweep.
        results: folder of its rows.
        out: folder of the report.
        html: also write the HTML page.
        command: the command that writes the report, printed after the command of the rows.

    Raises:
        ConfigError: no baseline row, or see `frame_of`.
    """
    return page_of(config, frame_of(config, results), command).write(out, html=html)


def page_of(
    config: SweepConfig, frame: pd.DataFrame, command: str = "", printed: Sequence[str] = ()
) -> Page:
    """Return the report of the rows of a sweep.

    Args:
        config: the sweep.
        frame: its rows, from `frame_of`.
        command: as in `write_report`.
        printed: lines with the published and the reproduced table, placed above the paper's
            claims; the caller adds the figures that they reference.

    Raises:
        ConfigError: no baseline row.
    """
    notes = require_baselines(config, frame)
    ratios = ratio_table(frame)
    table, constants = compact(frame)
    findings = [judge(one, config, frame) for one in config.sentences]
    figures = figures_of(config, frame, ratios, ratios_drawn=not printed)
    dearer = dearer_lines(frame, ratios)
    summary = [f"{one.claim}." for one in figures.values()][:1]
    if above := [variant for variant, _ in excesses(ratios)]:
        summary.append(f"Above the baseline in some cost: {', '.join(above)}.")
    before = [part for line in unequal_lines(frame) for part in (line, "")]
    before += [*(f"- {one_line(line)}" for line in dearer), ""] if dearer else []
    same = ", ".join(f"{k} {one_line(v)}" for k, v in constants.items() if k in _READABLE)
    body = [part for name in figures for part in (image(name), "")]
    body += [f"Same in every row: {same}.", ""] if same else []
    body += [*variants_table(frame), *printed, *_paper(config, findings, frame, ratios)]
    body += ["## Ratios", "", *extremes_table(ratios)]
    body += ["## Values", "", *quantity_tables(frame, ratios)]
    body += [*agreement(frame), *_terms(frame), *crossover_table(crossovers(ratios))]
    body += failures_table(frame, notes)
    tables = {"rows": as_csv(table)}
    if len(ratios):
        tables["ratios"] = as_csv(ratios.dropna(axis=1, how="all"), 8)
    return Page(
        kind="sweep",
        title=config.report.title if config.report else config.name,
        made=made_of(frame, command),
        finding=" ".join(summary),
        before=before,
        body=body,
        findings=findings,
        tables=tables,
        figures=figures,
        about={"sweep": config.name, "variants": variants_of(frame)},
    )


def made_of(frame: pd.DataFrame, command: str = "") -> Made:
    """Return the provenance of the rows of a sweep, with the command that measured them."""
    columns = {
        **{"command": "command", "machine": "device_name"},
        **{"versions": "versions", "revision": "git_revision"},
    }
    more = {
        "Data": "random tokens or features, which do not affect the cost",
        "Convention": CONVENTION,
    }
    return Made.of(frame, columns, reported_by=command, more=more)


def frame_of(config: SweepConfig, results: Path) -> pd.DataFrame:
    """Return the rows of a sweep, with the baselines of its file.

    The file may name others than during the measurement, which does not depend on them.

    Raises:
        ConfigError: no rows, rows of another sweep or of several versions, or two results at a
            place.
    """
    rows = load_results(results)
    for row in rows:
        if row.sweep != config.name:
            raise ConfigError(
                f"{results} has rows of the sweep {row.sweep!r}, expected {config.name!r}: set "
                "--config to the file of that sweep, or --results to the folder of this one"
            )
        if row.variant not in config.variants:
            raise ConfigError(
                f"{results} has rows of the variant {row.variant!r}, which is not in the sweep "
                f"{config.name!r}{nearest(row.variant, config.variants)}"
            )
    frame = to_frame(rows, list(config.variants))
    _require_one_version(frame)
    _require_one_result(frame)
    return frame.assign(baseline=frame["variant"].map(config.baseline_of))


def _paper(
    config: SweepConfig, findings: Sequence[Finding], frame: pd.DataFrame, ratios: pd.DataFrame
) -> list[str]:
    """Return the section that compares the paper's claims with the findings."""
    figure = config.report
    if figure is None or not (figure.paper or figure.published):
        return []
    judged = [*markdown_lines(findings_table(findings)), ""] if findings else []
    return [
        *("## Claims of the paper and findings", "", *judged),
        *(
            f"- Claim without a verdict: {one_line(one.says)}"
            for one in figure.paper
            if not one.holds
        ),
        *(f"- Note: {one_line(sentence)}" for sentence in figure.notes),
        *("", *published_table(figure.published, frame, ratios)),
    ]


def agreement(frame: pd.DataFrame) -> list[str]:
    """Return the section that compares found with expected values over all points."""
    errors = relative_errors(frame)
    parts = ["## Measured and expected values", ""]
    if errors.empty:
        return [*parts, "No value has a closed form or a prediction.", ""]
    rows = [
        {
            "quantity": METRICS[str(metric)][0],
            "found": found_by(str(metric), "measured"),
            "expected by": _EXPECTED_BY[str(source)],
            "values": len(group),
            "equal": int((group["error"] == 0.0).sum()),
            "largest relative difference": f"{group['error'].abs().max():.2e}",
        }
        for (metric, source), group in errors.groupby(["metric", "source"], sort=False)
    ]
    parts += [*markdown_lines(pd.DataFrame(rows)), ""]
    notes = sorted(frame["backend_note"].dropna().unique())
    if notes:
        parts += ["Operations of the backends, as counted in one layer:", ""]
        parts += [f"- {one_line(note)}" for note in notes[:12]]
        parts += [f"- … and {len(notes) - 12} more in rows.csv"] if len(notes) > 12 else []
        parts += [""]
    return parts


def _terms(frame: pd.DataFrame) -> list[str]:
    """Explain the difference between counted multiply-adds and the papers' operations."""
    analytic = (frame["source"] == "analytic") & (frame["scope"] == "attention")
    rows = frame[analytic & (frame["mode"] == frame["mode"].min())]
    rows = rows[rows["paper_operations"].notna()]
    parts: list[str] = []
    for variant in dict.fromkeys(rows["variant"]):
        row = rows[rows["variant"] == variant].iloc[-1].to_dict()
        layer = layer_of_row(row)
        terms = () if layer is None else layer.cost(int(row["seq_len"])).terms
        if not terms:
            continue
        place = f"D = {row['embed_dim']}, N = {row['seq_len']}"
        head = f"{one_line(variant)}, one layer, one sequence, {place}, {row['num_heads']} heads:"
        parts += [head, ""]
        lines = [
            {"term": f"**{t.text}**" if t.is_total else t.text, "operations": f"{t.operations:+,}"}
            for t in terms
        ]
        parts += [*markdown_lines(pd.DataFrame(lines)), ""]
    if not parts:
        return []
    return [
        *("## Counted multiply-adds and the paper's operations", ""),
        "The paper counts multiplications and additions of the layer without biases; counters "
        "count multiply-adds. Term by term:",
        "",
        *parts,
    ]


def load_results(folder: Path) -> list[ProfileRow]:
    """Return the rows of all shards in a folder, each point once, if possible with values.

    Raises:
        ConfigError: there are none, or two shards counted a point differently.
    """
    files = sorted(folder.glob("rows*.jsonl"))
    if not files:
        raise ConfigError(f"no results in {folder} (rows*.jsonl); run lit-probattn sweep first")
    points: dict[str, list[ProfileRow]] = {}
    for path in files:
        found: dict[str, list[ProfileRow]] = {}
        for row in read_rows(path):
            found.setdefault(row.point_id, []).append(row)
        for name, mine in found.items():
            first = points.setdefault(name, mine)
            if first is mine or not _has_values(mine):
                continue
            if not _has_values(first):
                points[name] = mine
            elif _counts(first) != _counts(mine):
                raise ConfigError(f"{path}: counts of the point {name} differ from {files[0]}")
    rows = [row for point in points.values() for row in point]
    if not rows:
        raise ConfigError(f"the sweep in {folder} is empty: no point is complete")
    return rows


def _has_values(point: Sequence[ProfileRow]) -> bool:
    return not any(row.status in ("failed", "skipped") for row in point)


def _counts(point: Sequence[ProfileRow]) -> list[tuple[int | None, int | None]]:
    counted = [row for row in point if row.quantity == "cost"]
    return [(row.macs, row.num_parameters) for row in counted]


def _require_one_version(frame: pd.DataFrame) -> None:
    """Raise a ConfigError for rows of several versions, whose ratios would be meaningless."""
    for column in ("versions", "git_revision"):
        found = sorted(frame[column].unique())
        if len(found) > 1:
            raise ConfigError(
                f"the sweep mixes {column}: {' | '.join(found)}; rerun it in a new folder"
            )


def _require_one_result(frame: pd.DataFrame) -> None:
    """Raise a ConfigError if a variant has two results at a place, with other arguments or sizes.

    One of them would be in the tables, and possibly the other one of its baseline.
    """
    keys = ["variant", "quantity", "source", *PLACE, *SETTING]
    twice = frame[(frame["status"] == "ok") & frame.duplicated([*keys, "status"])]
    if len(twice):
        row = twice.iloc[0]
        place = ", ".join(f"{name} {row[name]}" for name in PLACE if not pd.isna(row[name]))
        raise ConfigError(
            f"{row['variant']} has two results ({row['quantity']}, {place}), with other arguments "
            "or sizes: rerun the sweep in a new folder"
        )


def require_baselines(config: SweepConfig, frame: pd.DataFrame) -> list[str]:
    """Return notes on points without a ratio because their baseline has no values, or others.

    Raises:
        ConfigError: no baseline has values.
    """
    good = frame[frame["status"] == "ok"]
    measured = set(good["variant"])
    wanted = {v: b for v in config.variants if (b := config.baseline_of(v)) is not None}
    without = {v: b for v, b in wanted.items() if b not in measured}
    if wanted and len(without) == len(wanted):
        raise ConfigError(
            f"no baseline row: {', '.join(sorted(set(without.values())))} has no values in this "
            "sweep, so there are no ratios to report"
        )
    notes = [f"{v}: baseline {b} has no values" for v, b in without.items()]
    for variant, baseline in wanted.items():
        if count := _only_elsewhere(good, variant, baseline):
            notes.append(
                f"{variant}: no ratios at {count} points, where {baseline} has values only with "
                "another backend or on another device"
            )
    return notes


def _only_elsewhere(good: pd.DataFrame, variant: str, baseline: str) -> int:
    """Return the number of points at which a baseline has only another backend or device."""
    others = ["backend", "device_name"]
    at = ["quantity", *PLACE, *(c for c in SETTING if c not in (*others, "scope"))]
    own, base = (
        good.loc[good["variant"] == name, [*at, *others]].drop_duplicates()
        for name in (variant, baseline)
    )
    near, equal = own.merge(base[at].drop_duplicates(), on=at), own.merge(base, on=[*at, *others])
    return len(near) - len(equal)


def unequal_lines(frame: pd.DataFrame) -> list[str]:
    """Return notes on variants that differ from their baseline in dropout, backend or precision."""
    sides: dict[str, dict[str, object]] = {}
    for variant, part in frame[frame["status"] == "ok"].groupby("variant", sort=False):
        # The note of a count names the backend that ran; the grid may contain `auto`.
        ran = part["backend_note"].dropna().astype(str).str.split(":").str[0]
        sides[str(variant)] = {
            "attention dropout": json.loads(part["attention_args"].iloc[0]).get("dropout", 0.0),
            "backend": ", ".join(sorted(set(ran if len(ran) else part["backend"]))),
            "precision": ", ".join(sorted(part["dtype"].unique())),
        }
    named = frame.groupby("variant")["baseline"].first()
    baselines = {str(name): None if pd.isna(base) else base for name, base in named.items()}
    touches = "this affects time and memory (backends also counted operations), not parameters"
    return unequal_sides(sides, baselines, touches)


def compact(frame: pd.DataFrame) -> tuple[pd.DataFrame, dict[str, object]]:
    """Return the table without constant or empty columns, and the constant values.

    Of a single row, it has the name of the variant.
    """
    same = {c: frame[c].iloc[0] for c in frame if frame[c].nunique(dropna=False) == 1}
    dropped = [*same, "point_id", "row_index", "rows_in_point", "baseline"]
    dropped += ["attention_class", "attention_args"]  # in the table of variants
    kept = frame.drop(columns=[c for c in dict.fromkeys(dropped) if c in frame])
    if kept.columns.empty:
        kept = frame[["variant"]]
    constants = {k: v for k, v in same.items() if not pd.isna(v) and k not in _PROVENANCE}
    return kept, constants
