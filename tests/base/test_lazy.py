"""Packages whose classes are imported when they are first used."""

from __future__ import annotations

import ast
import importlib
import json

import pytest

from tests.support.forks import program
from tests.support.paths import ROOT

PACKAGES = ("lit_probattn.attention", "lit_probattn.tasks")


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_has_what_its_stub_says(name):
    package = importlib.import_module(name)
    stub = ast.parse((ROOT / name.replace(".", "/") / "__init__.pyi").read_text(encoding="utf-8"))
    names = {
        a.asname: a.name for n in ast.walk(stub) if isinstance(n, ast.ImportFrom) for a in n.names
    }
    assert all(alias == original for alias, original in names.items())
    assert set(package.__all__) - {"variants"} == set(names)
    for item in names:
        found = getattr(package, item)
        assert item == found.__name__
        assert package.__dict__[item] is found, "the next look-up is Python's own"
    assert set(package.__all__) <= set(dir(package))


@pytest.mark.parametrize("name", PACKAGES)
def test_an_unknown_name_is_refused_as_of_any_module(name):
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        importlib.import_module(name).Nothing  # noqa: B018


CODE = """
import json, sys
from lit_probattn.configs import canonical, load_classes
unused = ["lit_probattn.attention.fish.layer", "lit_probattn.tasks.translation"]
told = {"before": [name in sys.modules for name in unused]}
load_classes(["--model", "Translation", "--model.init_args.attention=FiSHAttention"])
told["after"] = [name in sys.modules for name in unused]
told["rest"] = "lit_probattn.tasks.decision" in sys.modules
told["path"] = canonical({"class_path": "DecisionMaking"})["class_path"]
load_classes(["fit", "--help"])
told["help"] = "lit_probattn.tasks.decision" in sys.modules
print(json.dumps(told))
"""


def test_classes_are_found_by_their_names_alone():
    (told,) = program(CODE, ROOT)
    assert json.loads(told) == {
        "before": [False, False],
        "after": [True, True],
        "rest": False,
        "path": "lit_probattn.tasks.DecisionMaking",
        "help": True,
    }
