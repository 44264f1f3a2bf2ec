"""Values, pairs and devices that cannot work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.bad_inputs.cases import Case, command_error, fit
from tests.datamodules.images.made import write_images
from tests.datamodules.text import made as made_text
from tests.support.paths import ROOT
from tests.support.runs import arguments, write_attention

ARGS = "model.init_args.attention.init_args"


def variant(cls: str, *more: str, **args: Any) -> Callable[[Path], str]:
    """A fit with an attention variant that does not fit."""

    def tell(folder: Path) -> str:
        attention = write_attention(folder, cls, **args)
        return command_error(arguments("fit", folder, *more, attention=attention))

    return tell


def model(**values: Any) -> Callable[[Path], str]:
    """A fit with model arguments."""
    return fit(*(w for k, v in values.items() for w in (f"--model.init_args.{k}", str(v))))


def data(**values: Any) -> Callable[[Path], str]:
    """A fit with data arguments."""
    return fit(*(w for k, v in values.items() for w in (f"--data.init_args.{k}", str(v))))


def training(**values: Any) -> Callable[[Path], str]:
    """A fit with trainer arguments."""
    return fit(*(w for k, v in values.items() for w in (f"--trainer.{k}", str(v))))


def _language_model(*more: str, text: bool = False) -> Callable[[Path], str]:
    """A language-model fit, with text or without."""

    def tell(folder: Path) -> str:
        if text:
            made_text.write(folder)
        task = str(ROOT / "configs/tasks/tiny/wikitext103_small.yaml")
        files = ["--config", task, "--config", write_attention(folder)]
        place = ["--data.init_args.data_dir", str(folder), "--run.root", str(folder / "runs")]
        return command_error(["fit", *files, *place, "--trainer.accelerator", "cpu", *more])

    return tell


def _values() -> Iterator[Case]:
    area = "Sizes and values"
    yield Case(area, "`num_heads 0`", fit(f"--{ARGS}.num_heads", "0"))
    yield Case(area, "`num_kv_heads 3` of 2 heads", fit(f"--{ARGS}.num_kv_heads", "3"))
    yield Case(area, "attention `dropout 1.0`", fit(f"--{ARGS}.dropout", "1.0"))
    yield Case(area, "an odd `rotary_dim`", fit(f"--{ARGS}.rotary_dim", "3"))
    yield Case(area, "`rotary_dim` above head_dim", fit(f"--{ARGS}.rotary_dim", "64"))
    yield Case(area, "`head_dim 0`", model(head_dim=0))
    yield Case(area, "`embed_dim 0`", model(embed_dim=0))
    yield Case(area, "`num_layers 0`", model(num_layers=0))
    yield Case(area, "`mlp_dim -1`", model(mlp_dim=-1))
    yield Case(area, "`dropout 1.5`", model(dropout=1.5))
    yield Case(area, "`lr -1`", model(lr=-1))
    yield Case(area, "`lr nan`", model(lr="nan"))
    yield Case(area, "`lr inf`", model(lr="inf"))
    yield Case(area, "`betas [0.9, 1.0]`", model(betas="[0.9, 1.0]"))
    yield Case(area, "`eps -1`", model(eps=-1))
    yield Case(area, "`weight_decay -1`", model(weight_decay=-1))
    yield Case(area, "`pooling median`", model(pooling="median"))
    yield Case(area, "`positions rotary` of a classifier", model(positions="rotary"))
    yield Case(
        area, "`positions sinusoidal` of an odd width", model(positions="sinusoidal", embed_dim=7)
    )
    yield Case(area, "`batch_size 0`", data(batch_size=0))
    yield Case(area, "`batch_size` above the data", data(batch_size=4096))
    yield Case(area, "`num_workers -1`", data(num_workers=-1))
    yield Case(area, "`num_test 0`", data(num_test=0))
    yield Case(area, "`max_length` below min_length", data(max_length=3))
    yield Case(area, "`vocab_size` too small", data(vocab_size=3))
    yield Case(area, "`max_steps -1`", training(max_steps=-1))
    yield Case(area, "`max_steps` beyond the schedule", training(max_steps=17))
    yield Case(area, "`warmup_steps` as long as the schedule", model(warmup_steps=16))
    yield Case(area, "`accumulate_grad_batches 3` of 8", training(accumulate_grad_batches=3))
    yield Case(area, "`accumulate_grad_batches 0`", training(accumulate_grad_batches=0))
    yield Case(area, "`val_check_interval 0`", training(val_check_interval=0))
    yield Case(area, "`max_epochs 2`", training(max_epochs=2))
    yield Case(area, "`limit_train_batches 0`", training(limit_train_batches=0))
    yield Case(area, "`gradient_clip_val -1`", training(gradient_clip_val=-1))
    yield Case(area, "`keep_checkpoints 1`", fit("--run.keep_checkpoints", "1"))
    yield Case(area, "`checkpoint_every 0`", fit("--run.checkpoint_every", "0"))
    yield Case(area, "a metric that is not logged", fit("--run.monitor", "val/accurracyy"))


def _test_split(folder: Path, name: str) -> str:
    """A fit with a callback that watches a metric of the test split."""
    path = folder / "watch.yaml"
    entry = {"class_path": f"lightning.pytorch.callbacks.{name}"}
    callback = {**entry, "init_args": {"monitor": "test/accuracy"}}
    path.write_text(yaml.safe_dump({"trainer": {"callbacks": [callback]}}))
    return command_error(arguments("fit", folder, "--config", str(path)))


def _chosen_by_test() -> Iterator[Case]:
    area = "The test split during training"
    during = "--run.test_during_training"
    yield Case(area, "`test_during_training 0`", fit(during, "0"))
    yield Case(area, "`test_during_training some`", fit(during, "some"))
    monitor = fit(during, "all", "--run.monitor", "test/accuracy")
    yield Case(area, "`monitor test/accuracy`", monitor)
    yield Case(area, "early stopping by it", lambda f: _test_split(f, "EarlyStopping"))
    yield Case(area, "a callback's checkpoints by it", lambda f: _test_split(f, "ModelCheckpoint"))
    for given, more in {
        "`parity_eval 0`": ("--data.init_args.parity_eval", "0"),
        "`parity_eval` of data that have no such evaluation": (
            *("--data", "datamodules.Synthetic"),
            *("--data.init_args.parity_eval", "62"),
        ),
    }.items():
        yield Case(area, given, lambda folder, more=more: _arena(folder, *more))


def _arena(folder: Path, *more: str) -> str:
    return command_error(arguments("fit", folder, "--data", "datamodules.ListOps", *more))


def _pairs() -> Iterator[Case]:
    area = "Impossible pairs"
    yield Case(
        area, "FiSH: 3 global of 2 local heads", variant("FiSHAttention", num_global_heads=3)
    )
    yield Case(area, "FiSH: no global head", variant("FiSHAttention", num_global_heads=0))
    yield Case(area, "FiSH: unknown mixer", variant("FiSHAttention", mixer="cubic"))
    yield Case(
        area,
        "FiSH: noise on scaled scores, mixed before scaling",
        variant("FiSHAttention", num_global_heads=1, noise_position="scaled"),
    )
    mixed = variant("FiSHAttention", mix_on="query")
    yield Case(area, "FiSH: noise where queries are mixed", mixed)
    yield Case(
        area,
        "FiSH: keys mixed after scaling",
        variant("FiSHAttention", mix_on="key", noise="none", scale_position="before"),
    )
    yield Case(area, "FiSH: mixed values", variant("FiSHAttention", mix_on="value"))
    yield Case(
        area,
        "a scale of the second of three components",
        variant("ReleasedMLKAttention", num_components=3, second_scale=2.0),
    )
    yield Case(area, "attention by layers in a shared block", _shared_by_layers)
    yield Case(
        area,
        "noisy FiSH on the fused reduction",
        variant("FiSHAttention", num_global_heads=1, backend="sdpa"),
    )
    yield Case(
        area,
        "dropout on the fused reduction",
        variant("SoftmaxAttention", dropout=0.1, backend="sdpa"),
    )
    yield Case(
        area,
        "hard E-step on the fused reduction",
        variant("MGKAttention", e_step="hard", backend="sdpa"),
    )
    yield Case(
        area,
        "variances by the M-step without densities",
        variant("MGKAttention", e_step="soft", m_step_variance=True),
    )
    yield Case(area, "a kernel on the CPU", variant("MGKAttention", backend="triton"))
    yield Case(area, "an unknown backend", variant("MGKAttention", backend="flash"))
    yield Case(area, "MGK: no component", variant("MGKAttention", num_components=0))
    yield Case(
        area,
        "MGK: three variances for two components",
        variant("MGKAttention", variance=[1.0, 2.0, 3.0]),
    )
    yield Case(area, "MGK: a variance of 0", variant("MGKAttention", variance=[1.0, 0.0]))
    yield Case(area, "MGK: unknown E-step", variant("MGKAttention", e_step="medium"))
    yield Case(
        area,
        "linear FiSH: 3 global of 2 local heads",
        variant("LinearFiSHAttention", num_global_heads=3),
    )
    yield Case(
        area,
        "linear attention: unknown feature map",
        variant("LinearAttention", feature_map="tanh"),
    )
    yield Case(
        area,
        "a model of text on pictures' data",
        _pictures,
    )
    yield Case(
        area,
        "rotary positions without rotary heads",
        _language_model("--model.init_args.positions", "rotary", text=True),
    )


def _pictures(folder: Path) -> str:
    write_images(folder)
    data = ["--data", "datamodules.ImageNet", "--data.init_args.data_dir", str(folder)]
    data += ["--data.init_args.image_size", "16"]
    return command_error(arguments("fit", folder, *data))


def _shared_by_layers(folder: Path) -> str:
    path = folder / "by_layers.yaml"
    default = {"class_path": "lit_probattn.attention.SoftmaxAttention"}
    default["init_args"] = {"num_heads": 2}
    short = {"default": default, "layers": {1: {"num_heads": 1}}}
    path.write_text(yaml.safe_dump({"model": {"init_args": {"attention": short}}}))
    more = ["--model.init_args.share_layers", "true"]
    return command_error(arguments("fit", folder, *more, attention=str(path)))


def _machine() -> Iterator[Case]:
    area = "Devices and folders"
    yield Case(area, "`accelerator gpu` without a GPU", training(accelerator="gpu"))
    yield Case(area, "`devices three`", training(devices="three"))
    yield Case(area, "`devices 0`", training(devices=0))
    yield Case(area, "`strategy dpp`", training(strategy="dpp"))
    yield Case(area, "two nodes, started alone", training(num_nodes=2, strategy="ddp"))
    yield Case(area, "the folder of runs is a file", _file_for_runs)
    yield Case(area, "the version exists", _version_exists)
    yield Case(area, "the cache's folder is a file", _file_for_cache)
    yield Case(area, "no text in `data_dir`", _language_model())


def _file_for_runs(folder: Path) -> str:
    (folder / "runs").touch()
    return command_error(arguments("fit", folder))


def _version_exists(folder: Path) -> str:
    checkpoints = folder / "runs/mine/0/checkpoints"
    checkpoints.mkdir(parents=True)
    (checkpoints / "step-00000001.ckpt").touch()
    return command_error(arguments("fit", folder, "--run.name", "mine", "--run.version", "0"))


def _file_for_cache(folder: Path) -> str:
    (folder / "cache").touch()
    data = ["--data", "datamodules.ListOps", "--data.init_args.cache_dir", str(folder / "cache")]
    sizes = {"num_train": 9, "num_val": 1, "num_test": 1, "min_length": 5, "max_length": 20}
    more = [w for k, v in sizes.items() for w in (f"--data.init_args.{k}", str(v))]
    return command_error(arguments("fit", folder, *data, *more))


def cases() -> Iterator[Case]:
    """Values, pairs, machine."""
    yield from _values()
    yield from _chosen_by_test()
    yield from _pairs()
    yield from _machine()
