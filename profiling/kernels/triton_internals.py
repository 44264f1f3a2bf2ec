"""Triton's interpreter without work that nothing uses, which is two thirds of its time.

It reaches for what Triton keeps to itself; where a version has that no more, nothing is changed.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any


def spare_the_interpreter() -> None:
    """Leave out what the interpreter does without effect, in this process.

    It exchanges the language's functions whenever one jitted function calls another, thousands of
    times per launch; only the launch undoes it, and all but the first time changes nothing. And it
    computes whether integers overflow, but asserts that only with its option `debug`.
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
    """Return `patch`, which takes a function, but only for modules that no launch has open."""
    patched: set[str] = set()

    @functools.wraps(patch)
    def once(function: Any) -> Any:
        modules = {
            value.__name__
            for value in function.__globals__.values()
            if isinstance(value, ModuleType) and value.__name__.startswith("triton.language")
        }
        if patched and modules <= patched:
            return None  # what a device function gets is dropped
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
