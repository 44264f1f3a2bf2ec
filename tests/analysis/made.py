"""Checkpoints of small models of every task, made without training, and a trained translator."""

from __future__ import annotations

import argparse
import copy
import functools
import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml

from lit_probattn.analysis import study
from lit_probattn.analysis.recording import LayerCall
from lit_probattn.configs import SIZES_OF_DATA, instantiate, link_sizes, read_yaml
from lit_probattn.training import trained
from lit_probattn.training.checkpoints import save_checkpoint
from tests.datamodules.images.made import write_images
from tests.datamodules.lra.files import write_pairs
from tests.datamodules.text import made as made_text
from tests.datamodules.text.fine_tuning.made import write_squad
from tests.support import runs
from tests.support.caches import scratch_folder
from tests.support.paths import ROOT

_OPENED: dict[str, trained.Trained] = {}
FILES = {
    "sequence": "lra_text",
    "pair": "lra_retrieval",
    "picture": "imagenet_swin_tiny",
    "series": "uea",
    "text": "wikitext103_small",
    "masked": "masked_lm",
    "value_aware": "wikitext103_value_aware",
    "squad": "squad",
    "translation": "translation",
    "decision": "d4rl",
}


def data_options(task: str, folder: Path) -> dict[str, Any]:
    """Write what a task reads; return the DataModule's arguments."""
    if task == "pair":
        write_pairs(folder, train=16, val=6, test=6)
    elif task == "picture":
        write_images(folder, 3, 3, tuple(f"n{i:02d}" for i in range(7)))
    elif task in ("text", "masked", "value_aware"):
        made_text.write(folder)
    elif task == "squad":
        write_squad(folder / "squad")
    elif task == "sequence":
        return {"num_train": 16, "num_val": 12, "num_test": 10}
    return {"data_dir": str(folder), "cache_dir": str(folder / "cache")}


def checkpoint(folder: Path, task: str, cls: str, spread: float = 0.3, **attention: Any) -> Path:
    """Write the checkpoint of a run in `folder`/run; weights are moved so that all of them count.

    Args:
        folder: for the run; runs of equal arguments share their data.
        task: a name of `FILES`.
        cls: attention class.
        spread: standard deviation of what is added to the weights.
        attention: the class's arguments; `num_heads` is 4 unless given.
    """
    made = _made(task, cls, spread, tuple(attention.items()))
    copied = Path(shutil.copytree(made.parents[1], folder / "run"))
    return copied / made.relative_to(made.parents[1])


@functools.cache
def _made(task: str, cls: str, spread: float, attention: tuple[tuple[str, Any], ...]) -> Path:
    folder = scratch_folder("lit-probattn-made-")
    config = read_yaml(ROOT / f"configs/tasks/tiny/{FILES[task]}.yaml")
    options = {"num_heads": 4, **dict(attention)}
    entry = {"class_path": f"lit_probattn.attention.{cls}", "init_args": options}
    config["model"]["init_args"]["attention"] = entry
    config["data"]["init_args"].update(data_options(task, folder / "data"))
    return write_checkpoint(folder / "run", config, spread)


def write_checkpoint(run: Path, config: dict[str, Any], spread: float = 0.3) -> Path:
    """Write a configuration and the checkpoint of its model, without training, as a run folder."""
    data = instantiate(pl.LightningDataModule, config["data"])
    data.prepare_data()
    data.setup("fit")
    model = copy.deepcopy(config["model"])
    link_sizes(model, data)
    sizes = {k: v for k, v in model["init_args"].items() if k in SIZES_OF_DATA}
    torch.manual_seed(0)
    module = instantiate(pl.LightningModule, model)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * spread)
    (run / "checkpoints").mkdir(parents=True, exist_ok=True)
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    path = run / "checkpoints" / "step-00000007.ckpt"
    content = {"state_dict": module.state_dict(), "global_step": 7, "hyper_parameters": sizes}
    save_checkpoint(content, path)
    return path


def train_translator(folder: Path, steps: int, cls: str = "SoftmaxAttention", **args: Any) -> Path:
    """Train the tiny translation task, with a checkpoint half-way; return the run folder."""
    short = ("--trainer.max_steps", str(steps), "--trainer.val_check_interval", str(steps))
    short += ("--trainer.limit_val_batches", "1", "--trainer.num_sanity_val_steps", "0")
    short += ("--run.checkpoint_every", str(steps // 2), "--model.init_args.lr", "0.02")
    given = {"cache_dir": folder / "cache", "num_test": 11, "num_val": 11}
    given["attention"] = runs.write_attention(folder, cls, **args)
    runs.run(runs.arguments("fit", folder, *short, task="tiny/translation", **given))
    return runs.only_version(folder)


@functools.cache
def translator() -> Path:
    """The run folder of a translator that is trained once per process."""
    return train_translator(scratch_folder("lit-probattn-translator-"), 16)


def open_once(patch: pytest.MonkeyPatch) -> None:
    """Restore the model and the data of a checkpoint once per process; each call has a copy."""
    restore = trained.open_trained

    def opened(options: argparse.Namespace, **more: Any) -> trained.Trained:
        path = trained.find_file(options.checkpoint)
        key = str(
            (path, path.stat().st_mtime_ns, options.config, options.data, options.device, more)
        )
        if key not in _OPENED:
            _OPENED[key] = restore(options, **more)
        return copy.deepcopy(_OPENED[key])

    patch.setattr(trained, "open_trained", opened)
    patch.setattr(study, "open_trained", opened)


def opened(path: Path) -> trained.Trained:
    """Restore a checkpoint on the CPU, as the commands do."""
    options = {"checkpoint": path, "config": None, "data": [], "device": "cpu"}
    return trained.open_trained(argparse.Namespace(**options))


def change(path: Path, ending: str, value: Any) -> None:
    """Set every parameter of a checkpoint whose name ends so to a value (or a tensor)."""
    content = torch.load(path, weights_only=True)
    names = [name for name in content["state_dict"] if name.endswith(ending)]
    assert names
    for name in names:
        content["state_dict"][name][:] = torch.as_tensor(value)
    save_checkpoint(content, path)


def layer_call(layer: Any, length: int = 11, sequences: int = 2, **options: Any) -> LayerCall:
    """A call of a layer on random inputs in float64."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(sequences, length, layer.embed_dim, generator=generator, dtype=torch.float64)
    return LayerCall("layer", layer.double().eval(), x, **options)
