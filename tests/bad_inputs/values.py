"""Values, pairs and devices that cannot work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from tests.bad_inputs.cases import Case, command_error, fit, on_folder
from tests.datamodules.images.made import write_images
from tests.datamodules.text import made as made_text
from tests.support.runs import arguments, run, write_attention

ARGS = "model.init_args.attention.init_args"


@on_folder
def variant(folder: Path, cls: str, *more: str, **args: Any) -> str:
    """A fit with an attention variant that does not fit."""
    attention = write_attention(folder, cls, **args)
    return command_error(arguments("fit", folder, *more, attention=attention))


def model(**values: Any) -> Callable[[Path], str]:
    """A fit with model arguments."""
    return fit(*(w for k, v in values.items() for w in (f"--model.init_args.{k}", str(v))))


def data(**values: Any) -> Callable[[Path], str]:
    """A fit with data arguments."""
    return fit(*(w for k, v in values.items() for w in (f"--data.init_args.{k}", str(v))))


def training(**values: Any) -> Callable[[Path], str]:
    """A fit with trainer arguments."""
    return fit(*(w for k, v in values.items() for w in (f"--trainer.{k}", str(v))))


@on_folder
def _language_model(folder: Path, *more: str, text: bool = False) -> str:
    """A language-model fit, with text or without."""
    if text:
        made_text.write(folder)
    given = {"task": "tiny/wikitext103_small", "data_dir": folder}
    return command_error(arguments("fit", folder, *more, **given))


def _values() -> Iterator[Case]:
    case = partial(Case, "Sizes and values")
    yield case("`num_heads 0`", fit(f"--{ARGS}.num_heads", "0"))
    yield case("`num_kv_heads 3` of 2 heads", fit(f"--{ARGS}.num_kv_heads", "3"))
    yield case("attention `dropout 1.0`", fit(f"--{ARGS}.dropout", "1.0"))
    yield case("an odd `rotary_dim`", fit(f"--{ARGS}.rotary_dim", "3"))
    yield case("`rotary_dim` above head_dim", fit(f"--{ARGS}.rotary_dim", "64"))
    yield case("`head_dim 0`", model(head_dim=0))
    yield case("`embed_dim 0`", model(embed_dim=0))
    yield case("`num_layers 0`", model(num_layers=0))
    yield case("`mlp_dim -1`", model(mlp_dim=-1))
    yield case("`dropout 1.5`", model(dropout=1.5))
    yield case("`lr -1`", model(lr=-1))
    yield case("`lr nan`", model(lr="nan"))
    yield case("`lr inf`", model(lr="inf"))
    yield case("`betas [0.9, 1.0]`", model(betas="[0.9, 1.0]"))
    yield case("`eps -1`", model(eps=-1))
    yield case("`weight_decay -1`", model(weight_decay=-1))
    yield case("`pooling median`", model(pooling="median"))
    yield case("`positions rotary` of a classifier", model(positions="rotary"))
    yield case("`positions sinusoidal` of an odd width", model(positions="sinusoidal", embed_dim=7))
    yield case("`batch_size 0`", data(batch_size=0))
    yield case("`batch_size` above the data", data(batch_size=4096))
    yield case("`num_workers -1`", data(num_workers=-1))
    yield case("`num_test 0`", data(num_test=0))
    yield case("`max_length` below min_length", data(max_length=3))
    yield case("`vocab_size` too small", data(vocab_size=3))
    yield case("`max_steps -1`", training(max_steps=-1))
    yield case("`max_steps` beyond the schedule", training(max_steps=17))
    yield case("`warmup_steps` as long as the schedule", model(warmup_steps=16))
    thirds = {"accumulate_grad_batches": 3, "val_check_interval": 9}
    yield case("`accumulate_grad_batches 3` of 8", training(**thirds))
    parts = {"accumulate_grad_batches": 2, "val_check_interval": 5}
    yield case("`val_check_interval 5` of steps of 2 parts", training(**parts))
    overfitted = {"accumulate_grad_batches": 2, "overfit_batches": 3}
    yield case("`overfit_batches 3` of steps of 2 parts", training(**overfitted))
    yield case("`accumulate_grad_batches 0`", training(accumulate_grad_batches=0))
    yield case("`val_check_interval 0`", training(val_check_interval=0))
    yield case("`max_epochs 2`", training(max_epochs=2))
    yield case("`limit_train_batches 0`", training(limit_train_batches=0))
    yield case("`limit_train_batches 3`", training(limit_train_batches=3))
    yield case("`limit_train_batches 0.5`", training(limit_train_batches=0.5))
    yield case("`limit_train_batches 1`", training(limit_train_batches=1))
    yield case("`gradient_clip_val -1`", training(gradient_clip_val=-1))
    yield case("`keep_checkpoints 1`", fit("--run.keep_checkpoints", "1"))
    yield case("`checkpoint_every 0`", fit("--run.checkpoint_every", "0"))
    yield case("a metric that is not logged", fit("--run.monitor", "val/accurracyy"))
    stopping = partial(_watching, name="EarlyStopping", metric="val/accurracyy")
    yield case("early stopping by a metric that is not logged", stopping)
    unchecked = ("--trainer.num_sanity_val_steps", "0")
    given = "early stopping by it, without a validation before training"
    yield case(given, lambda f: stopping(f, *unchecked))


def _watching(folder: Path, *more: str, name: str, metric: str = "test/accuracy") -> str:
    """A fit with a callback that watches a metric."""
    path = folder / "watch.yaml"
    entry = {"class_path": f"lightning.pytorch.callbacks.{name}"}
    callback = {**entry, "init_args": {"monitor": metric}}
    path.write_text(yaml.safe_dump({"trainer": {"callbacks": [callback]}}))
    return command_error(arguments("fit", folder, "--config", str(path), *more))


def _chosen_by_test() -> Iterator[Case]:
    case = partial(Case, "The test split during training")
    during = "--run.test_during_training"
    yield case("`test_during_training 0`", fit(during, "0"))
    yield case("`test_during_training some`", fit(during, "some"))
    monitor = fit(during, "all", "--run.monitor", "test/accuracy")
    yield case("`monitor test/accuracy`", monitor)
    yield case("early stopping by it", partial(_watching, name="EarlyStopping"))
    yield case("a callback's checkpoints by it", partial(_watching, name="ModelCheckpoint"))
    for given, more in {
        "`parity_eval 0`": ("--data.init_args.parity_eval", "0"),
        "`parity_eval` of data that have no such evaluation": (
            *("--data", "datamodules.Synthetic"),
            *("--data.init_args.parity_eval", "62"),
        ),
    }.items():
        yield case(given, lambda folder, more=more: _arena(folder, *more))


def _arena(folder: Path, *more: str) -> str:
    return command_error(arguments("fit", folder, "--data", "datamodules.ListOps", *more))


def _pairs() -> Iterator[Case]:
    case = partial(Case, "Impossible pairs")
    yield case("FiSH: 3 global of 2 local heads", variant("FiSHAttention", num_global_heads=3))
    yield case("FiSH: no global head", variant("FiSHAttention", num_global_heads=0))
    yield case("FiSH: unknown mixer", variant("FiSHAttention", mixer="cubic"))
    yield case(
        "FiSH: noise on scaled scores, mixed before scaling",
        variant("FiSHAttention", num_global_heads=1, noise_position="scaled"),
    )
    mixed = variant("FiSHAttention", mix_on="query")
    yield case("FiSH: noise where queries are mixed", mixed)
    yield case(
        "FiSH: keys mixed after scaling",
        variant("FiSHAttention", mix_on="key", noise="none", scale_position="before"),
    )
    yield case("FiSH: mixed values", variant("FiSHAttention", mix_on="value"))
    yield case(
        "a scale of the second of three components",
        variant("ReleasedMLKAttention", num_components=3, second_scale=2.0),
    )
    yield case("attention by layers in a shared block", _shared_by_layers)
    yield case(
        "noisy FiSH on the fused reduction",
        variant("FiSHAttention", num_global_heads=1, backend="sdpa"),
    )
    yield case(
        "dropout on the fused reduction", variant("SoftmaxAttention", dropout=0.1, backend="sdpa")
    )
    yield case(
        "hard E-step on the fused reduction", variant("MGKAttention", e_step="hard", backend="sdpa")
    )
    yield case(
        "variances by the M-step without densities",
        variant("MGKAttention", e_step="soft", m_step_variance=True),
    )
    yield case("a kernel on the CPU", variant("MGKAttention", backend="triton"))
    yield case("an unknown backend", variant("MGKAttention", backend="flash"))
    yield case("MGK: no component", variant("MGKAttention", num_components=0))
    yield case(
        "MGK: three variances for two components", variant("MGKAttention", variance=[1.0, 2.0, 3.0])
    )
    yield case("MGK: a variance of 0", variant("MGKAttention", variance=[1.0, 0.0]))
    yield case("MGK: unknown E-step", variant("MGKAttention", e_step="medium"))
    yield case(
        "linear FiSH: 3 global of 2 local heads", variant("LinearFiSHAttention", num_global_heads=3)
    )
    yield case(
        "linear attention: unknown feature map", variant("LinearAttention", feature_map="tanh")
    )
    yield case("a model of text on pictures' data", _pictures)
    yield case("`predict` of a masked language model", _predict_masked)
    yield case(
        "rotary positions without rotary heads",
        _language_model("--model.init_args.positions", "rotary", text=True),
    )


def _pictures(folder: Path) -> str:
    write_images(folder)
    data = ["--data", "datamodules.ImageNet", "--data.init_args.data_dir", str(folder)]
    data += ["--data.init_args.image_size", "16"]
    return command_error(arguments("fit", folder, *data))


def _predict_masked(folder: Path) -> str:
    made_text.write(folder)
    given = {"data_dir": folder, "cache_dir": folder / "cache"}
    words = arguments("fit", folder, task="tiny/masked_lm", **given)
    run([*words, "--trainer.max_steps", "1", "--trainer.limit_val_batches", "0"])
    # The data report words that their vocabulary lacks.
    return command_error(["predict", *words[1:], "--ckpt_path", "last"], alone=False)


def _shared_by_layers(folder: Path) -> str:
    path = folder / "by_layers.yaml"
    default = {"class_path": "lit_probattn.attention.SoftmaxAttention"}
    default["init_args"] = {"num_heads": 2}
    short = {"default": default, "layers": {1: {"num_heads": 1}}}
    path.write_text(yaml.safe_dump({"model": {"init_args": {"attention": short}}}))
    more = ["--model.init_args.share_layers", "true"]
    return command_error(arguments("fit", folder, *more, attention=str(path)))


def _machine() -> Iterator[Case]:
    case = partial(Case, "Devices and folders")
    yield case("`accelerator gpu` without a GPU", training(accelerator="gpu"))
    yield case("`devices three`", training(devices="three"))
    yield case("`devices 0`", training(devices=0))
    yield case("`strategy dpp`", training(strategy="dpp"))
    yield case("`strategy ddp_spawn`", training(strategy="ddp_spawn"))
    yield case("two nodes, started alone", training(num_nodes=2, strategy="ddp"))
    yield case("the folder of runs is a file", _file_for_runs)
    yield case("the version exists", _version_exists)
    yield case("the cache's folder is a file", _file_for_cache)
    yield case("no text in `data_dir`", _language_model())


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
