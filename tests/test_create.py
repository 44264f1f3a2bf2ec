"""`lit_probattn.create`: layers by the names of their configurations."""

from __future__ import annotations

import ast

import pytest
import torch
import yaml

import lit_probattn
from lit_probattn.attention import MGKAttention
from lit_probattn.base.errors import ConfigError
from lit_probattn.configs import attention_entry, build_attention, class_of
from tests.support.paths import CONFIGS
from tests.support.slow import mostly_slow

NAMES = [n for n in lit_probattn.list_attention() if n != "ast"]  # needs a package of its own


def test_the_names_are_those_of_the_files():
    files = {p.relative_to(CONFIGS / "attention") for p in CONFIGS.glob("attention/*.yaml")}
    names = {p.with_suffix("").as_posix() for p in files} - {"as_released.bundle", "related.bundle"}
    names |= set(
        yaml.safe_load((CONFIGS / "attention/related.bundle.yaml").read_text(encoding="utf-8"))
    ) - {"under"}
    assert {n for n in lit_probattn.list_attention() if "/" not in n} == names
    released = {n.rsplit("/", 1)[0] for n in lit_probattn.list_attention() if "/" in n}
    assert released == {f"as_released/{code}" for code in ("fish", "lm", "lra", "translation")}


@pytest.mark.parametrize(
    "name",
    mostly_slow(NAMES, ["smgk", "multi_query", "hard_gfish", "linear", "as_released/lra/linear"]),
)
def test_a_layer_is_that_of_the_configuration(name):
    entry = attention_entry(CONFIGS / f"attention/{name}.yaml")
    heads = entry["init_args"]["num_heads"]
    width = 8 * heads
    layer = lit_probattn.create(name, width)
    same = build_attention(entry["class_path"], entry["init_args"], width, 8)
    assert type(layer) is type(same) is class_of(entry["class_path"])
    assert repr(layer) == repr(same)
    shapes = {key: value.shape for key, value in same.state_dict().items()}
    assert {key: value.shape for key, value in layer.state_dict().items()} == shapes
    same.load_state_dict(layer.state_dict())
    x = torch.randn(2, 5, width)
    torch.testing.assert_close(layer.eval()(x), same.eval()(x), rtol=0, atol=0)


def test_sizes_and_options_are_those_of_the_call():
    layer = lit_probattn.create("smgk", 24, 3, num_components=5, dropout=0.0, num_kv_heads=1)
    assert isinstance(layer, MGKAttention)
    sizes = (layer.embed_dim, layer.num_heads, layer.head_dim, layer.num_kv_heads, layer.dropout)
    assert sizes == (24, 3, 8, 1, 0.0)
    assert layer.core.num_components == 5
    assert lit_probattn.create("smgk", 24, head_dim=7).head_dim == 7
    assert lit_probattn.create("smgk", embed_dim=24, num_heads=3).dropout == 0.1  # the file's
    own = lit_probattn.create(str(CONFIGS / "attention/smgk.yaml"), 24)
    assert own.num_heads == 4


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (("smgkk", 8), "unknown attention 'smgkk'; did you mean 'smgk'"),
        (
            ("smgk", 8, 2, {"num_component": 3}),
            "has no option 'num_component'; did you mean 'num_c",
        ),
        (("smgk", 8, 2, {"zzz": 3}), "attention smgk has no option 'zzz'"),
        (("smgk", 8, 2, {"self": 3}), "has no option 'self'"),
        (("smgk", "8", 2, {}), "embed_dim must be .*, received '8'"),
        (("smgk", 8.0, 2, {}), r"embed_dim must be .*, received 8\.0"),
        (("smgk", 8, 2.0, {}), r"num_heads must be .*, received 2\.0"),
        (("smgk", 8, 2, {"head_dim": True}), "head_dim must be .*, received True"),
        ((None, 8, 2, {}), "name must be .* or a path, received None"),
        (("smgk", 8, 2, {"dropout": "x"}), "MGKAttention: dropout: Expected a <class 'float'>"),
        (("smgk", 10, 4), "num_heads must divide embed_dim"),
        (("smgk", 8, 0), "num_heads must be at least 1"),
        (("smgk", 8, 2, {"num_components": "two"}), "num_components"),
        (("smgk", 8, 2, {"dropout": 1.0}), r"dropout must be in \[0, 1\), received 1.0"),
        (("softmax", 8, 2, {"score": "gauss"}), "score"),
    ],
)
def test_what_is_wrong_is_one_line(call, expected):
    *words, options = call if isinstance(call[-1], dict) else (*call, {})
    with pytest.raises(ConfigError, match=expected) as error:
        lit_probattn.create(*words, **options)
    assert "\n" not in str(error.value)


def test_every_lazy_name_is_there():
    for name in lit_probattn._LAZY:
        assert name in dir(lit_probattn)
        assert callable(getattr(lit_probattn, name))


def test_a_second_layer_parses_few_sources(monkeypatch):
    """A type given as text is evaluated for each option, from the parsed source of its module."""
    lit_probattn.create("smgk", embed_dim=64)
    parse, parsed = ast.parse, []
    monkeypatch.setattr(ast, "parse", lambda text, *more: parsed.append(text) or parse(text, *more))
    lit_probattn.create("smgk", embed_dim=64)
    assert len([text for text in parsed if "class AttentionFactory" in text]) <= 4
