"""The command line: random values under real keys, wrong keys, files of random YAML."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import warnings
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from lit_probattn.cli.app import main
from tests.fuzzing.targets import Target
from tests.support.runs import arguments, write_attention

ATTENTION = "model.init_args.attention.init_args"
CLASSES = ("SoftmaxAttention", "MGKAttention", "MLKAttention", "FiSHAttention")
CLASSES += ("LinearAttention", "LinearFiSHAttention")
KEYS = (
    *(f"{ATTENTION}.{k}" for k in ("num_heads", "dropout", "backend", "num_components", "e_step")),
    *(f"{ATTENTION}.{k}" for k in ("num_global_heads", "mixer", "noise", "feature_map", "bias")),
    *(f"{ATTENTION}.{k}" for k in ("num_kv_heads", "value_head_dim", "rotary_dim", "variance")),
    *(
        f"model.init_args.{k}"
        for k in ("embed_dim", "head_dim", "num_layers", "mlp_dim", "pooling")
    ),
    *(f"model.init_args.{k}" for k in ("lr", "betas", "eps", "weight_decay", "dropout")),
    *(f"model.init_args.{k}" for k in ("schedule", "warmup_steps", "schedule_steps", "compiled")),
    *(f"data.init_args.{k}" for k in ("batch_size", "eval_batch_size", "num_train", "num_val")),
    *(f"data.init_args.{k}" for k in ("min_length", "max_length", "vocab_size", "num_classes")),
    *(f"data.init_args.{k}" for k in ("pad_to", "pad_multiple", "seed", "data_seed", "batchsize")),
    *(f"trainer.{k}" for k in ("max_steps", "accumulate_grad_batches", "val_check_interval")),
    *(f"trainer.{k}" for k in ("precision", "gradient_clip_val", "limit_val_batches", "devices")),
    *(f"trainer.{k}" for k in ("num_sanity_val_steps", "log_every_n_steps", "strategy", "plugins")),
    *(f"run.{k}" for k in ("name", "version", "checkpoint_every", "keep_checkpoints", "monitor")),
    *("run.monitor_mode", "seed_everything", "ckpt_path", "nonsense", "model.class_path", "data"),
)
# Small, so that whatever is accepted is trained in no time.
VALUES = st.one_of(
    st.integers(-3, 40),
    st.sampled_from([0.0, 0.5, 1.0, -0.5, 1e-300, 1e300, float("nan"), float("inf")]),
    st.sampled_from([None, True, False, "", "auto", "none", "sdpa", "linear", "soft", "x" * 300]),
    st.sampled_from(
        ["constant", "16-mixed", "bf16-mixed", "64-true", "é\n", "../..", "{", "[1", "0"]
    ),
    st.lists(st.integers(-1, 3), max_size=3),
    st.dictionaries(
        st.sampled_from(["a", "class_path", "init_args"]), st.integers(0, 2), max_size=2
    ),
)
# Never reached from outside: they would start processes or take a real device.
SKIPPED = {("trainer.devices", n) for n in range(2, 41)}


def check_flags(example: tuple[str, list[tuple[str, Any]]], folder: Path) -> str:
    """A training command with some keys set to some values on the command line."""
    cls, pairs = example
    if any((key, value) in SKIPPED for key, value in pairs if isinstance(value, int)):
        return "skipped"
    more = [word for key, value in pairs for word in (f"--{key}", _written(value))]
    return _answer(folder, cls, more)


def check_files(example: tuple[str, list[tuple[str, Any]]], folder: Path) -> str:
    """The same in a file."""
    cls, pairs = example
    if any((key, value) in SKIPPED for key, value in pairs if isinstance(value, int)):
        return "skipped"
    content: dict[str, Any] = {}
    for key, value in pairs:
        place = content
        *parts, last = key.split(".")
        for part in parts:
            below = place.setdefault(part, {})
            place = below if isinstance(below, dict) else {}
        place[last] = value
    (folder / "more.yaml").write_text(json.dumps(content))
    return _answer(folder, cls, ["--config", str(folder / "more.yaml")])


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _answer(folder: Path, cls: str, more: list[str]) -> str:
    told = io.StringIO()
    attention = write_attention(folder, cls)
    short = ["--trainer.max_steps", "1", "--trainer.limit_val_batches", "1"]
    short += ["--model.init_args.warmup_steps", "0", "--model.init_args.num_layers", "1"]
    short += ["--data.init_args.num_train", "16"]
    command = arguments("fit", folder, *short, *more, attention=attention)
    logging.disable(logging.WARNING)
    silent = contextlib.redirect_stdout(io.StringIO())
    with silent, contextlib.redirect_stderr(told), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        status = main(command)
    logging.disable(logging.NOTSET)
    lines = [line for line in told.getvalue().splitlines() if line.startswith("error")]
    assert status in (0, 1, 2), f"exit status {status}"
    assert len(lines) == (status != 0), told.getvalue()
    assert not lines or len(lines[0]) > len("error: ") + 5
    return "refused" if status else "accepted"


_PAIRS = st.lists(st.tuples(st.sampled_from(KEYS), VALUES), min_size=1, max_size=3)
_INPUTS = st.tuples(st.sampled_from(CLASSES), _PAIRS)
FLAGS = Target("flags", _INPUTS, check_flags)
FILES = Target("configs", _INPUTS, check_files)
