"""What the proofs of deletion and addition rest on; the proofs themselves are commands."""

from __future__ import annotations

import shutil
from functools import partial

import pytest

from lit_probattn.attention.own.contract import CHECKS, EMBED, HEAD
from tests.attention.addition_proof import LINE, add
from tests.attention.deletion_proof import REMOVALS, mentions, remove, without_block
from tests.attention.variants import keep_in_blocks
from tests.support.cosine import CosineAttention
from tests.support.paths import ROOT
from tests.support.slow import mostly_slow

FEW = ("lit_probattn/attention", "configs/attention", "configs/reproduce")
FEW += (
    "tests/attention",
    "tests/bad_inputs",
    "tests/house",
    "docs",
    "lit_probattn/functional",
    "tests/functional",
)
# In the copies that the proofs make, a variant is gone or has come.
THERE = [name for name, what in REMOVALS.items() if (ROOT / what.files[0]).is_file()]
COSINE = ROOT / "lit_probattn/attention/cosine.py"


@pytest.fixture
def copy(tmp_path):
    """The part of the repository that the proofs change."""
    for name in FEW:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "README.md", tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", THERE)
def test_what_is_listed_is_there_and_nothing_else_names_the_variant(name, copy):
    told = remove(copy, REMOVALS[name])
    assert len([line for line in told if line.startswith("file ")]) == 5
    assert mentions(copy, REMOVALS[name]) == []
    with pytest.raises((ValueError, FileNotFoundError)):
        remove(copy, REMOVALS[name])


@pytest.mark.parametrize("name", THERE)
def test_no_code_outside_the_copy_names_the_variant(name):
    own = {*REMOVALS[name].files, *REMOVALS[name].lines, *REMOVALS[name].blocks}
    files = {mention.rpartition(":")[0] for mention in mentions(ROOT, REMOVALS[name])}
    assert files <= own


def test_a_block_goes_with_what_is_below_it():
    text = "rows:\n  a:\n    x: 1\n  b:\n    x: 2\n\n    y: 3\n  c: 4\nend: 5\n"
    assert without_block(text, "b") == "rows:\n  a:\n    x: 1\n  c: 4\nend: 5\n"
    assert without_block(text, "rows") == "end: 5\n"


@pytest.mark.skipif(COSINE.is_file(), reason="the variant is in the package already")
def test_a_variant_is_three_files_and_one_line(copy):
    before = {path: path.read_bytes() for path in copy.rglob("*.*") if path.is_file()}
    add(copy)
    changed = [path for path, text in before.items() if path.read_bytes() != text]
    added = {path for path in copy.rglob("*.*") if path.is_file()} - set(before)
    assert [path.name for path in changed] == ["__init__.pyi"]
    assert changed[0].read_text(encoding="utf-8").replace(LINE, "") == before[changed[0]].decode()
    assert len(added) == 3


@pytest.mark.parametrize(
    "check", mostly_slow(CHECKS, ["backends", "causality", "cost", "gradients", "state_dict"])
)
def test_a_variant_of_another_package_keeps_the_contract(check):
    keep_in_blocks(check, partial(CosineAttention, EMBED, 4, head_dim=HEAD))
