"""Archives x variants x seeds of the UEA collection, beside the published table.

    python -m lit_probattn.uea_benchmark --dry-run
    python -m lit_probattn.uea_benchmark --archives JapaneseVowels BasicMotions --source bundled \\
        --seeds 0 1 2

Each cell is an ordinary run of the command line (`fit`, then `test` of the best checkpoint) and
leaves one result file. A cell whose result is there is never run again; an interrupted one goes on
from its newest checkpoint. --dry-run trains nothing: it predicts time and memory per cell and
lists what is missing on disk.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from datamodules.core.errors import DataError
from lit_probattn.configs import ConfigError
from lit_probattn.reproduce.uea.cells import Cell, Place, sizes_of
from lit_probattn.reproduce.uea.predict import Speed, predict
from lit_probattn.reproduce.uea.recipes import Table, all_archives
from lit_probattn.reproduce.uea.report import dry_run_lines, write_results

PROGRAM = "python -m lit_probattn.uea_benchmark"


def make_parser() -> argparse.ArgumentParser:
    """The command's flags; none is matched by a prefix."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--table",
        default="configs/reproduce/fish_table6.yaml",
        help="recipes and published numbers",
    )
    add("--archives", nargs="+", help="names, or `all` of the collection; default: the table's")
    add("--variants", nargs="+", help="the table's names, or files of configs/attention")
    add("--seeds", nargs="+", type=int, help="default: the table's")
    add("--epochs", type=int, help="in place of the recipes' epochs; for shorter runs")
    add("--data_dir", help="folder of the archives (or LIT_PROBATTN_DATA)")
    add("--cache_dir", help="folder of the caches (or LIT_PROBATTN_CACHE)")
    add("--source", choices=("released", "bundled"), default="released", help="bundled: aeon's")
    add(
        *("--select_on",),
        choices=("val", "test"),
        default="val",
        help="test selects on test data, as the papers did; flagged in every result",
    )
    add("--accelerator", default="cpu", help="Lightning's name: cpu, gpu, auto")
    add("--runs", type=Path, default=Path("runs"), help="folder of the runs")
    add("--out", type=Path, default=Path("reports/uea_table6"), help="folder of the results")
    add("--part", default="1/1", help="I/N: every N-th cell from the I-th, for array jobs")
    add("--dry-run", action="store_true", help="predict, train nothing")
    add("--commands", action="store_true", help="with --dry-run: print each cell's command")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0, 1 if a cell failed or files are missing, 2 for wrong usage."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    options = make_parser().parse_args(arguments)
    try:
        if options.epochs is not None and options.epochs < 1:
            raise ConfigError(f"--epochs must be at least 1, received {options.epochs}")
        table = Table.read(options.table)
        cells, unknown = make_cells(table, options)
        if options.dry_run:
            return dry_run(cells, unknown, options.commands)
        part = _part(options.part, cells)
        return run(part, unknown, table, shlex.join([*PROGRAM.split(), *arguments]))
    except (ConfigError, DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def make_cells(table: Table, options: argparse.Namespace) -> tuple[list[Cell], dict[str, str]]:
    """Return all cells whose sizes are known, and why the other archives' are not.

    Raises:
        ConfigError: unknown variant.
        DataError: unknown archive, or malformed files.
    """
    place = Place(
        options.data_dir,
        options.cache_dir,
        options.source,
        options.select_on,
        options.runs,
        options.out,
        options.accelerator,
        options.epochs,
    )
    archives = all_archives() if options.archives == ["all"] else options.archives or table.archives
    recipes = [table.recipe(name) for name in archives]
    variants = [table.variant(name) for name in options.variants or table.variants]
    cells, unknown = [], {}
    for recipe in recipes:
        sizes = sizes_of(recipe.archive, place)
        if isinstance(sizes, str):
            unknown[recipe.archive] = sizes
            continue
        for variant in variants:
            for seed in options.seeds or table.seeds:
                cells.append(Cell(table, recipe, variant, seed, sizes, place))
    return cells, unknown


def dry_run(cells: Sequence[Cell], unknown: dict[str, str], commands: bool) -> int:
    """Print the plan; 1 if files are missing."""
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.recipe.archive, cell.variant.name), []).append(cell)
    speeds: dict[str, Speed] = {}
    plan = []
    for group in groups.values():
        first = group[0]
        name = first.variant.name
        speeds[name] = speeds.get(name) or Speed(first.variant)
        print(f"predicting {first.recipe.archive}, {name}", file=sys.stderr, flush=True)
        left = sum(cell.result() is None for cell in group)
        plan.append((first, predict(first, speeds[name]), left))
    print("\n".join(dry_run_lines(plan, unknown)))
    if commands:
        for cell in cells:
            print(shlex.join(["python", "-m", "lit_probattn", *cell.arguments()]))
    return 1 if unknown or any(cell.sizes.missing for cell in cells) else 0


def run(cells: Sequence[Cell], unknown: dict[str, str], table: Table, command: str) -> int:
    """Run what is not finished, and write the table after every cell; 1 if a cell is left."""
    missing = {c.recipe.archive: c.sizes.missing for c in cells if c.sizes.missing} | unknown
    for archive, reason in missing.items():
        print(f"skipped: {archive}: {reason}", file=sys.stderr)
    present = [cell for cell in cells if not cell.sizes.missing]
    text, failed = "", 0
    for number, cell in enumerate(present, 1):
        title = f"[{number}/{len(present)}] {cell.recipe.archive}, {cell.variant.name}"
        title += f", seed {cell.seed}"
        if cell.result() is not None:
            print(f"{title}: finished before, not run again", flush=True)
            continue
        print(title, flush=True)
        try:
            result = cell.run()
        except Exception as error:
            failed += 1
            print(f"{title}: failed: {error}", file=sys.stderr, flush=True)
            if not isinstance(error, RuntimeError):
                traceback.print_exc()
            continue
        print(
            f"{title}: test accuracy {result['test_accuracy_percent']:.2f} %, "
            f"{result['fit_minutes']:.1f} minutes",
            flush=True,
        )
    results = [found for cell in cells if (found := cell.result()) is not None]
    if results:
        text = write_results(results, len(cells), table, cells[0].place.out, command)
        print(f"\n{text}\n\nreport: {cells[0].place.out / 'report.md'}")
    if failed:
        print(f"error: {failed} cells failed; run the same command to try again", file=sys.stderr)
    return 1 if failed or missing else 0


def _part(text: str, cells: Sequence[Cell]) -> list[Cell]:
    """Every N-th cell from the I-th.

    Raises:
        ConfigError: not I/N with 1 ≤ I ≤ N.
    """
    first, _, count = text.partition("/")
    if not (first.isdecimal() and count.isdecimal() and 1 <= int(first) <= int(count)):
        raise ConfigError(f"--part must be I/N with 1 <= I <= N, received {text!r}")
    return list(cells[int(first) - 1 :: int(count)])


if __name__ == "__main__":
    sys.exit(main())
