"""A variant owns all that is said of it: remove it from a copy of the repository; the tests pass.

    python -m tests.attention.deletion_proof polynomial
    python -m tests.attention.deletion_proof ast --tests "tests/attention -n 2"

Clones the last commit to a temporary folder, prints what it removes, removes exactly that, edits
nothing else, looks for mentions that are left, and runs the tests.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.paths import ROOT

# What runs: everything but what remembers the past.
CODE = ("lit_probattn", "profiling", "datamodules", "tests", "configs", "Makefile")


@dataclass(frozen=True)
class Removal:
    """What is said of a variant.

    Args:
        files: its own.
        lines: path -> pattern of the lines that go: its import, its rows of tables.
        blocks: path -> key of a YAML mapping that goes with what is indented below it.
        texts: path -> pieces of text that go from the middle of a line.
        mention: pattern that must not be left in the code.
    """

    files: tuple[str, ...]
    lines: dict[str, str]
    mention: str
    blocks: dict[str, str] = field(default_factory=dict)
    texts: dict[str, tuple[str, ...]] = field(default_factory=dict)


def own_files(name: str) -> tuple[str, ...]:
    """Return the three files of a variant, and those of its functional form."""
    return (
        f"lit_probattn/attention/{name}.py",
        f"configs/attention/{name}.yaml",
        f"tests/attention/test_{name}.py",
        f"lit_probattn/functional/{name}.py",
        f"tests/functional/test_{name}.py",
    )


def own_lines(name: str) -> dict[str, str]:
    """Return the lines that every variant of one file has."""
    return {
        "lit_probattn/attention/__init__.pyi": rf"from lit_probattn\.attention\.{name} import",
        "lit_probattn/functional/__init__.py": rf"from lit_probattn\.functional\.{name} import",
        "docs/variants.md": rf"^\| `{name}` \|",
        "docs/backends.md": rf"^\| `{name}` \|",
    }


REMOVALS = {
    "polynomial": Removal(
        own_files("polynomial"),
        {
            **own_lines("polynomial"),
            "tests/house/options.txt": r"^options Polynomial",
            "docs/reproduce.md": r"^\| Value-aware \| polynomial kernel \|",
            "configs/reproduce/run_figures.bundle.yaml": r"\{rows: \[polynomial_8\],",
            "configs/reproduce/published.csv": r",polynomial kernel of degree 2,",
            "configs/reproduce/value_aware_table2.yaml": r"\{rows: \[polynomial_8\],",
        },
        r"Polynomial(Attention|Core)|attention[./]polynomial|polynomial\.yaml|polynomial_scores",
        blocks={"configs/reproduce/value_aware_table2.yaml": "polynomial_8"},
        texts={
            "tests/bad_inputs/messages.md": ("lit_probattn.attention.PolynomialAttention, ",),
            "docs/analysis.md": (
                "`polynomial` is the kernel (q·k)². ",
                " (the\npolynomial adds 1e-12 to the square of each product instead)",
            ),
        },
    ),
    "ast": Removal(
        own_files("ast"),
        {
            **own_lines("ast"),
            "tests/house/options.txt": r"^options AST",
            "docs/findings.md": r"`configs/attention/ast\.yaml`",
            "configs/reproduce/published.csv": r",AST \(alpha-entmax\),",
        },
        r"AST(Attention|Core)|lit_probattn[./]attention[./]ast\b|attention/ast\.yaml|test_ast\b",
        blocks={"configs/reproduce/fish_ast.yaml": "ast_8"},
        texts={"tests/bad_inputs/messages.md": ("lit_probattn.attention.ASTAttention, ",)},
    ),
}


def left(cases: Iterable[Any]) -> list[Any]:
    """Return cases, names or tuples with one, but those of a variant that was removed here."""
    gone = {name for name, what in REMOVALS.items() if not (ROOT / what.files[0]).is_file()}
    return [c for c in cases if gone.isdisjoint(c if isinstance(c, tuple) else (c,))]


def without_block(text: str, key: str) -> str:
    """Return YAML without a key and what is indented below it."""
    kept, inside = [], None
    for line in text.splitlines(keepends=True):
        indent = len(line) - len(line.lstrip())
        if inside is not None and line.strip() and indent <= inside:
            inside = None
        if re.match(rf" *{key}:", line):
            inside = indent
        if inside is None:
            kept.append(line)
    return "".join(kept)


def remove(folder: Path, what: Removal) -> list[str]:
    """Remove it from a copy of the repository; return what was removed, one line each.

    Raises:
        ValueError: something that should go is not there.
    """
    told = []
    for name in what.files:
        (folder / name).unlink()
        told.append(f"file   {name}")

    def rewrite(name: str, kind: str, old: str, new: str) -> None:
        if old == new:
            raise ValueError(f"{name} does not mention the variant ({kind})")
        (folder / name).write_text(new, encoding="utf-8")
        told.append(f"{kind:6} {name}")

    for name, pattern in what.lines.items():
        text = (folder / name).read_text(encoding="utf-8")
        kept = [line for line in text.splitlines(keepends=True) if not re.search(pattern, line)]
        rewrite(name, "line", text, "".join(kept))
    for name, key in what.blocks.items():
        text = (folder / name).read_text(encoding="utf-8")
        rewrite(name, "rows", text, without_block(text, key))
    for name, pieces in what.texts.items():
        for piece in pieces:
            text = (folder / name).read_text(encoding="utf-8")
            rewrite(name, "words", text, text.replace(piece, ""))
    return told


def mentions(folder: Path, what: Removal) -> list[str]:
    """Return the lines of the code that still name the variant."""
    found = []
    for name in CODE:
        path = folder / name
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            if file.suffix in (".py", ".pyi", ".yaml", ".csv", ".json", "") and file.is_file():
                if file.name in ("deletion_proof.py", "test_proofs.py"):
                    continue
                lines = file.read_text(encoding="utf-8").splitlines()
                hits = [n for n, line in enumerate(lines, 1) if re.search(what.mention, line)]
                found += [f"{file.relative_to(folder)}:{n}" for n in hits]
    return found


def clone(folder: Path) -> Path:
    """Clone the last commit; return the copy."""
    copy = folder / "repository"
    subprocess.run(["git", "clone", "-q", "--local", str(ROOT), str(copy)], check=True)
    return copy


def run_tests(copy: Path, arguments: str) -> int:
    """Run pytest in a copy of the repository and print its closing line; return its status."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import lit_probattn, pytest;"
        "assert lit_probattn.__file__.startswith(sys.argv[1]);"
        "raise SystemExit(pytest.main(sys.argv[2:]))"
    )
    command = [sys.executable, "-c", code, str(copy), "-p", "no:cacheprovider"]
    words = shlex.split(arguments)
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    print(f"$ pytest {arguments}", flush=True)
    done = subprocess.run(
        [*command, *words], cwd=copy, env=environment, capture_output=True, text=True, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    shown = lines[-1:] if done.returncode == 0 else lines[-40:]
    print("\n".join(shown), done.stderr[-2000:] if done.returncode else "", sep="\n")
    return done.returncode


def main() -> int:
    """Run the proof; the exit status is that of the tests, or 1 if a mention is left."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.attention.deletion_proof",
        description="Remove a variant from a copy of the repository and run the tests.",
    )
    parser.add_argument("variant", choices=REMOVALS)
    parser.add_argument("--tests", default='-m "not slow" -n 2', help="arguments of pytest")
    options = parser.parse_args()
    what = REMOVALS[options.variant]
    with tempfile.TemporaryDirectory() as folder:
        copy = clone(Path(folder))
        print("removed:", *remove(copy, what), sep="\n  ")
        subprocess.run(["git", "--no-pager", "diff", "--stat"], cwd=copy, check=True)
        left = mentions(copy, what)
        print("left in the code:", *(left or ["nothing"]), sep="\n  ")
        status = run_tests(copy, options.tests)
        return status or int(bool(left))


if __name__ == "__main__":
    raise SystemExit(main())
