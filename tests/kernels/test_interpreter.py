"""Triton's interpreter with fewer preparations works as before, and what it cannot show is read."""

from __future__ import annotations

import ast
import sys
from types import ModuleType

import pytest
import torch
import triton.language as tl

from lit_probattn.randomness import RandomKey
from profiling.kernels.triton_internals import once_per_launch, spare_the_interpreter
from tests.kernels.interpreter import members, remember_types
from tests.support.paths import ROOT

needs_interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled")


class Scope:
    def __init__(self, log, name):
        self.log, self.name = log, name

    def restore(self):
        self.log.append(f"restore {self.name}")


class Function:
    def __init__(self, name, *modules):
        named = {module: ModuleType(f"triton.language{module}") for module in modules}
        self.name, self.__globals__ = name, {**named, "torch": ModuleType("torch"), "one": 1}


def test_modules_are_prepared_once_per_launch_and_again_in_the_next():
    log = []

    def patch(function):
        log.append(f"patch {function.name}")
        return Scope(log, function.name)

    once = once_per_launch(patch)
    for launch in ("first", "second"):
        scope = once(Function(launch, ""))
        assert once(Function("same module", "")) is None
        once(Function("another module", ".core"))
        assert once(Function("both", "", ".core")) is None
        scope.restore()
    expected = [
        [f"patch {launch}", "patch another module", f"restore {launch}"]
        for launch in ("first", "second")
    ]
    assert log == [line for lines in expected for line in lines]


@needs_interpreter
def test_this_tritons_interpreter_is_spared_once():
    """By `conftest.py`: a version that keeps other things to itself would be slow again."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    before = interpreter._patch_lang
    spare_the_interpreter()
    assert interpreter._patch_lang is before
    assert before.__wrapped__.__name__ == "_patch_lang"
    assert not interpreter.interpreter_builder.options.sanitize_overflow


def test_an_interpreter_without_these_parts_is_left_as_it_is(monkeypatch):
    bare = ModuleType("triton.runtime.interpreter")
    monkeypatch.setitem(sys.modules, bare.__name__, bare)
    names = set(vars(bare))
    spare_the_interpreter()
    assert set(vars(bare)) == names


@needs_interpreter
def test_types_that_are_made_once_change_no_bit(monkeypatch):
    """Output and gradients, with masks, in half precision and with shapes of several ranks."""
    from lit_probattn.attention import FiSHAttention

    assert len(members()) == 5
    remember_types()  # a second time changes nothing
    layer = FiSHAttention(8, 2, num_global_heads=1, head_dim=4, backend="triton").half()
    x = torch.randn(1, 5, 8).half().requires_grad_()

    def run():
        out = layer(x, is_causal=True, rng=RandomKey(3))
        return out, torch.autograd.grad(out.sum(), x)[0]

    found = run()
    for owner, name, _ in members():
        plain = vars(owner)[name].__wrapped__
        assert not hasattr(plain, "__wrapped__")
        monkeypatch.setattr(owner, name, plain)
    assert all(torch.equal(a, b) for a, b in zip(found, run(), strict=True))


@needs_interpreter
def test_a_launch_leaves_the_language_as_it_was():
    from lit_probattn.attention import SoftmaxAttention

    before = tl.dot
    SoftmaxAttention(8, 2, backend="triton")(torch.zeros(1, 3, 8))
    assert tl.dot is before


def test_every_product_says_its_precision():
    """A GPU rounds float32 factors to tf32 by default; the interpreter never does."""
    found, silent = 0, []
    for path in (ROOT / "lit_probattn/kernels").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.dot":
                found += 1
                if "input_precision" not in {keyword.arg for keyword in node.keywords}:
                    silent.append(f"{path.name}:{node.lineno}")
    assert found > 30
    assert silent == []
