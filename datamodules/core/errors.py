"""Errors of the data, under the name that `datamodules/text` imports."""

from lit_probattn.base.errors import (
    DataError,
    MissingDataError,
    nearest,
    require_at_least,
    require_one_of,
)

__all__ = ["DataError", "MissingDataError", "nearest", "require_at_least", "require_one_of"]
