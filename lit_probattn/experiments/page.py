"""Reports: a folder with `report.json` for programs, `report.md` for people, tables and figures.

`report.json` contains the provenance of the rows, a one-sentence finding, all expectations with
verdicts, and the hashes of the tables. `report.md` and the HTML page are rendered from the same
`Page` and are not read by programs; the front page of a folder of reports is built from their
`report.json`.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pandas as pd

from lit_probattn.base.config_files import output_folder
from lit_probattn.base.errors import ConfigError
from lit_probattn.base.files import (
    begin_output,
    digest,
    end_output,
    file_digest,
    refuse_to_replace,
    replace_text,
)
from lit_probattn.base.provenance import git_revision, place, versions
from lit_probattn.experiments.expectations import LEGEND, VERDICTS, Finding
from lit_probattn.records.figures import PNG, SVG, ReportFigure, save_figure
from lit_probattn.records.html import body_of, page
from lit_probattn.records.markdown import code_span, escaped, one_line
from lit_probattn.records.tables import markdown_lines

DATA, TEXT, HTML, FRONT = "report.json", "report.md", "report.html", "README.md"
FIGURES = "figures"
_ROWS = {"machine": "device", "versions": "versions", "revision": "git_revision"}


@dataclass(frozen=True)
class Made:
    """Provenance of the rows of a report.

    Args:
        command: command that wrote the rows.
        machine: hardware.
        versions: versions of Python and packages.
        revision: revision of the code.
        reported_by: command of the report, if it is another one.
        more: additional lines of the head, by name.
    """

    command: str
    machine: str
    versions: str
    revision: str
    reported_by: str = ""
    more: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: pd.DataFrame, columns: Mapping[str, str] = _ROWS, **given: Any) -> Made:
        """Return the provenance stored in columns of rows; several values are listed."""
        found = {
            name: " | ".join(sorted(set(map(str, rows[column]))))
            for name, column in columns.items()
        }
        return cls(**{**found, **given})

    @classmethod
    def here(cls, command: str, machine: str = "") -> Made:
        """Return the provenance of this process, on this machine if no other is given."""
        return cls(command, machine or place(), versions(), git_revision())

    @property
    def lines(self) -> list[str]:
        """The lines of the head of a page."""
        by = self.reported_by
        then = f", then {code_span(by)}" if by not in ("", self.command) else ""
        return [
            f"- Command: {code_span(self.command)}{then}",
            *(f"- {name}: {one_line(text)}" for name, text in self.more.items()),
            f"- Hardware: {one_line(self.machine)}",
            one_line(f"- Versions: {self.versions}; revision {self.revision}"),
        ]

    @property
    def note(self) -> str:
        """The same in one line, for figures."""
        return " | ".join(
            [*self.more.values(), self.machine, self.versions, self.revision, self.command]
        )


def together(parts: Sequence[Made], command: str) -> Made:
    """Return the provenance of the rows of several parts of one report."""
    frame = pd.DataFrame([vars(part) for part in parts])
    columns = {name: name for name in _ROWS}
    return Made.of(frame, columns, command=command, more=parts[0].more)


@dataclass
class Page:
    """The content of a report.

    Args:
        kind: kind of report, named after the command.
        title: heading.
        made: provenance of the rows.
        finding: one-sentence summary.
        body: Markdown lines below the head, which reference the figures.
        before: Markdown lines above the head, such as warnings.
        findings: expectations with verdicts; the legend is added if there are any.
        tables: CSV files by name.
        figures: figures, or existing PNG files, by name.
        about: additional plain data, such as variants.
    """

    kind: str
    title: str
    made: Made
    finding: str
    body: Sequence[str]
    before: Sequence[str] = ()
    findings: Sequence[Finding] = ()
    tables: Mapping[str, str] = field(default_factory=dict)
    figures: Mapping[str, ReportFigure | Path] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)

    def data(self) -> dict[str, Any]:
        """Return the content of `report.json`."""
        return {
            "kind": self.kind,
            "title": self.title,
            "made": asdict(self.made),
            "finding": self.finding,
            "findings": [_entry(one) for one in self.findings],
            "about": dict(self.about),
            "sha256": {f"{name}.csv": digest(text) for name, text in self.tables.items()},
        }

    def text(self, without_svg: Collection[str] = ()) -> str:
        """Return the page as Markdown.

        Args:
            without_svg: names of figures to show as PNG files.
        """
        lines = [f"# {escaped(self.title)}", "", *self.before, *self.made.lines]
        hashes = (f"`{name}.csv` {digest(text, 12)}" for name, text in self.tables.items())
        lines += [f"- SHA-256: {', '.join(hashes)}"] if self.tables else []
        legend = ["", LEGEND] if self.findings else []
        shown = {
            image(name): self._shown(one, f"{name}{PNG if name in without_svg else SVG}")
            for name, one in self.figures.items()
            if isinstance(one, ReportFigure)
        }
        stripped = "\n".join(self.body).rstrip().split("\n")
        body = [part for line in stripped for part in shown.get(line, [line])]
        return "\n".join([*lines, "", *body, *legend]) + "\n"

    def _shown(self, figure: ReportFigure, file: str) -> list[str]:
        """Return the Markdown lines of a figure with its claim and caption."""
        claim, where = one_line(figure.claim), f"{self.made.machine}; revision {self.made.revision}"
        words = claim.translate(str.maketrans("", "", "[]\\"))
        source = f"Measured on {one_line(where)}, with the command above."
        return [
            f"![{words}]({FIGURES}/{file})",
            "",
            " ".join(part for part in (f"**{claim}.**", one_line(figure.caption), source) if part),
        ]

    def summary(self) -> str:
        """Return the page for a terminal, without figures and files."""
        body = [line for line in self.body if not line.startswith("![")]
        return replace(self, tables={}, figures={}, body=body).text()

    def write(self, folder: Path, *, html: bool = False) -> list[Path]:
        """Write the report; figures, tables and page of an earlier report are deleted.

        Args:
            folder: the report folder, created if needed.
            html: also write a self-contained HTML page.

        Returns:
            The files, `report.md` first.

        Raises:
            ConfigError: the folder is invalid, a figure is too large, or HTML cannot be written.
        """
        output_folder(folder)
        begin_output(folder / TEXT)
        earlier = {HTML, *_tables_in(folder)}
        written: list[Path] = []
        for name, one in self.figures.items():
            path = folder / FIGURES / f"{name}{PNG}"
            if isinstance(one, Path):
                path.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(one, path)
                written.append(path)
            else:
                note = " | ".join(filter(None, (self.title, one.caption, self.made.note)))
                written += save_figure(one.drawn(), path, note, one.claim)
        for ending in (PNG, SVG):
            for old in set((folder / FIGURES).glob(f"*{ending}")) - set(written):
                old.unlink()
        vectors = {path.stem for path in written if path.suffix == SVG}
        texts = {TEXT: self.text(set(self.figures) - vectors)}
        texts |= {f"{name}.csv": text for name, text in self.tables.items()}
        texts[DATA] = json.dumps(self.data(), indent=1, ensure_ascii=False) + "\n"
        if html:
            carried = {f"{FIGURES}/{path.name}": path.read_bytes() for path in written}
            texts[HTML] = page(self.title, body_of(texts[TEXT], carried))
        for name, text in texts.items():
            replace_text(folder / name, text)
        for name in earlier - set(texts):
            (folder / name).unlink(missing_ok=True)
        end_output(folder / TEXT)
        return [*(folder / name for name in texts), *written]


def refuse_foreign_files(folder: Path, *tables: str, beside: str = TEXT) -> None:
    """Reject an invalid report folder, or one with unrelated files that a report would replace.

    Args:
        folder: the report folder, set by `--out`.
        tables: names of the report's tables.
        beside: a further file whose presence shows that a command wrote the tables.

    Raises:
        ConfigError: the message names the file.
    """
    refuse_file(folder, "--out")
    names = (TEXT, DATA, HTML, *(f"{name}.csv" for name in tables))
    figures = (path for ending in (PNG, SVG) for path in (folder / FIGURES).glob(f"*{ending}"))
    refuse_to_replace(
        (*(folder / name for name in names), *figures), folder / TEXT, folder / beside
    )


def refuse_file(folder: Path, flag: str) -> None:
    """Reject a file at the path of a new folder.

    Raises:
        ConfigError: the path or a parent is a file, or is not writable.
    """
    place = next(p for p in (folder, *folder.absolute().parents) if p.exists() or p.is_symlink())
    if not place.is_dir():
        raise ConfigError(f"{flag} {folder}: {place} is not a folder")
    if not os.access(place, os.W_OK):
        raise ConfigError(f"{flag} {folder}: {place} cannot be written")


def _tables_in(folder: Path) -> set[str]:
    """Return the names of the tables of an earlier report; none if it cannot be read."""
    try:
        found = json.loads((folder / DATA).read_text(encoding="utf-8"))["sha256"]
        return {path.name for path in folder.glob("*.csv") if path.name in found}
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def _entry(one: Finding) -> dict[str, Any]:
    """Return a finding as plain data; unknown ends of its interval are null."""
    found: dict[str, Any] = {"says": one.says, "found": one.measured, "verdict": one.verdict}
    if one.estimate is not None:
        ends = {key: getattr(one.estimate, key) for key in ("value", "low", "high")}
        found |= {key: end if math.isfinite(end) else None for key, end in ends.items()}
    return found


def as_csv(frame: pd.DataFrame, digits: int | None = None) -> str:
    """Return a table as CSV, with all or a number of significant digits."""
    form = None if digits is None else f"%.{digits}g"
    return str(frame.to_csv(index=False, float_format=form))


def image(name: str) -> str:
    """Return the Markdown line that shows a figure of the page."""
    shown = name.replace("_", " ").translate(str.maketrans("", "", "[]\\"))
    return f"![{one_line(shown)}]({FIGURES}/{name}.png)"


def findings_table(findings: Sequence[Finding]) -> pd.DataFrame:
    """Return a row per sentence: claim of the paper, result, verdict."""
    rows = [[one.says, one.measured, one.verdict] for one in findings]
    return pd.DataFrame(rows, columns=["claim of the paper", "result", "verdict"])


def how_many_agree(findings: Sequence[Finding]) -> str:
    """Return the number of sentences of a paper that agree, as the finding of a report."""
    held = sum(one.verdict == "agrees" for one in findings)
    return f"{held} of {len(findings)} claims of the paper agree."


def first_of(findings: Sequence[Finding]) -> str:
    """Return the claim of a figure: the result for the first of the paper's sentences."""
    words = {"agrees": "agrees with the paper", "differs": "differs from the paper"}
    first = findings[0]
    measured = first.measured[:1].upper() + first.measured[1:]
    return f"{measured} ({words.get(first.verdict, first.verdict)})"


# ---- reading -------------------------------------------------------------------------------------


def read(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's `report.json`.

    Raises:
        ConfigError: the file is missing, or a table has changed.
    """
    try:
        data: dict[str, Any] = json.loads((folder / DATA).read_text(encoding="utf-8"))
        hashes = data["sha256"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{folder}: missing or invalid {DATA}") from error
    for name, wanted in hashes:
        path = folder / name
        if not path.is_file() or file_digest(path) != wanted:
            raise ConfigError(f"{path} has changed since {DATA} was written")
    return data


Reports = Mapping[Path, Mapping[str, Any]]


def write_front_page(
    folder: Path, command: str, answer: Callable[[Path, Reports], Sequence[str]] | None = None
) -> Path:
    """Write `README.md` of a folder: finding, verdicts and hardware of each report below it.

    Args:
        folder: folder of the reports.
        command: command that writes the page.
        answer: returns the lines above the table, from the content of all reports.

    Raises:
        ConfigError: there are no reports.
    """
    found = {path.parent: read(path.parent) for path in sorted(folder.rglob(DATA))}
    if not found:
        raise ConfigError(f"{folder}: no {DATA} in this folder or below it")
    links, rows = ["report", "---"], []
    for report, data in found.items():
        counts = Counter(one["verdict"] for one in data["findings"])
        verdicts = (f"{counts[name]} {name}" for name in reversed(VERDICTS) if counts[name])
        name = report.relative_to(folder).as_posix()
        links.append(f"[{one_line(name)}]({quote(name)}/{TEXT})")
        rows.append(
            {
                "title": data["title"],
                "finding": data["finding"],
                "verdicts": ", ".join(verdicts) or None,
                "hardware": data["made"]["machine"],
                "revision": data["made"]["revision"],
            }
        )
    others = markdown_lines(pd.DataFrame(rows))
    table = [f"| {link} {line}" for link, line in zip(links, others, strict=True)]
    lines = [
        "# Reports",
        "",
        f"Command: {code_span(command)}",
        "",
        *(answer(folder, found) if answer else ()),
        "",
        "## All reports",
        "",
        f"Each row summarises the `{DATA}` of a report: its finding, the verdicts on the paper's "
        "claims, the hardware and the revision of the code.",
        *("", *table, "", LEGEND),
    ]
    path = folder / FRONT
    replace_text(path, "\n".join(lines) + "\n")
    return path
