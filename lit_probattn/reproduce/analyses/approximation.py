"""A table of trained models with approximate attention: runs and their studies.

The runs are trained as usual. Then `approximate` runs once on each, and `approximate_compare` on
the rows of each seed. A sentence of the paper is judged over seeds, as for figures.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd

from lit_probattn.analysis.approximation.compare import Compare
from lit_probattn.analysis.approximation.methods import ESTIMATE
from lit_probattn.base.files import digest
from lit_probattn.base.provenance import shown_command
from lit_probattn.compare.runs import Run
from lit_probattn.experiments.page import DATA, FIGURES, as_csv
from lit_probattn.experiments.runner import Job, Work
from lit_probattn.records.figures import PNG
from lit_probattn.records.markdown import code_span
from lit_probattn.records.tables import markdown_lines
from lit_probattn.reproduce.figures.runs import RunFigure
from lit_probattn.reproduce.studies import MODULE, RunStudy, StudyJob, run_studies, study_step

METHODS = {"ovo": "OVO", "ova": "OVA"}
_LEGEND = (
    "OVO: the keys with the r largest weights (value-oblivious optimum); OVA: the best point "
    "from at most r values (value-aware optimum). Mean ± standard deviation over seeds (n − 1), "
    "on the same samples of the test split; (≤): upper estimate on fewer samples. The last row "
    "is exact attention. The printed values are not legible in our copy of the paper."
)


class ApproximationTable(RunFigure):
    """Report of a table of `kind: fits` with `says` and the study `approximate`."""

    after_every_run: ClassVar[bool] = True
    compared: ClassVar[str] = (
        "The values of the table are not legible in our copy of the paper, so the paper's "
        "claims about them are compared."
    )

    # ---- studies -------------------------------------------------------------------------------

    @property
    def study(self) -> RunStudy:
        """The study `approximate` of these runs."""
        return self.studies["approximate"]

    def plan(self, runs: Sequence[Run], commands: bool) -> list[str]:
        """Return the numbers of runs to study and seeds to compare, and the commands."""
        left = sum(not self.study.is_done(run) for run in runs)
        seeds = sorted({run.seed for run in runs})
        waiting = [seed for seed in seeds if not self.is_compared(seed)]
        lines = [
            f"then the study {self.study.name} of {left} of {len(runs)} runs",
            f"then {Compare.name} for {len(waiting)} of {len(seeds)} seeds",
        ]
        return lines + ([self.study.command(run) for run in runs] if commands else [])

    def complete(self, runs: Sequence[Run], jobs: int, devices: Sequence[str]) -> dict[str, str]:
        """Study the trained runs; compare the rows of each seed with all runs studied."""
        studies: dict[int, list[StudyJob]] = {}
        for job in self.study.jobs(runs):
            studies.setdefault(job.run.seed, []).append(job)
        coming = {job.run.name for found in studies.values() for job in found}
        jobs_of_all: list[Job] = [job for found in studies.values() for job in found]
        for seed in sorted({run.seed for run in runs}):
            mine = [run for run in self.runs if run.seed == seed]
            studied = all(run.name in coming or self.study.is_done(run) for run in mine)
            if studied and not self.is_compared(seed):
                jobs_of_all.append(SeedJob(self, seed, studies.get(seed, [])))
        return run_studies(jobs_of_all, jobs, devices)

    def _studied(self, seed: int) -> list[tuple[Run, dict[str, Any]]]:
        """Return the runs of a seed with their results; empty unless all are studied."""
        wanted = {run.row.name for run in self.runs if run.seed == seed}
        found = [(c, r) for c, r in self.results if c.seed == seed and self.study.is_done(c)]
        return found if {run.row.name for run, _ in found} == wanted else []

    def compared_folder(self, seed: int) -> Path | None:
        """Return the folder of a seed's comparison; None unless all its runs are studied.

        Its name depends on the compared studies.
        """
        found = self._studied(seed)
        if not found:
            return None
        text = json.dumps([str(self.study.folder(run)) for run, _ in found])
        name = f"{Compare.name}-seed{seed}-{digest(text, 8)}"
        return found[0][0].folder / "studies" / self.table.name / name / Compare.name

    def is_compared(self, seed: int) -> bool:
        """Return whether the comparison of a seed is done."""
        folder = self.compared_folder(seed)
        return folder is not None and (folder / DATA).is_file()

    def compare_arguments(self, seed: int) -> list[str]:
        """Return the arguments of the command that compares the rows of a seed."""
        found = self._studied(seed)
        words = [Compare.name, "--results"]
        words += [f"{run.row.name}={self.study.folder(run).parent}" for run, _ in found]
        words += ["--runs", *(f"{run.row.name}={run.folder_of(result)}" for run, result in found)]
        out = self.compared_folder(seed)
        return [*words, "--out", str(out and out.parent)]

    # ---- reporting -----------------------------------------------------------------------------

    def oracles(self) -> pd.DataFrame:
        """Return a row per row of the table, seed, method and number of keys; may be empty."""
        parts = [
            self.study.table(run, f"{self.study.name}.csv").assign(row=run.row.name, seed=run.seed)
            for run, _ in self.results
            if self.study.is_done(run)
        ]
        if not parts:
            return pd.DataFrame()
        whole = pd.concat(parts, ignore_index=True)
        columns = ["row", "seed", "method", "num_kept", "status", "value", "exact", "samples"]
        return whole.loc[whole["method"].isin(METHODS), columns]

    def oracle_lines(self) -> list[str]:
        """Return perplexities with OVO and OVA as Markdown, a line per number of keys."""
        table = self.oracles()
        if table.empty:
            return ["No run has been studied yet."]
        columns: dict[str, dict[Any, str]] = {}
        for (row, method), part in table.groupby(["row", "method"], sort=False):
            column = columns.setdefault(f"{self.table.rows[str(row)].label}, {METHODS[method]}", {})
            for kept, values in part.groupby("num_kept"):
                is_estimate = values["status"].eq(ESTIMATE).any()
                column[kept] = _mean(values["value"]) + (" (≤)" if is_estimate else "")
            whole = part[part["status"] != ESTIMATE].groupby("seed")["exact"].first()
            column["exact"] = _mean(whole)
        keys = [*sorted(table["num_kept"].unique()), "exact"]
        lines = [{"keys r": k} | {name: c.get(k) for name, c in columns.items()} for k in keys]
        return markdown_lines(pd.DataFrame(lines))

    def text(self) -> list[str]:
        """Return OVO and OVA of all rows, sentences, provenance and figures."""
        words = " ".join(self.study.words)
        oracles = "\n".join(self.oracle_lines())
        parts = ["## OVO and OVA", f"Study: {self.study.name} with {words}.", oracles, _LEGEND]
        parts += super().text()
        for seed, folder in self._compared:
            command = f"python -m {MODULE} {shown_command(self.compare_arguments(seed))}"
            images = [f"![{p.stem}](figures/seed{seed}_{p.name})" for p in _figures(folder)]
            parts += [f"Seed {seed}: {code_span(command)}", " ".join(images)]
        return parts

    @property
    def _compared(self) -> list[tuple[int, Path]]:
        seeds = sorted({run.seed for run in self.runs})
        folders = [(seed, self.compared_folder(seed)) for seed in seeds if self.is_compared(seed)]
        return [(seed, folder) for seed, folder in folders if folder is not None]

    def further_tables(self) -> dict[str, str]:
        """Return the verdicts, and OVO and OVA of all rows."""
        return {**super().further_tables(), "oracles": as_csv(self.oracles())}

    def copies(self) -> dict[str, Path]:
        """Return the figures of the comparisons."""
        return {
            f"seed{seed}_{path.stem}": path
            for seed, folder in self._compared
            for path in _figures(folder)
        }

    def write(self, folder: Path) -> str:
        """Write the report and return its tables."""
        return "\n".join([super().write(folder), "", *self.oracle_lines()])


class SeedJob(Job):
    """The job that compares the rows of a seed.

    Args:
        table: the table.
        seed: the seed.
        after: studies on which it depends.
    """

    def __init__(self, table: ApproximationTable, seed: int, after: Sequence[Job]) -> None:
        name, label = f"{Compare.name}-seed{seed}", f"{Compare.name}, seed {seed}"
        super().__init__(f"{table.table.name}-{name}", label, table.runs[0].folder, after=after)
        self.table, self.seed = table, seed

    def is_done(self) -> bool:
        """Whether the comparison's report is complete."""
        return self.table.is_compared(self.seed)

    def work(self) -> Work:
        """Compare the rows."""
        words = self.table.compare_arguments(self.seed)
        yield from study_step(Compare.name, words, self.log_path)
        return f"done: {self.table.compared_folder(self.seed)}"


def _figures(folder: Path) -> list[Path]:
    return sorted((folder / FIGURES).glob(f"*{PNG}"))


def _mean(values: pd.Series) -> str:
    spread = f" ± {values.std(ddof=1):.2f}" if len(values) > 1 else ""
    return f"{values.mean():.2f}{spread}"
