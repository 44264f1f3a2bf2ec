"""Environments that can be stepped: gymnasium's with MuJoCo, and one of our own for tests."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

from datamodules.core.errors import DataError
from datamodules.trajectories.environments import Environment
from datamodules.trajectories.toy_environment import ToyEnvironment

__all__ = ["make"]


def make(environment: Environment) -> Any:
    """Make an environment that can be stepped, with gymnasium's interface.

    Raises:
        DataError: gymnasium or MuJoCo is missing, or this version of the environment.
    """
    if environment.version is None:
        return ToyEnvironment()
    title = f"{environment.name}-{environment.version}"
    try:
        import gymnasium

        with _quiet():
            return gymnasium.make(title, disable_env_checker=True)
    except ImportError as error:  # gymnasium's own error for MuJoCo is another kind, see below
        raise _missing(title, error) from None
    except Exception as error:
        if type(error).__module__ != "gymnasium.error":
            raise
        raise _missing(title, error) from None


def _missing(title: str, error: Exception) -> DataError:
    reason = " ".join(str(error).split())
    return DataError(
        f"{title} needs the packages gymnasium and mujoco ({reason}): "
        f"pip install 'lit-probattn[rl]'"
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep deprecations of gymnasium, and of MuJoCo in gymnasium's own models, off the terminal.

    MuJoCo would append them to a file in the working directory too.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import mujoco
        except ImportError:  # which gymnasium tells better
            yield
            return
        before = mujoco.get_mju_user_warning()
        mujoco.set_mju_user_warning(lambda text: None)
        try:
            yield
        finally:
            mujoco.set_mju_user_warning(before)
