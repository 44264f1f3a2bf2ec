"""Log records of the package. Pytest's `caplog` visits every logger six times per test."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

LOGGERS = ("lit_probattn", "datamodules", "lightning.pytorch")


class Logged(logging.Handler):
    """Keeps the records of the package and of Lightning."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record."""
        self.records.append(record)

    @property
    def messages(self) -> list[str]:
        """The text of each record."""
        return [record.getMessage() for record in self.records]

    @property
    def text(self) -> str:
        """All messages."""
        return "\n".join(self.messages)


@contextlib.contextmanager
def keep_records() -> Iterator[Logged]:
    """Keep what is logged inside."""
    handler = Logged()
    loggers = [logging.getLogger(name) for name in LOGGERS]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield handler
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
