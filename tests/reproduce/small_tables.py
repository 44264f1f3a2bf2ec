"""The shipped tables with tiny tasks in place of the published ones, and text to read."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import yaml

from lit_probattn.configs import read_yaml
from tests.datamodules.text import made as made_text
from tests.support.paths import ROOT

_FOLDER = ROOT / "configs/reproduce"
_STEPS = {"trainer.max_steps": 4, "trainer.val_check_interval": 2, "run.checkpoint_every": 2}


def two_blocks(model: dict[str, Any]) -> None:
    """Reduce the configuration of a model, before it is built, to two of its equal blocks."""
    for key in ("num_layers", "num_encoder_layers", "num_decoder_layers"):
        if key in model["init_args"]:
            model["init_args"][key] = 2


def write_small(folder: Path, *names: str) -> list[str]:
    """Write some shipped tables over tiny tasks, and data; return the flags that name the folders.

    Shortened runs take four steps; metrics, rows and printed numbers stay as shipped, but that tiny
    windows move by less.

    Args:
        folder: of tables, data and runs.
        names: the tables, with those whose rows they name.
    """
    tables = folder / "tables"
    tables.mkdir(parents=True)
    shutil.copy(_FOLDER / "published.csv", tables)
    for name in names:
        (tables / f"{name}.yaml").write_text(yaml.safe_dump(read_yaml(_FOLDER / f"{name}.yaml")))
    tasks = read_yaml(_FOLDER / "tasks.yaml")
    for task in tasks.values():
        task["config"] = task["config"].replace("configs/tasks/", "configs/tasks/tiny/")
        task["shortened"] = _STEPS
    (tables / "tasks.yaml").write_text(yaml.safe_dump(tasks).replace("_stride112", "_stride4"))
    made_text.write(folder / "data")
    places = {"tables": tables, "runs": folder / "runs", "data_dir": folder / "data"}
    flags = [word for key, path in places.items() for word in (f"--{key}", str(path))]
    return [*flags, "--cache_dir", str(folder / "cache"), "--accelerator", "cpu"]
