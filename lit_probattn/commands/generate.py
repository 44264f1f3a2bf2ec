"""Continue prompts with a trained language model, from a run folder or a checkpoint.

    lit-probattn generate runs/NAME/0 --prompt "The game"
    lit-probattn generate runs/NAME/0 --prompt "The game" --prompt "In 1900" --top_k 20 --seed 1

`lit-probattn predict` generates the same text with the same settings and `--seed_everything`. A run
folder means its best checkpoint, or its newest if it has no validation. The configuration of the
model and the vocabulary come from the run's config.yaml.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_probattn.analysis.options import add_run
from lit_probattn.base.arguments import Parser, at_least
from lit_probattn.base.errors import ConfigError
from lit_probattn.commands.opened import (
    add_checkpoint,
    add_draw,
    check_table,
    sampling_of,
)

if TYPE_CHECKING:
    import torch

    from lit_probattn.training.trained import Trained

MAX_NEW_TOKENS = 64


def make_parser() -> argparse.ArgumentParser:
    """Return the parser."""
    parser = Parser("lit-probattn generate", __doc__)
    add = parser.add_argument
    add_checkpoint(parser)
    add(
        "--prompt",
        action="append",
        required=True,
        metavar="TEXT",
        help="text to continue; can be repeated",
    )
    add(
        "--max_new_tokens",
        type=at_least(1),
        help=f"number of tokens to generate per prompt (default {MAX_NEW_TOKENS}, or what fits)",
    )
    text = "divisor of the logits; 0 selects the likeliest token"
    add("--temperature", type=float, default=0.8, help=text)
    add_draw(parser)
    text = "keep at most N keys in the cache of each layer"
    add("--max_keys", type=at_least(1), metavar="N", help=text)
    add(
        "--evict_by",
        choices=("movement", "weight", "age"),
        help="key that a full cache evicts: the one whose removal changes the attention output "
        "least (movement, the default), the one with the smallest weight, or the oldest (age)",
    )
    add("--out", type=Path, metavar="FILE.parquet", help="also write token ids and text")
    add_run(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the texts; return the exit status: 2 for a user error, with one line."""
    options = make_parser().parse_args(arguments)
    from lit_probattn.cli.errors import exit_status, quieten

    quieten()
    return exit_status(lambda: run(options))


def run(options: argparse.Namespace) -> None:
    """Restore the model, continue the prompts, print them and write the table.

    Raises:
        ConfigError: a flag is invalid, or the run is not of a language model.
    """
    from lit_probattn.commands.bounded_cache import CacheBound, bounded_caches
    from lit_probattn.training.callbacks import PredictionWriter

    if options.evict_by is not None and options.max_keys is None:
        raise ConfigError("--evict_by requires a bounded cache: add --max_keys N")
    if options.out is not None:
        check_table(options.out)
    sampling = sampling_of(options)
    trained = _open(options)
    trained.task.sampling = sampling
    trained.task.max_new_tokens = _new_tokens(trained, options)
    if options.max_keys is not None:
        bound = CacheBound(options.max_keys, options.evict_by or "movement")
        make_caches = partial(bounded_caches, trained.task.model.encoder, bound)
        try:
            make_caches()
        except NotImplementedError as error:
            raise ConfigError(f"--max_keys: {error}".replace("the bound", "--max_keys")) from error
        trained.task.make_caches = make_caches
    writer = [PredictionWriter(options.out)] if options.out else []
    with _without_notes():
        trainer = _trainer(trained.config, trained.device, writer)
        trainer.predict(trained.task, datamodule=trained.data, return_predictions=False)
    if options.out:
        print(f"table: {options.out}")


def _open(options: argparse.Namespace) -> Trained:
    """Restore a language model and its data, which contain the prompts."""
    from lit_probattn.configs import class_of, parameters_of, read_config
    from lit_probattn.tasks import LanguageModeling
    from lit_probattn.tasks.language_model import check_vocabulary
    from lit_probattn.training.checkpoints import find_file, load_checkpoint
    from lit_probattn.training.trained import open_trained

    checkpoint = find_file(options.checkpoint)
    config = read_config(checkpoint, options.config)
    task, data = (class_of(config[part]["class_path"]) for part in ("model", "data"))
    if not (isinstance(task, type) and issubclass(task, LanguageModeling)):
        raise ConfigError(
            f"{options.checkpoint} is a run of {task.__name__}, which does not generate text: pass "
            "a run of a language model (lit_probattn.tasks.LanguageModeling)"
        )
    if "prompts" not in parameters_of(data) or not hasattr(data, "vocabulary"):
        raise ConfigError(
            f"{options.checkpoint} was trained on {data.__name__}, which does not support prompts: "
            "expected data with an argument `prompts` and a `vocabulary`, such as "
            "datamodules.WikiText103"
        )
    prompts = f"prompts={json.dumps(options.prompt)}"  # in YAML, 1e3 would be a number
    pairs = ["num_workers=0", *options.data, prompts]
    wanted = {"checkpoint": checkpoint, "data": pairs}
    trained = open_trained(argparse.Namespace(**{**vars(options), **wanted}))
    check_vocabulary(load_checkpoint(checkpoint), trained.data, "--data.vocab_file FILE")
    return trained


def _new_tokens(trained: Trained, options: argparse.Namespace) -> int:
    """Return the number of tokens to generate; print a line if the default does not fit.

    Raises:
        ConfigError: a prompt is empty or too long, or the requested number does not fit.
    """
    most, longest = trained.task.model.max_seq_len, 0
    for text in options.prompt:
        ids, unknown = trained.data.vocabulary.encode(text)
        if not len(ids):
            raise ConfigError(f"--prompt {text!r} is empty: expected at least one word")
        if len(ids) > most:
            raise ConfigError(
                f"--prompt {text[:40]!r} has {len(ids)} tokens, but the model's max_seq_len is "
                f"{most}: shorten it"
            )
        if unknown:
            reason = (
                f"{unknown} of {len(ids)} words are missing from the vocabulary and became <unk>"
            )
            print(f"--prompt {text[:40]!r}: {reason}", file=sys.stderr)
        longest = max(longest, len(ids))
    fits = most - longest + 1  # the last new token is never fed back
    if options.max_new_tokens is None:
        if fits < MAX_NEW_TOKENS:
            reason = f"the model's max_seq_len is {most}, the longest prompt has {longest} tokens"
            print(f"--max_new_tokens {fits}: {reason}", file=sys.stderr)
        return min(MAX_NEW_TOKENS, fits)
    if options.max_new_tokens > fits:
        raise ConfigError(
            f"--max_new_tokens {options.max_new_tokens} does not fit: the model's max_seq_len is "
            f"{most} and the longest prompt has {longest} tokens; expected at most {fits}"
        )
    return int(options.max_new_tokens)


@contextmanager
def _without_notes() -> Iterator[None]:
    """Suppress the trainer's messages about available devices."""
    loggers = [logging.getLogger(f"lightning.{name}") for name in ("pytorch", "fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _trainer(config: dict[str, Any], device: torch.device, callbacks: list[Any]) -> Any:
    """Return a single-device trainer with the run's precision and without output files."""
    import lightning.pytorch as pl

    return pl.Trainer(
        accelerator=device.type,
        devices=1 if device.type == "cpu" else [device.index or 0],
        precision=(config.get("trainer") or {}).get("precision"),
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )


if __name__ == "__main__":
    sys.exit(main())
