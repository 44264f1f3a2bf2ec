"""Shared set-up: seeds, NaN-filled empties, GPU skipping."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from collections.abc import Iterator

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import pytest
import torch

from profiling.kernels.triton_internals import spare_the_interpreter
from tests.kernels.interpreter import remember_types
from tests.support.caches import keep_out_of_the_users_cache
from tests.support.logged import Logged, keep_records
from tests.support.patching import CheckedMonkeyPatch, spare_drawing

torch.set_num_threads(1)
torch.set_warn_always(True)  # warnings are errors: of each test, not of a process's first
# The first backward pass of a process starts autograd's threads. On fake tensors it would start
# threads for devices, and no process forked later could compute gradients.
torch.ones((), requires_grad=True).backward()
keep_out_of_the_users_cache()
os.environ.pop("LIT_PROBATTN_CONFIGS", None)  # a user's own folders
os.environ.setdefault("LIT_PROBATTN_ALLOW_CODE", "tests")  # workers of sweeps make classes of ours


def _import_kernels_for_the_interpreter() -> None:
    """Without a GPU: Triton reads the variable once, when it and each kernel are imported.

    So they are imported here, before any test can do it otherwise; the variable itself is set by
    the fixture `kernels_on_cpu` only, since it makes GPU backends accept CPU tensors.
    """
    if torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        return
    if late_choice(sys.modules.get("triton.language")):
        return  # `pytest_configure` ends the run
    given = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    for family, names in (
        ("dense", ("forward", "backward", "lowering_kernels")),
        ("fish", ("forward", "backward")),
        ("linear", ("kernels",)),
    ):
        for name in names:
            importlib.import_module(f"lit_probattn.kernels.{family}.{name}")
    if given is None:
        del os.environ["TRITON_INTERPRET"]
    spare_the_interpreter()
    remember_types()


def late_choice(language: object) -> str | None:
    """Say what is wrong if Triton was imported without its interpreter; None if all is well."""
    if language is None or type(getattr(language, "cdiv", None)).__name__ == "InterpretedFunction":
        return None
    return (
        "tests/conftest.py: Triton was imported before its interpreter was chosen, so no kernel "
        "could run without a GPU; load no plugin that imports it, or set TRITON_INTERPRET=1"
    )


_import_kernels_for_the_interpreter()


def pytest_configure(config) -> None:
    """End the run by one line where kernels could not be tested."""
    late = None if torch.cuda.is_available() else late_choice(sys.modules.get("triton.language"))
    if late is not None:
        raise pytest.UsageError(late)


def pytest_collection_finish() -> None:
    """Keep modules and tests, which stay to the end, out of every later garbage collection.

    Forked processes then leave their memory shared, too.
    """
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let what was kept go with the process."""
    gc.unfreeze()


@pytest.fixture(autouse=True, scope="session")
def _no_waiting_for_the_disk() -> Iterator[None]:
    """Spare `fsync`, a third of the time of making a cache: no test ends the machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda descriptor: None)
        yield


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Seed torch; before CUDA is initialised, `manual_seed` writes down the stack each time."""
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)


@pytest.fixture
def monkeypatch() -> Iterator[CheckedMonkeyPatch]:
    """Pytest's own, but a patch that changes nothing fails."""
    patch = CheckedMonkeyPatch()
    yield patch
    patch.undo()


@pytest.fixture
def kernels_on_cpu(monkeypatch) -> None:
    """Run kernels on CPU tensors in Triton's interpreter if there is no GPU."""
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture
def sketches(monkeypatch) -> None:
    """Write white figures of the right size in place of drawing them."""
    spare_drawing(monkeypatch)


@pytest.fixture
def logged() -> Iterator[Logged]:
    """Return the records that the package logs; pytest's slower `caplog` is disabled."""
    with keep_records() as records:
        yield records


@pytest.fixture
def nan_filled_empties():
    """Make torch.empty return NaN, so that a hole in an output fails loudly."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


def pytest_collection_modifyitems(config, items) -> None:
    """Skip tests marked gpu where there is no CUDA device."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
