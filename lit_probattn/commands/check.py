"""Check your own attention layer against the contract of all layers of the package.

    lit-probattn check my.CosineAttention --allow_code my
    lit-probattn check my.CosineAttention --init_args sharpness=5 num_heads=2 --allow_code my

Masks, causality, gradients, precision, cache, blocks, dropout, weights and cost, one line each,
with a hint for each failure. The exit status is 1 if a check fails.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from lit_probattn.base.allowed_code import add_flag
from lit_probattn.base.arguments import Parser
from lit_probattn.base.errors import ConfigError, nearest, reports

if TYPE_CHECKING:
    from lit_probattn.attention import Attention

_NUM_HEADS = 4


@reports(ConfigError)
def main(arguments: Sequence[str] | None = None) -> int:
    """Check a class; return the exit status: 1 if a check fails, 2 for wrong usage."""
    parser = Parser("lit-probattn check", __doc__)
    parser.add_argument("cls", metavar="CLASS", help="full name, module.Class, or a preset's class")
    parser.add_argument(
        "--init_args", nargs="+", default=[], metavar="KEY=VALUE", help="arguments of the class"
    )
    add_flag(parser)
    options = parser.parse_args(arguments)
    from lit_probattn.configs import parse_settings

    cls = _class(options.cls)
    given = parse_settings(options.init_args, "--init_args")
    make = partial(cls, *_sizes(given), **given)
    _try(make, cls)
    return _run(make, options.cls)


def _class(name: str) -> type[Attention]:
    from lit_probattn.attention import Attention, variants
    from lit_probattn.configs import class_of

    known = variants()
    if "." not in name:
        if name not in known:
            hint = nearest(name, known, lists=False)
            raise ConfigError(f"{name}: expected a full name, module.{name}{hint}")
        return known[name]
    cls = class_of(name)
    if not (isinstance(cls, type) and issubclass(cls, Attention)):
        raise ConfigError(f"{name} is not a subclass of lit_probattn.attention.Attention")
    return cls


def _sizes(given: dict[str, Any]) -> tuple[int, int]:
    """Return width and number of heads; width, head size and dropout are those of the contract."""
    from lit_probattn.attention.own.contract import EMBED, HEAD

    for name in ("embed_dim", "head_dim", "dropout"):
        if name in given:
            raise ConfigError(f"--init_args {name}: set by the checks; remove it")
    given["head_dim"] = HEAD
    return EMBED, given.pop("num_heads", _NUM_HEADS)


def _try(make: Any, cls: type) -> None:
    """Build one layer, so that errors of the class itself are reported in one line."""
    try:
        make().core  # noqa: B018
    except (Exception, SystemExit) as error:
        kind = "SystemExit: " if isinstance(error, SystemExit) else ""
        text = " ".join(f"{kind}{error}".split())
        raise ConfigError(f"cannot build {cls.__name__}: {text}") from error


def _run(make: Any, name: str) -> int:
    import torch

    from lit_probattn.attention.own.contract import CHECKS

    failed = 0
    for title, check in CHECKS.items():
        problem = ""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            try:
                check.run(make)
            except (Exception, SystemExit) as error:
                kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
                problem = " ".join(f"{kind}{error}".split())
        failed += bool(problem)
        print(f"{title:<18}{'FAILED' if problem else 'ok'}", flush=True)
        if problem:
            print(f"{'':<18}{problem}\n{'':<18}remedy: {check.remedy}")
    print(f"{name}: {len(CHECKS) - failed} of {len(CHECKS)} checks passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
