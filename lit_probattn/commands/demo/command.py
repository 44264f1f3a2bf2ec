"""Train two tiny models for half a minute, then show the learned attention and the cost.

    lit-probattn demo

Softmax attention, and sMGK attention with half the heads, learn nested MIN and MAX of digits from
the same batches, which are generated on the fly: no data, no network, no GPU. The page, a single
file, has learning curves, costs (counted, predicted and measured), a sample with both predictions,
its attention maps, and next steps. Ctrl-C ends training early and writes the page.
"""

from __future__ import annotations

import argparse
import os
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from lit_probattn.base.arguments import Parser, at_least
from lit_probattn.base.errors import ConfigError


def make_parser() -> argparse.ArgumentParser:
    """Return the parser."""
    parser = Parser("lit-probattn demo", __doc__)
    add = parser.add_argument
    add("--out", type=Path, default=Path("runs/demo"), help="folder of the page")
    length = parser.add_mutually_exclusive_group().add_argument
    length("--seconds", type=float, default=25.0, help="training time")
    text = "number of training steps instead of --seconds; reproducible"
    length("--steps", type=at_least(1), help=text)
    add("--seed", type=int, default=0, help="seed of weights and data")
    add("--no-open", action="store_true", help="do not open the page in a browser")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; return 2 for wrong usage, with one line, and 130 if it was interrupted."""
    options = make_parser().parse_args(arguments)
    wrong = _wrong(options)
    if wrong:
        print(f"error: {wrong}", file=sys.stderr)
        return 2
    try:
        return _run(options)
    except KeyboardInterrupt:
        print("interrupted; no page was written", file=sys.stderr)
        return 130
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: --out {options.out}: {error.strerror or error}", file=sys.stderr)
        return 2


def _wrong(options: argparse.Namespace) -> str | None:
    """Return the error in the flags, in one line, or None."""
    if not 0 < options.seconds < float("inf"):
        return f"--seconds must be above 0, received {options.seconds:g}"
    if not 0 <= options.seed < 2**63:
        return f"--seed must be at least 0 and below 2^63, received {options.seed}"
    if options.out.exists() and not options.out.is_dir():
        return f"--out {options.out} is a file: expected a folder"
    return None


def _run(options: argparse.Namespace) -> int:
    options.out.mkdir(parents=True, exist_ok=True)  # fail before training
    # Importing PyTorch takes seconds.
    from datamodules import expressions
    from lit_probattn.base.files import refuse_to_replace, replace_text
    from lit_probattn.commands.demo import cost, page, training
    from lit_probattn.commands.demo.display import Display

    path = options.out / "demo.html"
    refuse_to_replace([path])
    data = expressions.draw(options.seed)
    sides = training.make_sides(options.seed)
    with Display(sides) as show:
        settings = {name: getattr(options, name) for name in ("seed", "steps", "seconds")}
        finished = training.train(sides, data, show=show, **settings)
    for side in sides:
        if not side.accuracy or side.accuracy[-1][0] != len(side.losses):
            side.evaluate(data[1])
    print("measuring the cost of a step ...", flush=True)
    replace_text(path, page.write(sides, cost.quantities(sides), data[1], finished))
    print(path, flush=True)
    if not options.no_open:
        open_page(path)
    return 0 if finished else 130


def open_page(path: Path) -> None:
    """Open a page in the user's browser if a display is available."""
    if has_display():
        webbrowser.open(path.absolute().as_uri())


def has_display() -> bool:
    """Whether a window can be opened; a terminal browser would hide the printed lines."""
    if sys.platform in ("win32", "darwin"):
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


if __name__ == "__main__":
    sys.exit(main())
