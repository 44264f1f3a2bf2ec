"""The argument parser of the command line: full names only, one line for what is wrong."""

import inspect
from argparse import RawDescriptionHelpFormatter
from typing import Any

from jsonargparse import DefaultHelpFormatter
from lightning.pytorch.cli import LightningArgumentParser, _InstantiatorFn

from lit_probattn.cli.errors import CommandError, ConstructionError, readable


class HelpFormatter(RawDescriptionHelpFormatter, DefaultHelpFormatter):
    """Help that keeps the lines of the description."""


class RunParser(LightningArgumentParser):
    """Parser that takes no shortened flags and says in one line what is wrong."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        kwargs.setdefault("formatter_class", HelpFormatter)
        super().__init__(*args, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> Any:
        """Raise `CommandError`, unless this parser only tries whether a value fits."""
        if not self.exit_on_error:
            return super().error(message, ex)
        names = [option[2:] for parser in self._all_parsers() for option in _options(parser)]
        raise CommandError(readable(message, names)) from ex

    def _all_parsers(self) -> list[Any]:
        action = self._subcommands_action
        return [self, *(action.choices.values() if action is not None else ())]


def _options(parser: Any) -> list[str]:
    return [option for option in parser._option_string_actions if option.startswith("--")]


class Instantiator(_InstantiatorFn):
    """Constructs model and data; tells a refusal of the constructor from a wrong type."""

    def __call__(
        self,
        class_type: Any,
        *args: Any,
        applied_instantiation_links: dict[str, Any],
        **kwargs: Any,
    ) -> Any:
        """Construct.

        Raises:
            ConstructionError: the constructor raised any exception.
        """
        # A size that the data do not have (features of tokens) is no hyper-parameter of the model.
        links = {key: size for key, size in applied_instantiation_links.items() if size is not None}
        try:
            _require_sizes(class_type, applied_instantiation_links)
            return super().__call__(
                class_type,
                *args,
                applied_instantiation_links=links,
                **kwargs,
            )
        except Exception as error:
            raise ConstructionError(self.key, error) from error


def _require_sizes(class_type: type, links: dict[str, Any]) -> None:
    """Refuse data of another kind than the model reads.

    Raises:
        ValueError: the model needs a size that the data do not have.
    """
    parameters = inspect.signature(class_type).parameters
    for key, size in links.items():
        name = key.rpartition(".")[2]
        needed = name in parameters and parameters[name].default is inspect.Parameter.empty
        if needed and size is None:
            raise ValueError(
                f"{class_type.__name__} needs {name}, which these data do not have: tokens have a "
                "vocab_size, series and pictures have num_features; choose a task for this data set"
            )
