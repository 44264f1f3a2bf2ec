"""Who may import whom: floors, circles, private members, and a package without optional parts."""

from __future__ import annotations

import ast
import gc
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch.callbacks import Callback, RichProgressBar
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn

from tests.house.private_members import members_of, nodes_of, own_names, private_uses
from tests.support.forks import program
from tests.support.fresh import fresh_python
from tests.support.paths import ROOT

PACKAGES = ("lit_probattn", "datamodules", "profiling")
# From the top; a file imports from its own room and from rooms below it. Modules that are named by
# a string and imported when they are called are no arrows.
FLOORS = (
    ("lit_probattn/reproduce",),
    ("lit_probattn/commands",),
    ("profiling",),
    ("lit_probattn/compare",),
    ("lit_probattn/analysis",),
    ("lit_probattn/cli", "lit_probattn/__main__.py"),
    ("lit_probattn/convert",),
    ("lit_probattn/training",),
    ("lit_probattn/tasks",),
    ("lit_probattn/configs.py",),
    ("lit_probattn/rollouts",),
    ("lit_probattn/models",),
    ("lit_probattn/interop",),
    ("lit_probattn/functional",),
    ("lit_probattn/attention",),
    ("lit_probattn/kernels",),
    ("lit_probattn/randomness.py",),
    ("lit_probattn/measure", "lit_probattn/experiments"),
    ("lit_probattn/records",),
    ("lit_probattn/base",),
    ("lit_probattn/__init__.py",),
)
# The only rooms that may name the data modules, which themselves import the ground floor alone.
KNOW_DATA = (
    *("lit_probattn/reproduce", "lit_probattn/compare"),
    "lit_probattn/commands",
)
# Single-device code: knows no rank, no strategy.
SINGLE_DEVICE = (
    *("lit_probattn/attention", "lit_probattn/kernels", "lit_probattn/models"),
    "lit_probattn/rollouts",
)
# In these rooms the folders have floors too, from the top.
INNER_FLOORS = {
    "lit_probattn/attention": ("released", "fish", "linear", "mgk", "cost"),
    "profiling": ("cli.py", "study.py", "kernels", "report", "sweep", "cost", "measure"),
}
MOST_FILES = 15
# Files of the package that lie in none of its folders.
LOOSE = {"__init__.py", "__main__.py", "configs.py", "randomness.py"}


@cache
def files() -> dict[str, str]:
    """Return every module by name, with its path."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            relative = path.relative_to(ROOT)
            parts = relative.with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = str(relative)
    return found


@cache
def nodes(path: str) -> list[ast.AST]:
    """Return the nodes of a file that the tests look at."""
    gc.disable()  # all nodes stay: to look for others among them takes longer than to parse
    try:
        return nodes_of((ROOT / path).read_text(encoding="utf-8"))
    finally:
        gc.enable()


@cache
def imported(path: str) -> frozenset[str]:
    """Return the modules that a file imports anywhere, also inside functions, by full name."""
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path} imports relatively"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in files() else node.module)
    return frozenset(found)


def arrows() -> Iterator[tuple[str, str]]:
    """Every import of ours from ours: (path, path)."""
    for path in files().values():
        for name in imported(path):
            if name in files() and files()[name] != path:
                yield path, files()[name]


def lies_in(path: str, room: str) -> bool:
    return path == room or path.startswith(room + "/")


def floor(path: str) -> int:
    """Return the number of the floor of a file, counted from the top."""
    rooms = [(len(r), i) for i, rooms in enumerate(FLOORS) for r in rooms if lies_in(path, r)]
    assert rooms, f"{path} lies on no floor: name it in FLOORS"
    return max(rooms)[1]  # the innermost room


def test_no_import_runs_upwards():
    upwards = [
        f"{source} -> {target}"
        for source, target in arrows()
        if not lies_in(source, "datamodules") and not lies_in(target, "datamodules")
        if floor(target) < floor(source)
    ]
    assert upwards == []


def test_data_modules_import_the_ground_floor_alone_and_few_name_them():
    crossing = [
        f"{source} -> {target}"
        for source, target in arrows()
        if lies_in(source, "datamodules") != lies_in(target, "datamodules")
        and not lies_in(target, "lit_probattn/base")
        and not any(lies_in(source, room) for room in KNOW_DATA)
    ]
    assert crossing == []


def test_no_module_imports_variants_as_released():
    """Configurations name them, by the names that the package exports."""
    room = "lit_probattn/attention/released"
    assert [s for s, t in arrows() if lies_in(t, room) and not lies_in(s, room)] == []


@pytest.mark.parametrize("room", INNER_FLOORS)
def test_no_import_runs_upwards_inside(room):
    order = INNER_FLOORS[room]

    def number(path: str) -> int | None:
        return next((i for i, part in enumerate(order) if lies_in(path, f"{room}/{part}")), None)

    upwards = []
    for source, target in arrows():
        above, below = number(source), number(target)
        if above is not None and below is not None and below < above:
            upwards.append(f"{source} -> {target}")
    assert upwards == []


def test_no_circles():
    """Modules that import each other, directly or through others, also inside functions."""
    graph: dict[str, list[str]] = {path: [] for path in files().values()}
    for source, target in arrows():
        graph[source].append(target)
    assert circles(graph) == []


def circles(graph: dict[str, list[str]]) -> list[list[str]]:
    """Return the strongly connected components of more than one node (Tarjan, 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in graph[node]:
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            component = []
            while not component or component[-1] != node:
                component.append(stack.pop())
            if len(component) > 1:
                found.append(sorted(component))

    for node in graph:
        if node not in index:
            visit(node)
    return found


def test_circles_are_found():
    assert circles({"a": ["b"], "b": ["c"], "c": ["b"], "d": ["a"]}) == [["b", "c"]]


def test_attention_and_models_are_single_device_code():
    bad = [
        f"{path} imports {name}"
        for path in files().values()
        if any(lies_in(path, room) for room in SINGLE_DEVICE)
        for name in imported(path)
        if name.startswith(("torch.distributed", "lightning"))
    ]
    assert bad == []


def test_folders_are_small():
    paths = [Path(path) for path in files().values()]
    paths += [path.relative_to(ROOT) for path in (ROOT / "tests").rglob("*.py")]
    counts = Counter(str(path.parent) for path in paths)
    assert {folder: n for folder, n in counts.items() if n > MOST_FILES} == {}


def test_few_files_lie_loose():
    assert {path.name for path in (ROOT / "lit_probattn").glob("*.py")} == LOOSE


# ---- private members of libraries -------------------------------------------------------------

HOMES = {
    "lit_probattn/base/torch_internals.py",
    "lit_probattn/training/lightning_internals.py",
    "lit_probattn/cli/jsonargparse_internals.py",
    "profiling/kernels/triton_internals.py",
    "datamodules/core/loaders.py",
    "lit_probattn/interop/swap/interface.py",
}
BASES = (
    *(nn.Module, torch.utils.data.Dataset, torch.utils.data.Sampler, torch.autograd.Function),
    *(pl.LightningModule, pl.LightningDataModule, Callback, RichProgressBar, pl.Trainer),
    *(LightningCLI, ModelParallelStrategy, ArgumentParser),
)


def test_private_members_of_libraries_stay_in_their_homes():
    parsed = {path: nodes(path) for path in files().values()}
    inherited = members_of(iter(BASES))
    own = own_names(list(parsed.values()), inherited)
    outside = [
        f"{path}:{line} {name}"
        for path, found in parsed.items()
        if path not in HOMES
        for line, name in private_uses(found, own, inherited)
    ]
    assert outside == []
    for home in (home for home in HOMES if home.endswith("_internals.py")):
        assert list(private_uses(parsed[home], own, inherited)), f"{home} has nothing private"


@pytest.mark.parametrize(
    "source",
    [
        "from torch.utils._python_dispatch import TorchDispatchMode",
        "from lightning.pytorch.cli import _InstantiatorFn",
        "import torch._dynamo",
        "trainer._logger_connector.update()",
        "class M(nn.Module):\n    def _apply(self, fn): ...",
        "self._modules['a']",
        "task.__dict__['_modules'] = {}",
    ],
)
def test_a_private_member_is_found(source):
    uses = private_uses(nodes_of(source), {"_own"}, members_of(iter(BASES)))
    assert [name for _, name in uses]


def test_what_is_ours_or_documented_is_left_alone():
    source = "self._own\nvalues._replace(a=1)\nos._exit(0)\nfrom ours import _own\nx.__dict__"
    assert list(private_uses(nodes_of(source), {"_own"}, set())) == []


# ---- what an import brings along --------------------------------------------------------------

OPTIONAL = ("triton", "aeon", "entmax", "tokenizers", "sacremoses", "sacrebleu", "fvcore")
HEAVY = ("lightning", "pandas", "timm")


def test_package_imports_and_attends_without_optional_packages():
    """A process in which none of them can be found; kernels are imported lazily.

    What declares operators to PyTorch is not: a graph must know them before it is recorded.
    Layers and presets do not import the libraries of runs either; that they do not import
    PyTorch's compiler takes a new process, in `tests/functional/test_torch_alone.py`.
    """
    code = f"""
import sys
for name in [name for name in sys.modules if name.partition(".")[0] in {HEAVY!r}]:
    del sys.modules[name]
import torch
from lit_probattn import swap
from lit_probattn.attention import MGKAttention, variants
print([name for name in sys.modules if name.startswith("lit_probattn.kernels.")])
layer = MGKAttention(embed_dim=8, head_dim=4, num_heads=2)
print(tuple(layer(torch.zeros(1, 3, 8)).shape))
model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(32, 4, batch_first=True), 2)
model, _ = swap(model, "mgk", heads=0.5)
print(tuple(model.eval()(torch.zeros(2, 5, 32)).shape), len(variants()) > 9)
print([name for name in {HEAVY!r} if name in sys.modules])
import datamodules
"""
    shown = program(code, ROOT, missing=OPTIONAL)
    assert shown == ["[]", "(1, 3, 8)", "(2, 5, 32) True", "[]"]


TORCH = ("torch", "lightning", "numpy")
LISTED = (*TORCH, "triton", "pandas", "jsonargparse", "matplotlib", "sympy")
MAIN = "from lit_probattn.__main__ import main\n"
MODELS = [path.stem for path in (ROOT / "lit_probattn").iterdir() if path.stem != "base"]
# What runs, and the modules that it does without.
LIGHT = {
    "the package": (
        "from lit_probattn import list_attention; assert len(list_attention()) > 20",
        (*TORCH, "yaml"),
    ),
    "names of configurations": (
        "from lit_probattn.base.config_files import file_named, named_files\n"
        "assert file_named('attention', 'smgk') and named_files('task')",
        (*TORCH, "yaml"),
    ),
    "lists of names": (
        f"{MAIN}from lit_probattn.commands.listing import KINDS\n"
        "assert not any([main(['list', kind]) for kind in KINDS])",
        LISTED,
    ),
    "a list of tables": (
        f"{MAIN}assert main(['reproduce', '--list']) == 0",
        ("torch", "lightning", "pandas", "matplotlib"),
    ),
    "a completion script": (f"{MAIN}assert main(['--print-completion', 'bash']) == 0", TORCH),
    "data": (
        "from datamodules.__main__ import main; assert main(['check', 'synthetic']) == 0",
        [f"lit_probattn.{name}" for name in MODELS],
    ),
}


@pytest.mark.parametrize("name", LIGHT)
def test_nothing_heavy_is_imported_for(name, tmp_path):
    """In an empty folder, since results in `runs` import PyTorch for their state."""
    if name == "a completion script":
        pytest.importorskip("shtab")
    code, heavy = LIGHT[name]
    ends = f"\nimport sys; loaded = {{*{heavy!r}}} & {{*sys.modules}}; assert not loaded, loaded"
    fresh_python("-c", code + ends, cwd=tmp_path)
