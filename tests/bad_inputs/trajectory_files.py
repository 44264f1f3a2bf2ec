"""Trajectories: D4RL's files, their names, options."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np

from datamodules import Trajectories
from tests.bad_inputs.cases import Case, data_command, data_error, on_folder
from tests.datamodules.trajectories import made

AREA = partial(Case, "Trajectories (`.hdf5`)")
_COUNT = sum(made.LENGTHS)


def _read(path: Path, **options: object) -> None:
    arguments = {"batch_size": 8, **options}
    module = Trajectories(path=str(path), **arguments)  # type: ignore[arg-type]
    module.prepare_data()
    module.setup()


def _file(without: tuple[str, ...] = (), **changes: object) -> Callable[[Path], str]:
    """A file with other arrays."""
    return data_error(
        lambda folder: _read(made.write(folder / "hopper_medium-v2.hdf5", without, **changes))
    )


def _raw(content: bytes | None) -> Callable[[Path], str]:
    """A file with other bytes; None cuts a good one off."""

    def read(folder: Path) -> None:
        path = folder / "hopper_medium-v2.hdf5"
        whole = made.write(path).read_bytes()
        path.write_bytes(whole[: len(whole) // 2] if content is None else content)
        _read(path)

    def run(folder: Path) -> str:
        # HDF5 reports the sizes of a file, which depend on its version.
        return data_error(read)(folder).partition(" (")[0]

    return run


def _named(name: str, **options: object) -> Callable[[Path], str]:
    return data_error(lambda folder: _read(made.write(folder / name), **options))


def _arguments(**options: object) -> Callable[[Path], str]:
    return data_error(
        lambda folder: Trajectories(**{"data_dir": str(folder), **options}).prepare_data()  # type: ignore[arg-type]
    )


@on_folder
def _without(folder: Path, package: str, run: Callable[[Path], str]) -> str:
    with mock.patch.dict(sys.modules, {package: None}):
        return run(folder)


def _without_h5py(folder: Path) -> str:
    path = made.write(folder / "hopper_medium-v2.hdf5")
    return _without("h5py", data_error(lambda _: _read(path)))(folder)


def _changed(key: str, place: object, value: float) -> dict[str, object]:
    values = np.array(made.arrays()[key], dtype=np.float64)
    values[place] = value  # type: ignore[index]
    return {key: values}


def _check(*words: str) -> Callable[[Path], str]:
    return data_command("check", "trajectories", "--data_dir", "DIR", *words)


def cases() -> Iterator[Case]:
    """Files, then names, then options."""
    for key in ("observations", "actions", "rewards", "terminals"):
        yield AREA(f"no `{key}`", _file((key,)))
    yield AREA("unequal lengths", _file(rewards=made.arrays()["rewards"][:-2]))
    yield AREA("an action of 1.5", _file(**_changed("actions", (4, 1), 1.5)))
    yield AREA("a reward that is NaN", _file(**_changed("rewards", 11, np.nan)))
    yield AREA("a terminal of 0.5", _file(**_changed("terminals", 5, 0.5)))
    yield AREA("rewards that are text", _file(rewards=np.array([b"x"] * _COUNT)))
    never = np.zeros(_COUNT, dtype=bool)
    yield AREA("no end of an episode", _file(terminals=never, timeouts=never))
    yield AREA("no timeouts and no end", _file(("timeouts",), terminals=never))
    yield AREA("one episode", _file(**made.arrays((61,))))
    yield AREA("no step", _file(**{k: v[:0] for k, v in made.arrays().items() if v.shape}))
    yield AREA("a number as observations", _file(observations=3.0))
    yield AREA("an empty file", _raw(b""))
    yield AREA("no HDF5 file", _raw(b"observation,action\n1,2\n" * 99))
    yield AREA("a file cut off", _raw(None))
    yield AREA("data of another environment", _named("walker2d_medium-v2.hdf5"))
    yield AREA("a name that says no environment", _named("mine.hdf5"))
    yield AREA("`env Hoper`", _named("mine.hdf5", env="Hoper"))
    yield AREA("no file", _arguments(env="Hopper", quality="medium-replay"))
    yield AREA("no file at `path`", _arguments(path="hopper.hdf5"))
    yield AREA("`quality good`", _arguments(env="Hopper", quality="good"))
    yield AREA("neither `path` nor `quality`", _arguments(env="Hopper"))
    yield AREA("`path` and `quality`", _arguments(path="hopper.hdf5", quality="random"))
    yield AREA("`return_scale 0`", _arguments(path="hopper.hdf5", return_scale=0))
    yield AREA("`val_fraction 1`", _arguments(path="hopper.hdf5", val_fraction=1))
    yield AREA("h5py is missing", _without_h5py)
    minari = _arguments(path="minari:mujoco/hopper/medium-v0")
    yield AREA("minari is missing", _without("minari", minari))
    case = partial(Case, "Options of trajectories")
    yield case("`--quality rando`", _check("--env", "Hopper", "--quality", "rando"))
    yield case("`--env Ant`", _check("--env", "Ant", "--quality", "random"))
    yield case("`--qualit`", _check("--env", "Hopper", "--qualit", "random"))
