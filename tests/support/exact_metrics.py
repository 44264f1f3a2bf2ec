"""Accuracy and perplexity for 1, 2 and 3 processes, on test sets that 2 and 3 do not divide.

    python -m tests.support.exact_metrics

trains a small classifier and a small language model, scores each test set with every number of
processes, and prints what each one found. Accuracies and counts are equal bit for bit. So are
perplexities up to the order of a sum of float64.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lit_probattn.cli.app import main
from tests.datamodules.text import made as made_text
from tests.support.caches import keep_out_of_the_users_cache
from tests.support.runs import arguments, in_ranks, only_version, write_attention

WORLD_SIZES = (1, 2, 3)
NUM_TEST = 23
# In float64 what is left of a difference is the order of a sum. In float32 the rows of a batch may
# round differently in another batch.
PRECISIONS = ("64-true", "32-true")


@dataclass(frozen=True)
class Score:
    """What one number of processes found.

    Args:
        task: `classifier` or `language model`.
        precision: of the trainer.
        num_samples: samples of the test set.
        world_size: processes.
        values: name of a metric -> value.
    """

    task: str
    precision: str
    num_samples: int
    world_size: int
    values: dict[str, float]


def classifier(folder: Path) -> list[str]:
    """Command line without the command: the tiny Text task, 23 test samples."""
    attention = write_attention(folder, "MGKAttention", e_step="soft")
    return arguments("", folder, attention=attention, num_test=NUM_TEST)[1:]


def language_model(folder: Path) -> list[str]:
    """The tiny WikiText task on a made text, scored by sliding windows."""
    made_text.write(folder / "text", test="".join(made_text.lines(16, 19)))
    return arguments("", folder, task="tiny/wikitext103_small", data_dir=folder / "text")[1:]


TASKS = {"classifier": classifier, "language model": language_model}


def scores(
    task: str,
    folder: Path,
    precision: str,
    world_sizes: Sequence[int] = WORLD_SIZES,
    steps: int = 4,
) -> list[Score]:
    """Train one task, and score its test set with every number of processes."""
    folder.mkdir(parents=True, exist_ok=True)
    short = ("--trainer.max_steps", str(steps), "--trainer.val_check_interval", str(steps))
    command = [*TASKS[task](folder), *short, "--trainer.precision", precision]
    _succeed(["fit", *command], 1)
    found = []
    for world_size in world_sizes:
        _succeed(["test", "--ckpt_path", "last", *command], world_size)
        (path,) = only_version(folder).glob("test-*.json")
        values = {
            k: v
            for k, v in json.loads(path.read_text(encoding="utf-8")).items()
            if k.startswith("test/")
        }
        path.unlink()
        num_samples = NUM_TEST if task == "classifier" else int(values["test/tokens_sliding"])
        found.append(Score(task, precision, num_samples, world_size, values))
    return found


def _succeed(command: list[str], world_size: int) -> None:
    devices = ["--trainer.devices", str(world_size)]
    if world_size > 1:
        devices += ["--trainer.strategy", "ddp"]
    if command.count("--trainer.devices"):
        place = command.index("--trainer.devices")
        command = command[:place] + command[place + 2 :]
    codes = in_ranks(lambda: main([*command, *devices]), world_size)
    assert set(codes) == {0}, codes


def table(found: list[Score]) -> str:
    """Markdown table of scores, with the relative difference from one process."""
    lines = [
        "| task | precision | test samples | processes | metric | value | relative difference |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for score in found:
        same = [s for s in found if (s.task, s.precision) == (score.task, score.precision)]
        alone = next(s for s in same if s.world_size == 1)
        for name, value in score.values.items():
            gap = abs(value - alone.values[name]) / max(abs(alone.values[name]), 1e-300)
            lines.append(
                f"| {score.task} | {score.precision} | {score.num_samples} | {score.world_size} | "
                f"{name} | {value!r} | {gap:.1e} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    keep_out_of_the_users_cache()
    with tempfile.TemporaryDirectory() as name:
        results = [
            score
            for precision in PRECISIONS
            for task in TASKS
            for score in scores(task, Path(name) / f"{task[:8]}-{precision}", precision)
        ]
    print(table(results))
    sys.exit(0)
