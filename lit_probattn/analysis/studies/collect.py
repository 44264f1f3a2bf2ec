"""One report of a folder of studies: training commands, a table of results, links to the studies.

Reads the reports `FOLDER/MODEL/STUDY` and writes `FOLDER/report.md` and `FOLDER/summary.csv`. The
training commands are read from versions.json of --runs.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pandas as pd

from lit_probattn.analysis.study import Study
from lit_probattn.base.errors import ConfigError
from lit_probattn.base.provenance import shown_command
from lit_probattn.experiments.page import TEXT, Made, Page, as_csv, refuse_foreign_files
from lit_probattn.records.markdown import code_span, escaped
from lit_probattn.records.tables import markdown_lines
from lit_probattn.training.run_record import read_starts

_SUMMARY = (
    "Distance: mean over pairs of heads (Frobenius). Components: eigenvalues for 95 % of the "
    "sum, and number of maps. Rank: relative to the number of positions. NLL: kernel, in nats. "
    "Values of models with different tasks, heads or lengths are not comparable."
)


class Report(Study):
    """Comparison of all studies of a folder; the only study that writes to that folder."""

    name = "report"

    @staticmethod
    def _add_options(parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add(
            "--folder", type=Path, required=True, help="folder with one folder of results per model"
        )
        add(
            "--runs", type=Path, nargs="*", default=[], help="run folders for the training commands"
        )

    @classmethod
    def run(cls, options: argparse.Namespace) -> None:
        """Collect the studies and write the report."""
        texts = sorted(options.folder.glob(f"*/*/{TEXT}"))
        if not texts:
            raise ConfigError(
                f"no results in {options.folder}: expected MODEL/STUDY/{TEXT} below it"
            )
        refuse_foreign_files(options.folder, "summary", flag="--folder")
        summary = pd.DataFrame(summary_rows(options.folder))
        body: list[str] = []
        if options.runs:
            body += ["## Models", "", *(training_line(path) for path in options.runs), ""]
        if not summary.empty:
            body += ["## Comparison", "", _SUMMARY, "", *markdown_lines(summary), ""]
        body += ["## Studies", "", *map(link, texts)]
        Page(
            kind="studies",
            title="Studies of trained models",
            made=Made.here(options.command),
            finding="",
            body=body,
            tables={} if summary.empty else {"summary": as_csv(summary)},
        ).write(options.folder)
        print(f"report: {options.folder / TEXT} ({len(texts)} studies)")


def training_line(folder: Path) -> str:
    """Return the training command of a run, with absolute paths reduced to their last part.

    Raises:
        ConfigError: the folder has no versions.json.
    """
    starts = read_starts(folder)
    if not starts:
        raise ConfigError(f"no versions.json in {folder}: expected a run folder")
    command = shown_command(shlex.split(starts[-1]["command"]))
    revision = (starts[-1].get("git") or {}).get("revision", "unknown")[:7]
    return f"- {escaped(folder.parent.name)}: {code_span(command)} (revision {escaped(revision)})"


def summary_rows(folder: Path) -> Iterator[dict[str, Any]]:
    """Return the results of the existing studies per model and layer."""
    for model in sorted(path for path in folder.iterdir() if path.is_dir()):
        tables = {
            name: pd.read_csv(path)
            for name in ("head_distance_layers", "spectrum_layers", "rank", "query_likelihood")
            for path in model.glob(f"*/{name}.csv")
        }
        layers = sorted({layer for table in tables.values() for layer in table["layer"]})
        for layer in layers:
            parts = {n: t[t["layer"] == layer] for n, t in tables.items()}
            yield {"model": model.name, "layer": layer, **_numbers(parts)}


def _numbers(parts: dict[str, pd.DataFrame]) -> dict[str, Any]:
    columns = {
        "distance": ("head_distance_layers", "mean"),
        "distance variance": ("head_distance_layers", "variance"),
        "components": ("spectrum_layers", "components"),
        "maps": ("spectrum_layers", "maps"),
        "relative rank": ("rank", "relative_rank"),
        "NLL": ("query_likelihood", "kernel_nll"),
    }
    found: dict[str, Any] = {}
    for name, (table, column) in columns.items():
        part = parts.get(table)
        value = float("nan") if part is None or part.empty else float(part[column].mean())
        found[name] = round(value, 4)
    return found


def link(path: Path) -> str:
    """Return a Markdown link from the folder of all studies to the text of one."""
    model, study = path.parts[-3:-1]
    return f"- [{escaped(model)}, {escaped(study)}]({quote(model)}/{quote(study)}/{path.name})"
