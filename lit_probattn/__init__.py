"""PyTorch Lightning experiments with probabilistic and head-sharing attention."""

from importlib import import_module
from typing import Any

# Names that are imported on first use, so that `import lit_probattn` is cheap; `__init__.pyi` has
# their types.
_LAZY = {
    "create": "lit_probattn.configs",
    "list_attention": "lit_probattn.base.config_files",
    "as_multihead_attention": "lit_probattn.interop.multihead",
    "register": "lit_probattn.interop.swap.interface",
    "swap": "lit_probattn.interop.swap",
}


_MODULES = ("functional",)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"lit_probattn.{name}")
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("lit-probattn")
    except PackageNotFoundError:
        return "0+unknown"  # on the path, but not installed


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY, *_MODULES, "__version__"])
