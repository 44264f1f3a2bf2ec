"""D4RL's environments in gymnasium's MuJoCo, imported on first use."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from lit_probattn.base.errors import ConfigError
from lit_probattn.base.provenance import package_versions

VERSION = "v5"  # version of gymnasium's environments if a name has none
OLDER_PHYSICS = (
    "D4RL's v2 data were recorded with older physics (gym's -v2 environments and older MuJoCo "
    "bindings): scores of {name} are not comparable with published scores"
)
# NumPy environments by the full name of their class, imported on first use.
OWN = {"Toy": "datamodules.trajectories.toy_environment.ToyEnvironment"}
TOY = "a test environment: its scores are not comparable with others"
INSTALL = 'pip install "lit-probattn[rl]"'


class Environment(Protocol):
    """Interface that an episode requires of an environment, with gymnasium's names."""

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode; return its first state."""
        ...

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Apply an action; return state, reward, terminated, truncated, and information."""
        ...

    def close(self) -> None:
        """Release the resources of the environment."""
        ...


def environment_id(name: str) -> str:
    """Return gymnasium's full name of an environment, such as `Hopper-v5` for `Hopper`.

    A name with a version is returned unchanged.
    """
    return name if "-v" in name or name in OWN else f"{name}-{VERSION}"


def make_environment(name: str, **options: Any) -> Environment:
    """Create an environment by the name in its data.

    Raises:
        ConfigError: unknown name, or gymnasium or MuJoCo is missing.
    """
    full = environment_id(name)
    if full in OWN:
        module, _, kind = OWN[full].rpartition(".")
        return getattr(importlib.import_module(module), kind)()
    try:
        import gymnasium
    except ImportError:
        raise ConfigError(_missing(full, "gymnasium")) from None
    try:
        with _quiet():
            made: Environment = gymnasium.make(full, disable_env_checker=True, **options)
    except gymnasium.error.DependencyNotInstalled:
        raise ConfigError(_missing(full, "mujoco")) from None
    except gymnasium.error.Error as error:
        raise ConfigError(f"gymnasium cannot create {full}: {error}") from error
    return made


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings about deprecated features in gymnasium's own models.

    MuJoCo would also write them to a file in the working directory.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import mujoco
        except ImportError:  # gymnasium raises a better error
            yield
            return
        before = mujoco.get_mju_user_warning()
        mujoco.set_mju_user_warning(lambda text: None)
        try:
            yield
        finally:
            mujoco.set_mju_user_warning(before)


def _missing(full: str, package: str) -> str:
    return f"{full} needs the package {package}, which is not installed: {INSTALL}"


def check_sizes(name: str, environment: Environment, obs_dim: int, act_dim: int) -> None:
    """Raise if an environment's states or actions differ from the data's.

    Raises:
        ValueError: a size differs.
    """
    sizes = {"observations": (as_floats(environment.reset(seed=0)[0]).shape, (obs_dim,))}
    space = getattr(environment, "action_space", None)
    if space is not None:
        sizes["actions"] = (tuple(space.shape), (act_dim,))
    for what, (here, trained) in sizes.items():
        if here != trained:
            raise ValueError(
                f"{name} has {what} of shape {here}, but the policy was trained on {trained}: "
                "evaluate it in the environment of its data"
            )


def describe_environment(name: str) -> dict[str, Any]:
    """Return full name and package versions for a result, with a warning about physics."""
    full = environment_id(name)
    found = {"environment": full, **package_versions(("gymnasium", "mujoco", "numpy"))}
    return {**found, "warning": TOY if full in OWN else OLDER_PHYSICS.format(name=full)}


def use_a_renderer() -> None:
    """Let MuJoCo render without a display, by EGL, unless MUJOCO_GL is set."""
    if sys.platform.startswith("linux") and not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")


def as_floats(observation: Any) -> np.ndarray:
    """Return a state as float64, (obs_dim,)."""
    return np.asarray(observation, dtype=np.float64).reshape(-1)
