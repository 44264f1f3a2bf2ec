"""User-specified loggers, instantiated once the run folder is known."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger

from lit_probattn.base.errors import ConfigError

KEY = "trainer.logger"
FOLDER = "save_dir"
# Lightning's logger -> its package, which is also the name of the extra.
_PACKAGES = {"WandbLogger": "wandb", "MLFlowLogger": "mlflow"}
# Loggers whose constructor requires a folder.
_NEED_FOLDER = ("CSVLogger", "TensorBoardLogger")


class PendingLogger:
    """A logger that is not instantiated yet.

    Args:
        cls: its class.
        options: arguments of its constructor.
    """

    def __init__(self, cls: type[Logger], *args: Any, **options: Any) -> None:
        options.pop("applied_instantiation_links", None)
        self.cls, self.args, self.options = cls, args, options

    def check(self) -> None:
        """Raise a ConfigError if its package is not installed.

        Not in the constructor: the parser would interpret that as a value of the wrong type.
        """
        package = _PACKAGES.get(self.cls.__name__)
        if package is not None and find_spec(package) is None:
            raise ConfigError(_missing(self.cls, package))

    def make(self, folder: Path) -> Logger:
        """Return the logger; without a configured folder it writes to `folder`.

        Raises:
            ConfigError: its package is not installed, or rejects its options.
        """
        options = dict(self.options)
        known = inspect.signature(self.cls).parameters
        unset = FOLDER in known and options.get(FOLDER) in ("", None, known[FOLDER].default)
        if unset and not options.get("dir"):  # W&B's other name for the folder
            options[FOLDER] = str(self._place(folder))
        if "tracking_uri" in known and not options.get("tracking_uri"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # required by MLflow
        try:
            return self.cls(*self.args, **options)
        except ModuleNotFoundError as error:
            package = _PACKAGES.get(self.cls.__name__)
            raise ConfigError(
                f"{KEY}: {error}" if package is None else _missing(self.cls, package)
            ) from error
        except Exception as error:  # the packages raise arbitrary exceptions
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise ConfigError(f"{KEY}: {self.cls.__name__}: {reason}") from error

    def _place(self, folder: Path) -> Path:
        return folder / "mlruns" if self.cls.__name__ == "MLFlowLogger" else folder


def _missing(cls: type, package: str) -> str:
    return (
        f"{KEY}: {cls.__name__} requires the package {package}: pip install "
        f"'lit-probattn[{package}]'"
    )


def pending(logger: object) -> list[PendingLogger]:
    """Return the loggers in `trainer.logger` that are not instantiated yet (zero or more).

    Raises:
        ConfigError: the package of one is not installed.
    """
    given = logger if isinstance(logger, Sequence) else [logger]
    found = [item for item in given if isinstance(item, PendingLogger)]
    for item in found:
        item.check()
    return found


def with_folder(words: Sequence[str], files: Iterable[Mapping[str, Any]]) -> list[str]:
    """Add an empty folder argument to a command line whose logger requires one.

    Args:
        words: the command line.
        files: contents of its configuration files.
    """
    named = [entry for content in files if (entry := _logger_of(content)) is not None]
    classes = [entry.get("class_path") for entry in named]
    given = any(FOLDER in (entry.get("init_args") or {}) for entry in named)
    for index, word in enumerate(words):
        key, equals, value = word.partition("=")
        if key in (f"--{KEY}", f"--{KEY}.class_path"):
            classes.append(value if equals else next(iter(words[index + 1 : index + 2]), None))
        given = given or key in (f"--{KEY}.init_args.{FOLDER}", f"--{KEY}.{FOLDER}")
    last = str(classes[-1]).rpartition(".")[2] if classes else ""
    added = [f"--{KEY}.init_args.{FOLDER}="] if last in _NEED_FOLDER and not given else []
    return [*words, *added]


def _logger_of(content: Mapping[str, Any]) -> Mapping[str, Any] | None:
    trainer = content.get("trainer")
    logger = trainer.get("logger") if isinstance(trainer, Mapping) else None
    return logger if isinstance(logger, Mapping) else None
