"""Base classes of studies of trained models: flags, computation, output."""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, ClassVar

from lit_probattn.analysis.options import add_model, add_samples
from lit_probattn.analysis.recording import in_double
from lit_probattn.analysis.results import Results, describe
from lit_probattn.analysis.sampling import Sequence, layer_numbers, longest, sequences
from lit_probattn.attention import Attention
from lit_probattn.base.rows import RowStore
from lit_probattn.training.trained import identity, open_trained


class Study(ABC):
    """A study writes a report with the table `<name>.csv` and the figure `<name>`.

    A subclass declares `name` and `title` (heading of its text), and implements `_add_options` and
    `_compute`. The docstring of its module is the help text.
    """

    name: ClassVar[str]
    title: ClassVar[str]

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.results = Results(options.out, self.name, options.command)

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Add the study's options to a parser."""
        cls._add_options(parser)

    @staticmethod
    @abstractmethod
    def _add_options(parser: argparse.ArgumentParser) -> None:
        """Add options by `parser.add_argument` and the functions of `options`."""

    @classmethod
    def run(cls, options: argparse.Namespace) -> None:
        """Run the study; the option `command` is the command line for the text.

        Raises:
            ValueError: a user error, for example a ConfigError.
        """
        study = cls(options)
        body = study._compute()
        study.results.write(cls.title, body)

    @abstractmethod
    def _compute(self) -> str:
        """Write tables and figures to `results` and return the text."""


class ModelStudy(Study):
    """A study of one checkpoint, with the options `add_model`.

    A subclass that calls `sequences` declares `samples`.
    """

    with_data: ClassVar[bool] = True
    # Defaults of --num_samples and --max_len, if the study draws sequences (`add_samples`).
    samples: ClassVar[tuple[int, int] | None] = None

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Add the options of the model, of the drawn sequences, and those of the study."""
        add_model(parser)
        if cls.samples is not None:
            add_samples(parser, *cls.samples)
        super().add_arguments(parser)

    @staticmethod
    def _add_options(parser: argparse.ArgumentParser) -> None:
        """Add no further options."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.trained = open_trained(options, with_data=self.with_data)
        super().__init__(options)
        self.results.about = describe(self.trained)
        self.layers = self.trained.layers
        self.numbers = layer_numbers(list(self.layers))
        # The longest sample so far, one sequence per layer.
        self.longest: list[Sequence] = []

    def sequences(
        self,
        of: Callable[[Attention], bool] = lambda layer: True,
        *,
        double: bool = False,
        padded: bool = False,
        min_len: int = 1,
    ) -> Iterator[Sequence]:
        """Yield recorded sequences of random samples, and keep the longest sample.

        Args:
            of: selects layers.
            double: convert calls and layers to float64.
            min_len: skip shorter sequences.
        """
        copies = {name: in_double(layer) for name, layer in self.layers.items() if double}
        batches = sequences(self.trained, self.options, padded=padded, min_len=min_len)
        for batch in batches:
            found = [one for one in batch if of(one.call.layer)]
            self.longest = longest([*self.longest, *found])
            for one in found:
                if double:
                    one = replace(one, call=one.call.double(copies[one.layer]))
                yield one

    def place(self, one: Sequence) -> dict[str, Any]:
        """Return the columns that identify a sequence."""
        return {"layer": self.numbers[one.layer], "sample": one.sample_id, "part": one.part}

    def store(self, key: tuple[str, ...], *flags: str) -> RowStore[dict[str, Any]]:
        """Open a row store that survives interruptions.

        `key` are the columns that identify rows; rows depend on these `flags`, on the checkpoint
        and on the configurations of model and data.
        """
        settings = {name: getattr(self.options, name) for name in flags}
        settings |= {"study": self.name, "checkpoint": identity(self.trained)}
        settings |= {part: self.trained.config[part] for part in ("model", "data")}
        return RowStore(self.results.path("partial.jsonl"), dict[str, Any], key, settings=settings)
