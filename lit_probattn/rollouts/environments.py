"""The environments of D4RL in gymnasium's MuJoCo; gymnasium is imported when one is made."""

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

VERSION = "v5"  # of gymnasium's environments, where a name has none
OLDER_PHYSICS = (
    "D4RL's v2 data were recorded with older physics (gym's -v2 environments and older MuJoCo "
    "bindings): scores of {name} are not scores of the published environments"
)
# Environments of plain NumPy, by the full name of their class, which is imported when one is made.
OWN = {"Toy": "datamodules.trajectories.toy_environment.ToyEnvironment"}
TOY = "an environment for tests: its scores compare with nothing"
INSTALL = 'pip install "lit-probattn[rl]"'


class Environment(Protocol):
    """What an episode needs of an environment, as gymnasium names it."""

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode; return its first state."""
        ...

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Act; return state, reward, whether the episode ended, and whether its time is over."""
        ...

    def close(self) -> None:
        """Free what it holds."""
        ...


def environment_id(name: str) -> str:
    """Return the full name in gymnasium of an environment, such as `Hopper-v5` of `Hopper`.

    A name with a version is taken as it is.
    """
    return name if "-v" in name or name in OWN else f"{name}-{VERSION}"


def make_environment(name: str, **options: Any) -> Environment:
    """Make an environment by the name of its data.

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
        raise ConfigError(f"gymnasium cannot make {full}: {error}") from error
    return made


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep quiet of what is deprecated in gymnasium's own models.

    MuJoCo would write it into a file of the working directory too.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import mujoco
        except ImportError:  # gymnasium says it better
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
    """Refuse an environment whose states or actions are not those of the data.

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
    """Return full name and versions of packages for a result, with a warning about physics."""
    full = environment_id(name)
    found = {"environment": full, **package_versions(("gymnasium", "mujoco", "numpy"))}
    return {**found, "warning": TOY if full in OWN else OLDER_PHYSICS.format(name=full)}


def use_a_renderer() -> None:
    """Let MuJoCo draw without a display, by EGL, unless MUJOCO_GL says how it should."""
    if sys.platform.startswith("linux") and not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")


def as_floats(observation: Any) -> np.ndarray:
    """Return a state as float64, (obs_dim,)."""
    return np.asarray(observation, dtype=np.float64).reshape(-1)
