"""`lit-probattn check my.Class`."""

from __future__ import annotations

import sys

import pytest

from lit_probattn.__main__ import main
from lit_probattn.attention.own.contract import CHECKS
from tests.support.helpers import error_of

BROKEN = """\
import torch
from lit_probattn.attention import Attention

class Peeking(Attention):
    def reference_scores(self, query, key):
        return query @ (key + key.roll(-1, 2)).mT

class Nothing(Attention):
    pass

class PeekingFar(Attention):  # from 65 keys on
    def reference_scores(self, query, key):
        scores, ramp = query @ key.mT, torch.arange(key.shape[2], dtype=key.dtype).sin()
        far = key[:, :, 64:].mean((2, 3))[..., None, None] if key.shape[2] > 64 else 0
        return scores + far * ramp

class BatchInEval(Attention):
    def reference_scores(self, query, key):
        scores = query @ key.mT
        return scores if self.training else scores + key.mean(0).sum(-1)[:, None]

class OfTheBatch(Attention):
    def reference_scores(self, query, key):
        return query @ key.mT * (1 + key.mean())

class Leaves(Attention):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        raise SystemExit(0)

class LeavesLater(Attention):
    def reference_scores(self, query, key):
        raise SystemExit(0)

class Wants(Attention):
    def __init__(self, *args, value, **options):
        super().__init__(*args, **options)
        raise ValueError(repr(value))
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module in the working folder, which no other test imports."""
    (tmp_path / "my_broken.py").write_text(BROKEN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("LIT_PROBATTN_ALLOW_CODE", "")
    yield tmp_path
    sys.modules.pop("my_broken", None)


def check(*words: str) -> int:
    return main(["check", *words, "--allow_code", words[0].partition(".")[0]])


@pytest.mark.parametrize(
    ("cls", "broken"),
    [
        ("Peeking", {"causality": ": outputs before other future tokens"}),
        ("PeekingFar", {"causality": " with 263 keys", "padding": " with 263 keys"}),
        ("BatchInEval", {"padding": " in eval mode"}),
        ("OfTheBatch", {"causality": ""}),
    ],
)
def test_a_broken_promise_is_named_with_its_remedy(module, capsys, cls, broken):
    """Also one of many keys only, or of one mode."""
    assert check(f"my_broken.{cls}") == 1
    shown = capsys.readouterr().out
    assert "gradients         ok\n" in shown
    for name, where in broken.items():
        title, problem, remedy = shown.split(f"{name} ", 1)[1].splitlines()[:3]
        assert title.strip() == "FAILED"
        assert f"reference{where}:" in problem
        assert remedy.strip() == f"remedy: {CHECKS[name].remedy}"


@pytest.mark.parametrize(
    ("text", "value"), [("1e-3", 1e-3), ("2", 2), ("null", None), ("true", True)]
)
def test_values_are_those_of_the_command_line_of_fit(module, capsys, text, value):
    assert check("my_broken.Wants", "--init_args", f"value={text}") == 2
    assert capsys.readouterr().err == f"error: cannot build Wants: {value!r}\n"


def test_a_class_that_ends_the_process_fails_its_checks(module, capsys):
    assert check("my_broken.LeavesLater") == 1
    assert "causality         FAILED\n" in capsys.readouterr().out


@pytest.mark.parametrize("raised", ["SystemExit: 0", "RuntimeError: no luck"])
def test_a_module_that_raises_while_it_is_imported_is_one_line(module, capsys, raised):
    kind, _, text = raised.partition(": ")
    (module / "my_raising.py").write_text(f"raise {kind}({int(text) if text == '0' else text!r})")
    assert check("my_raising.X") == 2
    wanted = f"error: --allow_code my_raising: importing it raised {raised}\n"
    assert capsys.readouterr().err == wanted


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["my_broken.Nothing"], "Nothing has neither reference_scores nor a core"),
        (["my_broken.Leaves"], "cannot build Leaves: SystemExit: 0"),
        (["my_broken.Peekin"], "unknown class 'my_broken.Peekin'"),
        (
            ["my_broken.torch"],
            "my_broken.torch is not a subclass of lit_probattn.attention.Attention",
        ),
        (
            ["my_broken.Peeking", "--init_args", "x"],
            "--init_args: expected KEY=VALUE, received 'x'",
        ),
        (["my_broken.Peeking", "--init_args", "dropouts=0"], "did you mean 'dropout'"),
        (["my_broken.Peeking", "--init_args", "head_dim=8"], "head_dim: set by the checks"),
        (["my_broken.Peeking", "--init_args", "embed_dim=8"], "embed_dim: set by the checks"),
        (["my_broken.Peeking", "--init_args", "dropout=0.1"], "dropout: set by the checks"),
    ],
)
def test_wrong_usage_is_one_line(module, capsys, words, message):
    assert check(*words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_other_code_is_imported_only_if_allowed(module):
    line = error_of(["check", "my_broken.Peeking"])
    assert "add --allow_code my_broken if you trust its code" in line
    assert "did you mean 'SoftmaxAttention'?" in error_of(["check", "SoftmaxAttntion"])
