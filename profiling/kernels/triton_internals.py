"""Remove unused work from Triton's interpreter, which saves two thirds of its time.

This uses private members of Triton; if a version lacks them, nothing is changed.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any


def spare_the_interpreter() -> None:
    """Skip work of the interpreter that has no effect, in this process.

    The interpreter patches the language's functions whenever one jitted function calls another,
    thousands of times per launch, although only the first call has an effect and only the launch
    restores them. It also computes integer overflow, which only its option `debug` checks.
    """
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    patch = getattr(interpreter, "_patch_lang", None)
    if patch is not None and not hasattr(patch, "__wrapped__"):
        interpreter._patch_lang = once_per_launch(patch)
    builder: Any = getattr(interpreter, "interpreter_builder", None)
    options: Any = getattr(builder, "options", None)
    if hasattr(options, "sanitize_overflow") and not options.debug:
        builder.options = replace(options, sanitize_overflow=False)


def once_per_launch(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return `patch` restricted to modules that no running launch has patched."""
    patched: set[str] = set()

    @functools.cache
    def languages(function: Any) -> frozenset[str]:
        values = (x for x in function.__globals__.values() if isinstance(x, ModuleType))
        return frozenset(x.__name__ for x in values if x.__name__.startswith("triton.language"))

    @functools.wraps(patch)
    def once(function: Any) -> Any:
        modules = languages(function)
        if patched and modules <= patched:
            return None  # the result is unused in a device function
        scope = patch(function)
        if not patched:
            restore = scope.restore

            def restore_and_forget() -> None:
                patched.clear()
                restore()

            scope.restore = restore_and_forget
        patched.update(modules)
        return scope

    return once
