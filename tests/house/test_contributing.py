"""CONTRIBUTING.md describes the tree that is there, and its recipes work."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from lit_probattn.attention import Attention, Core, Cost, HeadCall, Variant
from tests.house.test_imports import FLOORS
from tests.support.paths import CONFIGS, ROOT

TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def drawn_tree() -> list[str]:
    """Return the paths that the drawing names, in its order."""
    drawing = TEXT.split("## Where things are")[1].split("```")[1]
    found, parent = [], ""
    for line in drawing.strip("\n").split("\n"):
        name = line.split()[0]
        if not line.startswith(" "):
            parent = name
            found.append(name.rstrip("/"))
        else:
            found.append(f"lit_probattn/{name.rstrip('/')}" if parent else name)
    return found


def test_every_room_that_is_drawn_exists_and_every_room_is_drawn():
    drawn = drawn_tree()
    assert [path for path in drawn if not (ROOT / path).exists()] == []
    rooms = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "lit_probattn").iterdir()
        if any(path.glob("*.py"))  # a checkout keeps the bytecode of folders that have gone
    }
    assert rooms <= set(drawn)
    for top in ("datamodules", "profiling", "configs", "tests"):
        assert top in drawn


def test_the_drawing_has_the_order_of_the_floors():
    floors = [room for floor in FLOORS for room in floor]
    shown = [path for path in drawn_tree() if path in floors]
    assert shown == [room for room in floors if room in shown]


@pytest.mark.parametrize("package", ["profiling", "datamodules", "tests"])
def test_folders_named_beside_a_package_exist(package):
    (line,) = re.findall(rf"^{package}/ .*$", TEXT, re.MULTILINE)
    named = line.split(":")[-1].replace(",", " ").split() if ":" in line else []
    if package == "tests":
        named = line.split("and")[-1].split()
    assert named
    assert [name for name in named if not (ROOT / package / name).is_dir()] == []


def test_files_that_the_recipes_name_exist():
    named = set(re.findall(r"`([\w/]+\.(?:py|md|csv|yaml))`", TEXT))
    inside = {"functions.py", "layer.py", "masks.py"}
    missing = [
        name
        for name in named - inside
        if not any((ROOT / base / name).exists() for base in ("", "lit_probattn"))
    ]
    assert missing == []
    assert (CONFIGS / "reproduce" / "published.csv").is_file()


@dataclass(frozen=True)
class Cosine(Variant):
    """A variant as the recipe has it: cosine similarities, ten times."""

    name = "cosine"

    def scores(self, call: HeadCall) -> torch.Tensor:
        query, key = (x / x.norm(dim=-1, keepdim=True) for x in (call.query, call.key))
        return 10.0 * query @ key.mT


class CosineCore(Core):
    makes = Cosine

    def variant(self, call: HeadCall) -> Cosine:
        return Cosine()


class CosineAttention(Attention):
    """Cosine attention."""

    core_class = CosineCore

    def cost(self, seq_len: int) -> Cost:
        sizes = self.sizes(seq_len)
        return Cost(0, sizes.projection_macs, sizes.num_parameters)


def test_a_variant_needs_only_what_the_recipe_says():
    layer = CosineAttention(8, 2)
    layer.backend = "reference"
    x = torch.randn(2, 5, 8)
    assert layer(x, is_causal=True).shape == (2, 5, 8)
    torch.testing.assert_close(layer.weights(x).sum(-1), torch.ones(2, 2, 5))
    layer.backend = "auto"
    layer(x).sum().backward()
    with pytest.raises(NotImplementedError, match="cosine has no backend 'sdpa'"):
        CosineAttention(8, 2, backend="sdpa")(x)


def test_every_declared_dependency_has_its_constraint():
    content = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project, tools = content["project"], content["dependency-groups"].values()
    groups = [project["dependencies"], *project["optional-dependencies"].values(), *tools]
    declared = {canonicalize_name(Requirement(line).name) for group in groups for line in group}
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {canonicalize_name(line.split("==")[0]) for line in lines}
    assert declared - pinned == set()
    assert lines == sorted(set(lines))
