"""Predict the cost of every variant at given sizes, as a ranked table.

    lit-probattn ask --embed_dim 512 --seq_len 4096 --num_heads 8 --batch 8
    lit-probattn ask --model timm:vit_small_patch16_224 --swap mgk --heads 0.5

The costs are those of one attention layer in float32, with the same attention dropout for all
variants. Parameters and multiply-adds follow from the equation; memory is predicted on fake tensors
without allocation. `--num_heads` is the number of heads of softmax attention; every variant has the
ratio of heads in its configuration (MGK one half), and the same head size.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from lit_probattn.base.allowed_code import add_flag
from lit_probattn.base.arguments import Parser, at_least
from lit_probattn.base.errors import ConfigError, nearest, reports
from lit_probattn.base.progress import aligned
from lit_probattn.commands.ask.layers import (
    Answer,
    Question,
    answer,
    check_known,
    names,
    write_sweep,
)
from lit_probattn.commands.ask.measured import DEVICES, check_device, rows_of, with_times

SORTS: dict[str, Callable[[Answer], float | None]] = {
    "memory": lambda each: each.training_bytes,
    "inference": lambda each: each.inference_bytes,
    "operations": lambda each: each.macs,
    "parameters": lambda each: each.parameters,
    "time": lambda each: each.training_s,
}
_OF_A_MODEL = ("swap", "heads")
_OF_BOTH = ("model", "seq_len", "json")


def make_parser() -> Parser:
    """Return the parser."""
    parser = Parser("lit-probattn ask", __doc__)
    add = parser.add_argument
    add("--attention", nargs="+", metavar="NAME", help="variants, or your own files (default: all)")
    add("--embed_dim", type=int, help="width of the layer")
    add("--seq_len", type=at_least(1), help="sequence length (default with --model: 512)")
    add("--num_heads", type=int, default=8, help="number of softmax heads")
    add("--batch", type=int, default=8, help="batch size")
    add("--causal", action="store_true", help="causal attention")
    add("--dropout", type=float, default=0.1, help="attention dropout of all variants")
    add("--device", default="cpu", help=", ".join(DEVICES))
    add("--equal_heads", action="store_true", help="every variant has --num_heads heads")
    add("--sort", default="memory", help=f"{', '.join(SORTS)}; memory is that of training")
    add(
        "--use",
        nargs="+",
        metavar="NAME",
        help="show how to use these variants (default: the first)",
    )
    add("--measured", metavar="FOLDER", help="read times from this sweep's results (same sizes)")
    add("--write_sweep", metavar="FILE", help="write a sweep config that times these sizes")
    add("--json", action="store_true", help="print all results as JSON")
    add(
        "--model", metavar="NAME", help="timm:NAME or hf:TYPE: print the effect of a swap, by layer"
    )
    add("--swap", default="mgk", help="with --model: mgk, smgk or softmax")
    add("--heads", type=float, default=0.5, help="with --model: ratio of heads kept")
    add_flag(parser)
    return parser


@reports(ConfigError)
def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return the exit status: 2 for a user error, with one line."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    _reject_unused(parser, options)
    lines = _model_lines(options) if options.model is not None else _lines(options)
    print("\n".join(lines))
    return 0


def _reject_unused(parser: Parser, options: argparse.Namespace) -> None:
    """Raise for a flag of the other kind of question: of one layer, or of a model."""
    for name, value in vars(options).items():
        is_given = name in parser.given or value != parser.get_default(name)
        if name in _OF_BOTH or not is_given:
            continue
        if options.model is not None and name not in _OF_A_MODEL:
            raise ConfigError(f"--model does not support --{name}, which applies to one layer")
        if options.model is None and name in _OF_A_MODEL:
            hint = "; the heads of one layer are --num_heads" if name == "heads" else ""
            raise ConfigError(f"--{name} requires --model{hint}")


def _lines(options: argparse.Namespace) -> list[str]:
    for name in ("embed_dim", "seq_len"):
        if getattr(options, name) is None:
            raise ConfigError(f"--{name} is missing: pass --embed_dim and --seq_len, or --model")
    if options.sort not in SORTS:
        raise ConfigError(f"--sort: unknown order {options.sort!r}{nearest(options.sort, SORTS)}")
    check_device(options.device)
    question = Question(
        options.embed_dim,
        options.seq_len,
        options.num_heads,
        options.batch,
        options.causal,
        options.dropout,
        options.device,
        options.equal_heads,
    )
    chosen = options.attention or names()
    for name in options.attention or ():
        check_known(name)
    for name in options.use or ():
        if name not in chosen:
            raise ConfigError(f"--use: unknown attention {name!r}{nearest(name, chosen)}")
    rows = rows_of(Path(options.measured), question) if options.measured else []
    found = with_times([answer(name, question) for name in chosen], rows, question)
    if options.sort == "time" and all(each.training_s is None for each in found):
        subject = (
            f"{options.measured} has no times for" if options.measured else "there are no times for"
        )
        raise ConfigError(
            f"--sort time: {subject} these sizes on {options.device}; --measured reads "
            "times, and --write_sweep writes a sweep config that measures them"
        )
    found = ranked(found, options.sort)
    if options.write_sweep:
        write_sweep(Path(options.write_sweep), question, found)
    if options.json:
        content = {**vars(question), "attention": [asdict(each) for each in found]}
        return [json.dumps(content, indent=1)]
    return [*_head(question, options.sort), "", *table(found), "", *_foot(found, options)]


def ranked(found: Sequence[Answer], by: str) -> list[Answer]:
    """Return the answers, cheapest first; unknown costs last."""

    def key(each: Answer) -> tuple[float, str]:
        value = SORTS[by](each)
        return (math.inf if value is None else value), each.name

    return sorted(found, key=key)


def _head(question: Question, by: str) -> list[str]:
    causal = "causal" if question.is_causal else "not causal"
    plural = "" if question.batch_size == 1 else "s"
    return [
        f"One attention layer of width {question.embed_dim}: {question.batch_size} "
        f"sequence{plural} of {question.seq_len} tokens, {causal}, head size "
        f"{question.head_dim}, float32, attention dropout {question.dropout:g} for every variant; "
        f"device {question.device}; by {by}.",
        "Multiply-adds: matrix products of one forward pass by the equation; causal masks do not "
        "reduce them. Memory: weights, inputs and the peak of one step, predicted for these "
        "backends (training, inference).",
    ]


def table(found: Sequence[Answer]) -> list[str]:
    """Return the lines of the table, in the order of the answers, with problems at the end."""
    timed = any(each.training_s or each.inference_s for each in found)
    titles = ["", "variant", "heads", "parameters", "multiply-adds", "training", "inference"]
    titles += ["step", "forward"] if timed else []
    rows = [[*titles, "backends", "good for"]]
    good = [each for each in found if each.problem is None]
    for number, each in enumerate(good, 1):
        row = [str(number), each.name, str(each.num_heads), f"{each.parameters:,}"]
        row += [_count(each.macs), _bytes(each.training_bytes), _bytes(each.inference_bytes)]
        row += [_time(each.training_s), _time(each.inference_s)] if timed else []
        row += [", ".join(dict.fromkeys(each.backends or ())), each.good_for]
        rows.append(row)
    lines = aligned(rows, right={0, *range(2, len(titles))})
    lines += [f"not available: {e.name}: {e.problem}" for e in found if e.problem is not None]
    return lines


def _foot(found: Sequence[Answer], options: argparse.Namespace) -> list[str]:
    lines = []
    if not any(each.training_s or each.inference_s for each in found):
        subject = f"{options.measured} has no times for" if options.measured else "not measured for"
        first = "" if options.write_sweep else "add --write_sweep ask.yaml, then"
        lines += [
            f"Time: {subject} these sizes on {options.device}. To measure it: {first}".rstrip(),
            f"  lit-probattn sweep --config {options.write_sweep or 'ask.yaml'} "
            "--out runs/profiling/ask",
            "then repeat this command with --measured runs/profiling/ask.",
            "",
        ]
    good = {each.name: each for each in found if each.problem is None}
    for name in options.use or list(good)[:1]:
        if name in good:
            use = good[name].uses
            lines += [f"{name} in Python, and in a file for `lit-probattn fit --attention FILE`:"]
            lines += [f"  {line}" for line in (*use["python"], *use["yaml"])]
    return lines


def _model_lines(options: argparse.Namespace) -> list[str]:
    from lit_probattn.commands.ask.models import changes

    seq_len = 512 if options.seq_len is None else options.seq_len
    found, note = changes(options.model, options.swap, options.heads, seq_len)
    if options.json:
        content = {"model": options.model, "sizes": note}
        content |= {"swap": options.swap, "heads": options.heads}
        names = ("name", "kind", "action", "heads", "parameters", "cache_bytes")
        layers = [
            {**{name: getattr(layer, name) for name in names}, "macs": macs}
            for layer, macs in found
        ]
        return [json.dumps({**content, "layers": layers}, indent=1)]
    rows = [["layer", "class", "action", "heads", "parameters", "multiply-adds", "cache/token"]]
    for layer, (before, after) in found:
        cells = [_arrow(layer.heads), _arrow(layer.parameters)]
        cells += [f"{_count(before)} -> {_count(after)}", _arrow(layer.cache_bytes)]
        rows.append([layer.name, layer.kind, layer.action, *(cells if layer.swapped else [""] * 4)])
    swapped = [(layer, macs) for layer, macs in found if layer.swapped]
    sums = [
        [sum(pair[i] for pair in pairs) for i in (0, 1)]
        for pairs in ([layer.parameters for layer, _ in swapped], [macs for _, macs in swapped])
    ]
    return [
        f"{options.model} ({note}), swapped to {options.swap} with heads={options.heads:g}:",
        "",
        *aligned(rows),
        "",
        f"Sum of the swapped layers: parameters {sums[0][0]:,} -> {sums[0][1]:,}, multiply-adds "
        f"{_count(sums[1][0])} -> {_count(sums[1][1])}.",
        f'  model, report = lit_probattn.swap(model, "{options.swap}", heads={options.heads:g})',
    ]


def _arrow(pair: tuple[int, int]) -> str:
    before, after = pair
    return f"{after:,}" if before == after else f"{before:,} -> {after:,}"


def _count(number: int | None) -> str:
    if number is None:
        return ""
    return f"{number / 1e9:,.2f} G" if number >= 1e9 else f"{number / 1e6:,.2f} M"


def _bytes(number: int | None) -> str:
    if number is None:
        return ""
    if number < 2**20:
        return f"{number / 2**10:,.0f} KiB"
    mebibytes = number / 2**20
    return f"{mebibytes:,.1f} MiB" if mebibytes < 100 else f"{mebibytes:,.0f} MiB"


def _time(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:,.1f} ms"
