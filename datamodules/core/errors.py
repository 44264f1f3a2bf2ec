"""Errors of the data, under the name that `datamodules/text` imports."""

from __future__ import annotations

from functools import partial

from lit_probattn.base import errors
from lit_probattn.base.errors import (
    DataError,
    MissingDataError,
    require_at_least,
    require_one_of,
)

__all__ = ["DataError", "MissingDataError", "nearest", "require_at_least", "require_one_of"]

# Messages of text list what is valid by themselves.
nearest = partial(errors.nearest, lists=False)
