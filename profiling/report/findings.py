"""What a report of any command says of itself: title, finding, variants, paper, hardware."""

from __future__ import annotations

import re
from dataclasses import dataclass

from lit_probattn.base.config_files import list_attention
from lit_probattn.records.markdown import unescaped
from lit_probattn.records.pages import title_of

_MOST_WORDS = 60
_MOST_ROWS = 4
_BULLET = re.compile(r"^- (?!\*\*)(.*)$", re.MULTILINE)
_PROVENANCE = re.compile(
    r"(Command|Data|Convention|Hardware|Versions|Machine|The paper|Note|Compiled at|\d+ untimed)\b"
)
_NUMBER = re.compile(r"[+-]?[\d.,]+(?=$|[^\w.,-])")
# A paper -> what titles of its reports have.
PAPERS = {
    "MGK (ICML 2022)": r"\b[sS]?(MGK|MLK)\b",
    "FiSH": r"FiSH",
    "Low-rank bottleneck (ICML 2020)": r"head size",
    "Value-aware attention": r"Approximate attention",
}
_MACHINE = re.compile(r"^(?:- )?(?:Machine|Hardware): ([^\n]+?)(?:,|;|\. |$)", re.MULTILINE)
_PROCESSOR = re.compile(r"AMD EPYC|Intel [^,;\n]*|NVIDIA [^,;\n]*|Compiled ahead of time")


@dataclass(frozen=True)
class Summary:
    """A report in short; `papers` and `variants` may be empty."""

    title: str
    finding: str
    variants: tuple[str, ...]
    papers: tuple[str, ...]
    hardware: str


def summary_of(text: str) -> Summary:
    """Read a report in Markdown."""
    title = title_of(text)
    return Summary(
        title, unescaped(finding_of(text)), _variants(text), _papers(title), _hardware(text)
    )


def finding_of(text: str) -> str:
    """Return the sentence in which a report says what was found; empty if it has none.

    The first of: the first sentence of a line `Finding: …`; what a sweep counts or measures, with
    the first line on what costs more than its baseline; a point of the list that opens the report;
    the first table in a sentence, where there are no models to introduce; the first paragraph.
    """
    told = re.search(r"^Finding: (.*?)(?:(?<=\.) (?=[A-Z]).*)?$", text, re.MULTILINE)
    if told:
        return told[1]
    head = re.split(r"^## ", text, maxsplit=1, flags=re.MULTILINE)[0]
    counted = re.findall(r"^- (We .*)$", text, re.MULTILINE)
    if counted:
        dearer = re.findall(r"^- (\*\*.* costs more than .*)$", text, re.MULTILINE)
        return " ".join([*counted[:1], *dearer[:1]]).replace("**", "")
    points = [point for point in _BULLET.findall(head) if not _PROVENANCE.match(point)]
    if points:
        return _short(points[-1])
    table = re.search(r"(?:^\|.*\n)+", head, re.MULTILINE)
    if table:
        return table_sentence(table[0])
    paragraphs = [line for line in head.split("\n")[1:] if line and not _PROVENANCE.match(line)]
    return _short(paragraphs[0]) if paragraphs else ""


def table_sentence(text: str) -> str:
    """Return a Markdown table as a sentence: its first column of results, by the columns before.

    Columns whose cells are all equal say nothing. Results begin with the first column of numbers
    after one of words.
    """
    rows = [_cells(line) for line in text.strip().split("\n")]
    titles, body = rows[0], rows[2:]
    columns = [list(column) for column in zip(*body, strict=True)]
    differ = [i for i, cells in enumerate(columns) if len(set(cells)) > 1 or len(body) == 1]
    words = [i for i in differ if not all(_NUMBER.match(cell) for cell in columns[i])]
    results = [i for i in differ if words and i > words[0] and i not in words]
    if not results:
        return ""
    names = [i for i in differ if i < results[0]]
    shown = [f"{', '.join(row[i] for i in names)}: {row[results[0]]}" for row in body[:_MOST_ROWS]]
    more = f"; and {len(body) - _MOST_ROWS} more" if len(body) > _MOST_ROWS else ""
    return f"{titles[results[0]]} – {'; '.join(shown)}{more}."


def _cells(line: str) -> list[str]:
    parts = re.split(r"(?<!\\)\|", line.strip().strip("|"))
    return [part.strip().replace("**", "").replace("\\|", "|") for part in parts]


def _short(text: str) -> str:
    words = text.replace("**", "").split()
    return " ".join(words[:_MOST_WORDS]) + (" …" if len(words) > _MOST_WORDS else "")


def _variants(text: str) -> tuple[str, ...]:
    """Return the attention configurations that title, commands, or the names of rows have."""
    rows = re.findall(r"^\|([^|]*\|[^|]*)\|", text, re.MULTILINE)
    named = re.findall(r"configs/attention/(\w+)", text)
    words = "\n".join([title_of(text), *rows, *named])
    return tuple(n for n in list_attention() if "/" not in n and _mentions(words, n))


def _mentions(text: str, name: str) -> bool:
    """Whether a text has a name, perhaps with a number of heads."""
    return bool(re.search(rf"(?<![\w-]){re.escape(name)}(_?\d+)?(?!\w)", text, re.IGNORECASE))


def _papers(title: str) -> tuple[str, ...]:
    return tuple(paper for paper, words in PAPERS.items() if re.search(words, title))


def _hardware(text: str) -> str:
    found = _MACHINE.search(text)
    if found:
        return found[1].split(" | ")[0].removesuffix(".")
    processor = _PROCESSOR.search(text)
    return processor[0] if processor else "not said"
