"""Attention where torch is the only dependency, and as a package under another name."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata

import pytest

from lit_probattn.base.errors import ConfigError
from lit_probattn.kernels import package
from tests.support.fresh import fresh_python
from tests.support.paths import ROOT

# Installed by torch itself.
OF_TORCH = {"torch", "numpy", "triton", "setuptools"}
# In a new process: the package first under another name, while its own name is hidden too.
CODE = """
import sys
from importlib.util import module_from_spec, spec_from_file_location

hidden, path, asked = set(sys.argv[2:]), sys.argv[1], []

class Hide:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            asked.append(name)
            return None
        return self.finder.find_spec(name, path, target)

sys.meta_path[:] = [Hide(finder) for finder in sys.meta_path]
import torch

def used(attention, functional):
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

spec = spec_from_file_location("anything_at_all", path + "/__init__.py")
module = sys.modules["anything_at_all"] = module_from_spec(spec)
spec.loader.exec_module(module)
module.attention.MGKAttention(32, 4).eval()(torch.zeros(2, 5, 32))
module.attention.FiSHAttention(32, 4)(torch.zeros(2, 5, 32))
module.attention.LinearAttention(32, 4)(torch.zeros(2, 5, 32), is_causal=True)
compiler = ["torch._dynamo", "torch._inductor", "triton"]
print([n for n in ("sympy", *compiler) if n in sys.modules])
used(module.attention, module.functional)
hidden.remove("lit_probattn")
from lit_probattn import attention, functional, kernels
used(attention, functional)
from lit_probattn import swap
model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(32, 4, batch_first=True), 2)
model, _ = swap(model, attention.MGKAttention, heads=0.5)
model.eval()(torch.zeros(2, 5, 32))
print([n for n in asked if n.partition(".")[0] in ("timm", "transformers", "lightning", "pandas")])
print([n for n in compiler if n in sys.modules])
"""


def other_modules():
    """Return the top modules of all required and optional dependencies but torch and its own."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].values()
    lines = [*project["dependencies"], *(line for extra in extras for line in extra)]
    names = {re.match(r"[\w-]+", line)[0].lower() for line in lines} - OF_TORCH
    installed = metadata.packages_distributions()
    modules = {m for m, dists in installed.items() if names & {d.lower() for d in dists}}
    assert {"lightning", "pydantic", "yaml", "pandas"} <= modules
    return modules


def test_attention_needs_torch_alone_under_any_name(tmp_path):
    """And `swap` imports no library of models before it gets one; nothing imports the compiler.

    The compiler, which takes longer than PyTorch, waits for the first call that needs it.
    """
    target = package.write(tmp_path / "out")
    assert target == tmp_path / "out/build/torch-noarch"
    text = "".join(path.read_text(encoding="utf-8") for path in target.rglob("*.py*"))
    assert not re.search(r"^\s*(from|import) lit_probattn\b", text, re.M)
    assert (tmp_path / "out/build.toml").is_file()
    words = ("-c", CODE, target, "lit_probattn", *other_modules())
    done = fresh_python(*words, cwd=tmp_path)
    first, copied, names, values, _, asked, heavy = done.stdout.splitlines()
    assert values == copied
    packages = re.findall(r"\w+ needs the package (\w+)", values)
    assert packages == ["entmax"]
    assert "'SoftmaxAttention': " in values
    assert re.search(r"'lit_probattn_[0-9a-f]{8}'", names)
    assert "'lit_probattn'" not in names
    assert (first, asked, heavy) == ("[]", "[]", "[]")


def test_a_folder_with_files_is_hidden(tmp_path, capsys):
    (tmp_path / "mine").write_text("")
    with pytest.raises(ConfigError, match="is not empty"):
        package.write(tmp_path)
    assert package.main([str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("error: ")
