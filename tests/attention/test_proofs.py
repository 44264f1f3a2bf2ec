"""A variant owns all code that names it; one is added by a file, a configuration and a line."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from lit_probattn.attention.own.contract import CHECKS, EMBED, HEAD
from lit_probattn.base.processes import capture
from tests.attention.variants import keep_in_blocks
from tests.support.cosine import CosineAttention
from tests.support.paths import ROOT
from tests.support.slow import mostly_slow

# What names a variant in code and configurations, and where beside its own files: a line each.
NAMES = {
    "polynomial": (
        r"Polynomial(Attention|Core)|attention[./]polynomial|polynomial\.yaml|polynomial_scores",
        ["configs/reproduce/value_aware_table2.yaml", "lit_probattn/attention/__init__.pyi"],
    ),
    "ast": (
        r"AST(Attention|Core)|lit_probattn[./]attention[./]ast\b|attention/ast\.yaml|test_ast\b",
        ["configs/reproduce/fish_ast.yaml", "lit_probattn/attention/__init__.pyi"],
    ),
}
CODE = ("lit_probattn", "profiling", "datamodules", "tests", "configs", "Makefile")
# Classes that the package does not have, by the names of their presets.
ADDED = {
    "cosine": ("CosineAttention", "tests/support/cosine.py"),
    "alibi_mgk": ("ALiBiMGKAttention", "tests/attention/own/alibi.py"),
}
CONFIG = """\
model:
  init_args:
    attention:
      class_path: lit_probattn.attention.{cls}
      init_args:
        num_heads: 4
        dropout: 0.0
"""


@pytest.fixture
def clone(tmp_path):
    """The last commit."""
    subprocess.run(["git", "clone", "-q", "--local", str(ROOT), str(tmp_path)], check=True)
    return tmp_path


def assert_tests_pass(clone: Path, *words: str) -> None:
    """Run fast tests of a changed clone."""
    code = (
        "import sys, lit_probattn, pytest; assert lit_probattn.__file__.startswith(sys.argv[1]);"
        "raise SystemExit(pytest.main(sys.argv[2:]))"
    )
    flags = ["-o", "addopts=", "-p", "no:cacheprovider", "-q", "-m", "not slow"]
    environment = {**os.environ, "PYTHONPATH": str(clone)}
    command = [sys.executable, "-c", code, str(clone), *flags, *words]
    done = capture(command, cwd=clone, env=environment)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def own_files(name: str) -> set[str]:
    """Return the three files of a variant, and those of its functional form."""
    places = ("lit_probattn/attention/", "lit_probattn/functional/")
    tests = ("tests/attention/test_", "tests/functional/test_")
    return {f"{place}{name}.py" for place in (*places, *tests)} | {f"configs/attention/{name}.yaml"}


def lines_that_name(pattern: str) -> list[str]:
    """Return the file of each line of code and configurations that has a pattern, but of this."""
    return [
        path.relative_to(ROOT).as_posix()
        for name in CODE
        for path in ([ROOT / name] if (ROOT / name).is_file() else sorted((ROOT / name).rglob("*")))
        if path.suffix in (".py", ".pyi", ".yaml", ".csv", ".json", "") and path.is_file()
        if path != Path(__file__)
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.search(pattern, line)
    ]


@pytest.mark.parametrize("name", NAMES)
def test_no_code_but_a_variants_own_names_it(name):
    pattern, places = NAMES[name]
    own, found = own_files(name), lines_that_name(pattern)
    assert all((ROOT / path).is_file() for path in own)
    assert own & {*found}
    assert sorted(path for path in found if path not in own) == places


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", NAMES)
def test_the_others_work_without_a_variant(name, clone):
    for path in own_files(name):
        (clone / path).unlink()
    for package in ("attention/__init__.pyi", "functional/__init__.py"):
        path = clone / "lit_probattn" / package
        lines = path.read_text().splitlines(keepends=True)
        kept = [line for line in lines if f".{name} import" not in line]
        assert len(kept) == len(lines) - 1
        path.write_text("".join(kept))
    places = ("attention/test_contract.py", "attention/test_core.py", "house/test_imports.py")
    assert_tests_pass(clone, *(f"tests/{place}" for place in places), "-n", "2")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ADDED)
def test_a_variant_is_a_file_a_configuration_and_a_line(name, clone):
    """The contract and the tests of engines and configurations find it by themselves."""
    cls, source = ADDED[name]
    shutil.copy(ROOT / source, clone / f"lit_probattn/attention/{name}.py")
    (clone / f"configs/attention/{name}.yaml").write_text(CONFIG.format(cls=cls))
    with (clone / "lit_probattn/attention/__init__.pyi").open("a") as init:
        init.write(f"from lit_probattn.attention.{name} import {cls} as {cls}\n")
    places = ("attention/test_contract.py", "attention/engines", "house/test_configs.py")
    chosen = ("-k", f"{name} or {cls}")
    assert_tests_pass(clone, *(f"tests/{place}" for place in places), *chosen)


@pytest.mark.parametrize(
    "check", mostly_slow(CHECKS, ["backends", "causality", "cost", "gradients", "state_dict"])
)
def test_a_variant_of_another_package_keeps_the_contract(check):
    keep_in_blocks(check, partial(CosineAttention, EMBED, 4, head_dim=HEAD))
