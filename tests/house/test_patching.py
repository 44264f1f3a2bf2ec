"""The patch that changes nothing, which a test must not be able to make."""

from __future__ import annotations

import pytest

from lit_probattn.attention.engines import blocks
from tests.support.patching import CheckedMonkeyPatch


def test_a_name_that_is_only_imported_cannot_be_patched(monkeypatch):
    with pytest.raises(AssertionError, match="never looks up 'SoftmaxAttention'"):
        monkeypatch.setattr("lit_probattn.attention.SoftmaxAttention", None)


def test_a_name_that_is_read_can(monkeypatch):
    monkeypatch.setattr("lit_probattn.attention.engines.blocks.BLOCK_SCORES", 7)
    assert blocks.BLOCK_SCORES == 7


def test_every_test_gets_the_checked_form(monkeypatch):
    assert isinstance(monkeypatch, CheckedMonkeyPatch)
    with monkeypatch.context() as inner:
        assert isinstance(inner, CheckedMonkeyPatch)
