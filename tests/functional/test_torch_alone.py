"""Attention where torch is the only dependency, and as a package under another name."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib import metadata

import pytest

from lit_probattn.base.errors import ConfigError
from lit_probattn.kernels import package
from tests.attention.deletion_proof import left
from tests.support.paths import ROOT

# Installed by torch itself.
OF_TORCH = {"torch", "numpy", "triton", "setuptools"}
HIDE = """
import sys

class Hide:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {hidden!r}:
            return None
        return self.finder.find_spec(name, path, target)

sys.meta_path[:] = [Hide(finder) for finder in sys.meta_path]
"""
USE = """
import torch
found = {}
for name, cls in attention.variants().items():
    try:
        torch.manual_seed(0)
        layer = cls(12, 2, head_dim=6)
        x = torch.randn(2, 5, 12, requires_grad=True)
        out = layer(x, is_causal=True)
        out.square().sum().backward()
        assert x.grad.isfinite().all()
        found[name] = out.double().abs().sum().item()
    except ValueError as error:
        found[name] = str(error)
heads = torch.randn(1, 2, 5, 6)
found["functional"] = tuple(functional.softmax_attention(heads, heads, heads).shape)
print({name: found[name] for name in sorted(found)})
print(sorted({n.partition("::")[0] for n in torch._C._dispatch_get_all_op_names()}))
"""


def other_modules():
    """Return the top modules of all required and optional dependencies but torch and its own."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    lines = [*project["dependencies"], *(line for extra in extras for line in extra)]
    names = {re.match(r"[\w-]+", line)[0].lower() for line in lines} - OF_TORCH
    installed = metadata.packages_distributions()
    modules = {m for m, dists in installed.items() if names & {d.lower() for d in dists}}
    assert {"lightning", "pydantic", "yaml", "pandas"} <= modules
    return modules


def run(code, hidden, folder):
    code = HIDE.format(hidden=hidden) + code
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=folder, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def by_its_name():
    """Return what the package prints where its other dependencies are hidden."""
    return run(
        "from lit_probattn import attention, functional, kernels" + USE, other_modules(), ROOT
    )


def test_attention_needs_torch_alone(by_its_name):
    packages = re.findall(r"\w+ needs the package (\w+)", by_its_name)
    assert packages == ["entmax" for _ in left(["ast"])]
    assert "'SoftmaxAttention': " in by_its_name


def test_the_layout_for_kernels_is_a_package_under_any_name(by_its_name, tmp_path):
    target = package.write(tmp_path / "out")
    assert target == tmp_path / "out/build/torch-noarch"
    text = "".join(path.read_text() for path in target.rglob("*.py*"))
    assert not re.search(r"^\s*(from|import) lit_probattn\b", text, re.M)
    assert (tmp_path / "out/build.toml").is_file()
    load = f"""
from importlib.util import module_from_spec, spec_from_file_location
path = {str(target)!r}
spec = spec_from_file_location("anything_at_all", path + "/__init__.py")
module = sys.modules["anything_at_all"] = module_from_spec(spec)
spec.loader.exec_module(module)
attention, functional = module.attention, module.functional
"""
    shown = run(load + USE, other_modules() | {"lit_probattn"}, tmp_path)
    values, names = shown.splitlines()
    assert values == by_its_name.splitlines()[0]
    assert re.search(r"'lit_probattn_[0-9a-f]{8}'", names)
    assert "'lit_probattn'" not in names


def test_a_folder_with_files_is_hidden(tmp_path, capsys):
    (tmp_path / "mine").write_text("")
    with pytest.raises(ConfigError, match="is not empty"):
        package.write(tmp_path)
    assert package.main([str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("error: ")
