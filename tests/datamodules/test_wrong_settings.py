"""Wrong settings of data modules are one line; wrong files: tests/bad_inputs."""

from __future__ import annotations

from typing import Any

import pytest

from datamodules import UEA, ListOps, MaskedText, Retrieval, Synthetic
from lit_probattn.base.errors import DataError

SETTINGS: list[tuple[type, dict[str, Any], str]] = [
    (Synthetic, {"vocab_size": 5}, r"num_classes \+ 2 = 6"),
    (Synthetic, {"max_length": 3}, "max_length=3 is below min_length=32"),
    (ListOps, {"max_length": 5}, "max_length must be at least min_length"),
    (ListOps, {"vocab_size": 16}, "vocab_size must be at least 17, received 16"),
    (ListOps, {"max_length_tokens": 20}, "max_length_tokens=20 would truncate them"),
    (Retrieval, {"max_length_tokens": 10001}, r"at most 10000, .* received 10001"),
    (MaskedText, {"segment_len": 2}, "segment_len must be at least 3"),
    (UEA, {"name": "../Mine"}, "name must not contain folders"),
    (UEA, {"name": "Libras", "val_fraction": 1.0}, "val_fraction must be between 0 and 1"),
    (UEA, {"name": "PEMS"}, "unknown archive 'PEMS'.*did you mean 'PEMS-SF'"),
    (UEA, {"name": "heartbeat"}, "unknown archive 'heartbeat'.*did you mean 'Heartbeat'"),
]


@pytest.mark.parametrize(("cls", "options", "message"), SETTINGS)
def test_wrong_settings_are_one_line(cls: type, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        cls(**options)
    assert "\n" not in str(caught.value)
