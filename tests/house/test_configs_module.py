"""`lit_probattn.configs`: reading, merging, one form, sizes, names of runs."""

from __future__ import annotations

import copy

import pytest
import yaml

from datamodules import Synthetic
from lit_probattn import configs
from lit_probattn.base.config_files import merge, run_stem
from lit_probattn.base.errors import ConfigError
from lit_probattn.cli.files import read_config_files, run_name
from lit_probattn.configs import canonical, compose, instantiate, read_yaml
from tests.support.paths import CONFIGS, shipped

# ---- names of runs -----------------------------------------------------------------------------


def test_files_of_different_folders_differ_in_what_they_add_to_the_name_of_a_run():
    for kind in ("task", "attention"):
        files = shipped(kind)
        assert len({run_stem(path) for path in files}) == len(files) > 20


def test_a_run_is_named_after_its_files():
    files = ("tasks/tiny/lra_text.yaml", "attention/as_released/lra/mgk.yaml")
    contents = read_config_files([str(CONFIGS / path) for path in files])
    assert run_name(contents, model=None) == "lra_text_tiny-code_lra_mgk"


LAUGHS = b"a0: &a0 [1, 1]\n" + b"".join(
    b"a%d: &a%d [*a%d, *a%d]\n" % (n, n, n - 1, n - 1) for n in range(1, 60)
)


# ---- reading and merging -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"configuration file not found: .*wrong.yaml; did you mean '.*wrong1.yaml'"),
        (b"\xff\xfe\x00", r"wrong.yaml is not a text file: 'utf-8'"),
        (b"a: 1\nb: [1,", r"wrong.yaml:2: not valid YAML: expected the node content"),
        (b"- 1", r"wrong.yaml: expected a mapping, received list"),
        (b"", r"wrong.yaml: expected a mapping, received NoneType"),
        (b"a: 1\n1: 2", r"wrong.yaml:2: keys must be strings, received 1"),
        (b"a: &a {b: *a}", r"wrong.yaml:1: recursive alias"),
        (b"a: {b: 1,\n  c: 2,\n  b: 3}", r"wrong.yaml:3: duplicate key 'b'"),
        (b"trainer: {a: 1}\nrun: {}\ntrainer: {b: 1}", r"wrong.yaml:3: duplicate key 'trainer'"),
        (b"a: 1\ntrue: 2", r"wrong.yaml:2: keys must be strings, received true"),
        (b"a: \x00", r"wrong.yaml: not valid YAML: .*special characters"),
        (b"a: " + 1000 * b"[", r"wrong.yaml: too deeply nested"),
        (LAUGHS, r"wrong.yaml: more than 100000 values"),
        (b"trainer: {a: 1}\ntrainer.a: 2", r"wrong.yaml: trainer.a is set twice"),
        (
            b"a: [" + b"1, " * 2**19 + b"1]",
            r"wrong.yaml has 1,572,870 bytes, expected at most 1,048,576",
        ),
    ],
)
def test_what_cannot_be_read_is_one_line(content, message, tmp_path):
    (tmp_path / "wrong1.yaml").write_text("a: 1")
    path = tmp_path / "wrong.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as error:
        read_yaml(path)
    assert "\n" not in str(error.value)


def test_a_link_to_nothing_is_named(tmp_path):
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    with pytest.raises(ConfigError, match=r"loop\.yaml is a broken symbolic link$"):
        read_yaml(tmp_path / "loop.yaml")


def test_merge_is_by_key_and_makes_a_copy(tmp_path):
    first, second = {"a": {"b": 1, "c": [1]}, "d": {"e": 1}}, {"a": {"b": 2}, "d": None}
    before = copy.deepcopy((first, second))
    merged = merge(first, second)
    assert merged == {"a": {"b": 2, "c": [1]}, "d": None}
    merged["a"]["c"].append(2)
    assert (first, second) == before
    assert merge() == {}
    for name, content in (("1", first), ("2", second)):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(content))
    files = [tmp_path / "1.yaml", tmp_path / "2.yaml"]
    composed = compose(files, {"a.b": 3, "new.key": 4})
    assert composed == {"a": {"b": 3, "c": [1]}, "d": None, "new": {"key": 4}}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "datamodules.Synthetic: batch_size must be at least 1, received 0"),
        ({"nonsense": 3}, "datamodules.Synthetic: .*nonsense"),
        ({"batch_size": "x"}, "datamodules.Synthetic: .*batch_size.*int.*x"),
    ],
)
def test_what_cannot_be_built_says_why(arguments, message):
    with pytest.raises(ConfigError, match=message) as error:
        instantiate(Synthetic, {"class_path": "datamodules.Synthetic", "init_args": arguments})
    assert "\n" not in str(error.value)
    assert "Namespace" not in str(error.value)


# ---- one form ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "public"),
    [
        ("lit_probattn.attention.mgk.layer.MGKAttention", "lit_probattn.attention.MGKAttention"),
        ("lit_probattn.tasks.pair_classifier.PairClassifier", "lit_probattn.tasks.PairClassifier"),
        ("datamodules.series.uea.UEA", "datamodules.UEA"),
        ("datamodules.made.Other", "datamodules.made.Other"),
        ("torch.nn.Linear", "torch.nn.Linear"),
    ],
)
def test_classes_have_their_public_names(written, public):
    saved = {"callbacks": [{"class_path": written, "init_args": {"x": [1]}}, 3]}
    before = copy.deepcopy(saved)
    found = canonical(saved)
    assert found == {"callbacks": [{"class_path": public, "init_args": {"x": [1]}}, 3]}
    assert saved == before
    assert canonical(found) == found


# ---- sizes -------------------------------------------------------------------------------------


def test_sizes_are_linked_where_the_constructor_takes_them():
    model = {"class_path": "lit_probattn.tasks.SeriesClassifier", "init_args": {"max_seq_len": 9}}
    known = {"num_features": 3, "num_classes": None, "vocab_size": 11}
    configs.link_sizes(model, known, type("Data", (), {"num_classes": 5, "num_features": 7}))
    assert model["init_args"] == {"max_seq_len": 9, "num_features": 3, "num_classes": 5}
    with pytest.raises(ConfigError, match=r"unknown class 'nowhere\.Model'"):
        configs.link_sizes({"class_path": "nowhere.Model"}, {})
