"""Archives x variants x seeds of the UEA collection, compared with the published table.

    python -m lit_probattn.reproduce.uea --dry-run
    python -m lit_probattn.reproduce.uea --archives JapaneseVowels BasicMotions --source bundled \\
        --seeds 0 1 2

Each archive is a task and each variant a row of a table that runs like those of `lit-probattn
reproduce`: finished runs are not repeated, interrupted ones resume from their newest checkpoint. An
archive with other files is another task.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from datamodules.series.archive import ARCHIVES, check_name
from datamodules.series.uea import UEA
from lit_probattn.base.arguments import Parser, at_least
from lit_probattn.base.config_files import file_named, named_files, run_stem
from lit_probattn.base.errors import ConfigError, DataError, MissingDataError, nearest, reports
from lit_probattn.compare.command import run
from lit_probattn.compare.flags import Place, add_flags, place_of
from lit_probattn.compare.report import Report
from lit_probattn.compare.runs import Run
from lit_probattn.compare.tables import AVERAGE, Metric, Row, Table, TaskEntry, check_keys
from lit_probattn.configs import attention_entry, read_yaml

MODULE = "lit_probattn.reproduce.uea"
TABLE = Path("configs/reproduce/fish_table6.yaml")
OUT = Path("reports/uea_table6")
ON_TEST = "**selected on the test split**"
METRIC = Metric(
    name="test",
    command="test",
    key="test/accuracy",
    printed=("accuracy_percent", "test"),
    unit="%",
    scale=100,
)
# The published runs train on the whole training file and select the best accuracy on the test file.
_ON_TEST = {"run.monitor": "val/accuracy", "run.monitor_mode": "max"}
# Their batch norm includes padded steps in its statistics.
_PADDING_COUNTS = {"model.init_args.norm_positions": "all", "data.init_args.pad_to": "max"}
_HELD_OUT = "published: trained on the whole training file; here: on 80 % of each class"
_WHOLE_BATCHES = (
    "published: the incomplete last batch of an epoch is used; here: it is dropped, with "
    "different samples in every epoch"
)

Source = Literal["released", "bundled"]
Selection = Literal["val", "test"]


def make_table(
    path: Path,
    place: Place,
    *,
    archives: Sequence[str] = (),
    variants: Sequence[str] = (),
    epochs: int | None = None,
    source: Source = "released",
    select_on: Selection = "val",
) -> tuple[Table, dict[str, str]]:
    """Read a table file; archives are tasks, variants rows.

    Args:
        path: the file.
        place: folders of the data.
        archives: names of the collection; default: those of the table.
        variants: names of the table or of configs/attention, or files; default: those of the table.
        epochs: number of epochs, overriding the recipes.
        source: the released files, or those included in aeon.
        select_on: split that selects the checkpoint.

    Returns:
        The table, and the reasons for missing archives: neither files nor published sizes.

    Raises:
        ConfigError: a part of the file is missing, or a variant is unknown.
        DataError: an archive is unknown, or its files are malformed.
    """
    content = read_yaml(path)
    required = ("task", "seeds", "variants", "protocols", "archives", "others")
    check_keys(str(path), content, required)
    names = list(archives or content["archives"])
    tasks: dict[str, TaskEntry] = {}
    unknown: dict[str, str] = {}
    for name in names:
        made = _task(content, name, place, epochs, source, select_on)
        if isinstance(made, str):
            unknown[name] = made
        else:
            tasks[name] = made
    rows = [_row(content, name, tasks) for name in variants or content["variants"]]
    title = content.get("title", path.stem)
    own = content["variants"]
    baseline = next((name for name in own if name in {row.name for row in rows}), rows[0].name)
    named = {row.name: row for row in rows}
    runs = content.get("published_runs", 5)
    return Table(path.stem, title, content["seeds"], runs, baseline, tasks, named), unknown


def archives_of(path: Path, only: Sequence[str]) -> list[str]:
    """Return the names of `only` that are archives, so that others are not read."""
    variants = read_yaml(path).get("variants", {})
    return [name for name in only if not fnmatch.filter(variants, name)]


def _recipe(content: Mapping[str, Any], archive: str) -> dict[str, Any]:
    known = {**content["archives"], **content.get("extra", {})}
    part = known.get(archive, content["others"])
    protocol = content["protocols"][part["protocol"]]
    return {**protocol, **part, "model": {**protocol["model"], **part["model"]}}


def _task(
    content: Mapping[str, Any],
    archive: str,
    place: Place,
    epochs: int | None,
    source: Source,
    select_on: Selection,
) -> TaskEntry | str:
    """Return the task of an archive, or the reason why its sizes are unknown."""
    check_name(archive)
    recipe = _recipe(content, archive)
    folders: Any = {"data_dir": place.data_dir, "cache_dir": place.cache_dir}
    data = UEA(archive, source=source, select_on=select_on, **folders)
    files: dict[str, str] = {}
    try:
        data.setup()
        train = len(data.split("train"))
        shape = data.num_features, data.max_seq_len, data.num_classes
        hashes = data.provenance["archive_sha256"]
        files = {name.rpartition("_")[2].partition(".")[0]: sha for name, sha in hashes.items()}
    except MissingDataError as error:
        known = ARCHIVES[archive]
        if known is None:
            return str(error)
        held_out = 0 if select_on == "test" else round(data.val_fraction * known.num_train)
        train = known.num_train - held_out
        shape = known.num_features, known.max_length, known.num_classes
    batch = min(recipe["batch_size"], train)
    per_epoch = train // batch
    steps = (recipe["epochs"] if epochs is None else epochs) * per_epoch
    published: dict[str, Any] = {"data.init_args.select_on": "test", **_ON_TEST}
    if recipe["model"].get("norm") == "batch":
        published |= _PADDING_COUNTS
    if epochs not in (None, recipe["epochs"]):
        published["trainer.max_steps"] = recipe["epochs"] * per_epoch
    return TaskEntry(
        name=archive,
        config=content["task"],
        metrics={METRIC.name: METRIC},
        settings={
            "data.init_args.name": archive,
            "data.init_args.source": source,
            "data.init_args.select_on": select_on,
            "data.init_args.batch_size": batch,
            **{f"model.init_args.{key}": value for key, value in recipe["model"].items()},
            "trainer.max_steps": steps,
            "trainer.val_check_interval": 2 * per_epoch,
            **(_ON_TEST if select_on == "test" else {}),
            "run.checkpoint_every": 20 * per_epoch,
        },
        published=published,
        not_in_config=[*([_HELD_OUT] if select_on == "val" else []), _WHOLE_BATCHES],
        sizes=dict(zip(("num_features", "max_seq_len", "num_classes"), shape, strict=True)),
        files=files,
    )


def _row(content: Mapping[str, Any], name: str, tasks: Mapping[str, TaskEntry]) -> Row:
    part = content["variants"].get(name)
    if part is None:
        if Path(name).suffix != ".yaml" and name not in named_files("attention"):
            raise ConfigError(
                f"unknown variant {name!r}{nearest(name, content['variants'])}; names and files of "
                "configs/attention are also supported"
            )
        path = file_named("attention", name)
        attention_entry(path)
        return Row(run_stem(path), run_stem(path), "", path)
    column = part.get("published")
    numbers = {archive: _recipe(content, archive).get("published", {}) for archive in tasks}
    if set(tasks) == set(content["archives"]):
        numbers[AVERAGE] = content.get("published_average", {})
    printed = {
        task: {METRIC.name: found[column]} for task, found in numbers.items() if column in found
    }
    published = {
        **{task: {} for task in tasks},
        **printed,
    }  # unpublished archives also run
    return Row(
        name=name,
        method=part.get("method", name),
        heads=str(part.get("heads", "")),
        attention=part["config"],
        set=part.get("init_args", {}),
        published=published,
    )


class UEAReport(Report):
    """Report with the selection of checkpoints and the origin of the files."""

    def columns(self, run: Run, result: dict[str, Any]) -> dict[str, Any]:
        """Return protocol and hashes of the archive."""
        settings = run.task.settings
        told = result.get("report", {})
        return {
            **{key: settings[f"data.init_args.{key}"] for key in ("source", "select_on")},
            "batch_size": settings["data.init_args.batch_size"],
            "test_loss": told.get("test/loss"),
            "archive_version": told.get("archive_version"),
            **{f"sha256 {name}": sha for name, sha in sorted(run.task.files.items())},
        }

    def shown(self, entry: dict[str, Any]) -> dict[str, Any]:
        """Return the lowest seed and the selection."""
        lowest = "–" if entry["lowest"] != entry["lowest"] else f"{entry['lowest']:.2f}"
        return {
            "lowest": lowest,
            "checkpoint": ON_TEST if entry["selected_on_test"] else "held-out",
        }

    def text(self) -> list[str]:
        """Return how checkpoints were selected here and in the paper."""
        return [
            "Held-out: lowest loss on 20 % of the training file, stratified by class. Published "
            "numbers come from checkpoints that were selected on the test split. Hashes of the "
            "archives' files are in `rows.csv`."
        ]


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command; flags must be spelled out."""
    parser = Parser(f"python -m {MODULE}", __doc__)
    add = parser.add_argument
    add("--table", type=Path, default=TABLE, help="file with recipes and published numbers")
    add("--archives", nargs="+", help="archives, or `all` (default: those of the table)")
    add("--variants", nargs="+", help="names of the table, or names or files of configs/attention")
    add("--epochs", type=at_least(1), help="number of epochs, overriding the recipes")
    add("--source", choices=get_args(Source), default="released", help="bundled: from aeon")
    text = "test: select on test data, as in the papers; flagged in every result"
    add("--select_on", choices=get_args(Selection), default="val", help=text)
    add_flags(parser, out=OUT, accelerator="cpu")
    return parser


@reports(ConfigError, DataError)
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is that of `run` in `compare.command`, or 2 for misuse."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    options = make_parser().parse_args(arguments)
    table, unknown = make_table(
        options.table,
        place_of(options),
        archives=list(ARCHIVES) if options.archives == ["all"] else options.archives or (),
        variants=options.variants or (),
        epochs=options.epochs,
        source=options.source,
        select_on=options.select_on,
    )
    return run(table, options, arguments, module=MODULE, report=UEAReport, skipped=unknown)


if __name__ == "__main__":
    sys.exit(main())
