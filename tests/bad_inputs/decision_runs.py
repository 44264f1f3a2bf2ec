"""Decision transformers: environments that are missing or others, numbers out of range, studies."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest import mock

from lit_probattn.rollouts import environments
from tests.bad_inputs.cases import Case, command_error
from tests.support.caches import scratch_folder
from tests.support.runs import arguments, only_version, run

TASK = "tiny/d4rl"
LEAST = ("--trainer.max_steps", "1", "--trainer.limit_val_batches", "0")


@functools.cache
def _trained() -> Path:
    """A run folder in which the tiny task was trained for one step."""
    folder = scratch_folder("bad_inputs_")
    run(arguments("fit", folder, *LEAST, "--model.init_args.val_episodes", "0", task=TASK))
    return only_version(folder)


def _fit(*more: str) -> Callable[[Path], str]:
    return lambda folder: command_error(arguments("fit", folder, *more, task=TASK))


def _told(words: list[str]) -> str:
    return command_error(words).replace(str(_trained()), "RUN")


def _test(*more: str) -> str:
    """A test of the trained run."""
    config = str(_trained() / "config.yaml")
    return _told(["test", "--config", config, "--ckpt_path", "last", *more])


def _study(folder: Path, *more: str, device: str = "cpu") -> str:
    out = ("--device", device, "--out", str(folder / "out"))
    return _told(["analyse", "returns", "--checkpoint", str(_trained()), *out, *more])


def _played_in(name: str) -> str:
    """A test in another environment than the toy, under the toy's name."""
    with mock.patch.dict(environments.OWN, {"Toy": name}):
        return _test()


def _without(package: str) -> str:
    """A test where the environment is gymnasium's and a package is missing."""
    loaded = [name for name in sys.modules if name.startswith("gymnasium.envs.mujoco")]
    with (
        mock.patch.object(environments, "environment_id", return_value="Hopper-v5"),
        mock.patch.dict(sys.modules, {package: None}),
    ):
        for name in loaded:
            del sys.modules[name]
        return _test()


def _without_data(folder: Path) -> str:
    """The task of D4RL without its file; sizes of the model are read from it."""
    place = ("--data.init_args.data_dir", str(folder), "--data.init_args.cache_dir", str(folder))
    return command_error(arguments("fit", folder, *place, task="d4rl"))


def _of_text(folder: Path) -> str:
    """The study of a run that classifies texts."""
    run(arguments("fit", folder, *LEAST, num_train=8))
    words = ("--checkpoint", str(only_version(folder)), "--out", str(folder / "out"))
    return command_error(["analyse", "returns", "--device", "cpu", *words])


def cases() -> Iterator[Case]:
    """Every case of this file."""
    case = partial(Case, "Decision transformers")
    other = "tests.rollouts.toy.Pendulum"
    yield case("an environment of other sizes than the data", lambda _: _played_in(other))
    yield case("gymnasium is missing", lambda _: _without("gymnasium"))
    yield case("mujoco is missing", lambda _: _without("mujoco"))
    yield case("no file of the data", _without_data)
    yield case("one target return", _fit("--model.init_args.target_returns", "[3.0]"))
    yield case("`val_every: 0`", _fit("--model.init_args.val_every", "0"))
    yield case("`test_episodes: -1`", _fit("--model.init_args.test_episodes", "-1"))
    yield case(
        "a checkpoint of other trajectories", lambda _: _test("--data.init_args.data_seed", "5")
    )
    yield case("`returns --episodes 0`", lambda f: _study(f, "--episodes", "0"))
    yield case("`returns --targets nan`", lambda f: _study(f, "--targets", "3", "nan"))
    yield case("`returns` of another task", _of_text)
    for device in ("meta", "mps", "gpu"):
        yield case(f"`returns --device {device}`", partial(_study, device=device))
