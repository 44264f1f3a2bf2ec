"""`lit_probattn.configs`: finding, reading, merging, upgrading, sizes, names of runs."""

from __future__ import annotations

import copy

import pytest
import yaml

from datamodules import Synthetic
from lit_probattn import configs
from lit_probattn.base.config_files import find, run_stem
from lit_probattn.cli.app import main
from lit_probattn.cli.files import read_config_files, run_name
from lit_probattn.configs import (
    ConfigError,
    compose,
    instantiate,
    merge,
    read_yaml,
    upgrade,
)
from lit_probattn.training.run_folder import config_differences
from tests.support.paths import CONFIGS, ROOT

TINY = (
    *("imagenet_swin_tiny", "lra_image", "lra_listops", "lra_pathfinder32", "lra_pathfinderx"),
    *("lra_retrieval", "lra_text", "masked_lm", "uea", "wikitext103_medium"),
    *("wikitext103_small", "wikitext103_value_aware"),
)
TABLES = (
    *("fish_table1", "fish_table10", "fish_table11", "fish_table5", "fish_table6", "mgk_table1"),
    *("mgk_table10", "mgk_table2", "mgk_table3", "mgk_table5", "mgk_table6", "mgk_table9"),
    *("other_tables", "tasks", "value_aware_table2"),
)
GRIDS = ("head_size", "head_size_masked", "head_size_reduced")
LRA = (
    *("linear", "mgk", "mgk_hard_e", "mgk_soft_e", "mlk"),
    *("smgk", "smgk_hard_e", "smgk_soft_e", "smlk"),
)
INTENDED = (
    *("intended_mgk", "intended_mgk_soft_e", "intended_mlk"),
    *("intended_smgk", "intended_smgk_soft_e", "intended_smlk"),
)
RELEASED = "attention/as_released"
# Every file that has moved: old name, new name.
MOVED = {
    **{f"tasks/{n}_tiny.yaml": f"tasks/tiny/{n}.yaml" for n in TINY},
    **{f"paper/{n}.yaml": f"reproduce/{n}.yaml" for n in TABLES},
    "paper/published.csv": "reproduce/published.csv",
    **{f"studies/{n}.yaml": f"reproduce/{n}.yaml" for n in GRIDS},
    **{f"{RELEASED}/code_lra_{n}.yaml": f"{RELEASED}/lra/{n}.yaml" for n in LRA},
    **{f"{RELEASED}/code_lm_{n}.yaml": f"{RELEASED}/lm/{n}.yaml" for n in INTENDED},
    f"{RELEASED}/code_lm_linear.yaml": f"{RELEASED}/lm/linear.yaml",
    f"{RELEASED}/code_lm_as_released_mgk.yaml": f"{RELEASED}/lm/mgk.yaml",
    f"{RELEASED}/code_lm_as_released_mlk.yaml": f"{RELEASED}/lm/mlk.yaml",
    f"{RELEASED}/fish/translation_gfish.yaml": f"{RELEASED}/translation/gfish.yaml",
    f"{RELEASED}/fish/translation_hard_gfish.yaml": f"{RELEASED}/translation/hard_gfish.yaml",
}


@pytest.fixture(autouse=True)
def untold(monkeypatch):
    monkeypatch.setattr("lit_probattn.base.config_files._told", set())


# ---- finding -----------------------------------------------------------------------------------


@pytest.mark.parametrize("old", MOVED)
@pytest.mark.parametrize("place", ["configs", str(CONFIGS)])
def test_old_names_are_found_at_the_new_place(old, place, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    old, new = f"{place}/{old}", f"{place}/{MOVED[old]}"
    assert find(old).as_posix() == new
    assert capsys.readouterr().err == f"{old} has moved to {new}; reading that\n"
    assert find(old).as_posix() == new
    assert capsys.readouterr().err == "", "told once"
    assert find(new).as_posix() == new
    assert run_stem(new) == run_stem(old) == old.rpartition("/")[2].partition(".")[0]


def test_names_that_have_not_moved(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    for name in ("configs/tasks/imagenet_swin_tiny.yaml", "configs/tasks/none_tiny.yaml", "x.yaml"):
        assert find(name).as_posix() == name
    assert run_stem("configs/tasks/imagenet_swin_tiny.yaml") == "imagenet_swin_tiny"
    assert run_stem(f"configs/{RELEASED}/fish/lm_gfish.yaml") == "lm_gfish"
    assert run_stem("configs/attention/mgk.yaml") == "mgk"
    monkeypatch.setenv("RANK", "1")
    find("configs/tasks/lra_text_tiny.yaml")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("task", ["tasks/lra_text_tiny.yaml", "tasks/tiny/lra_text.yaml"])
@pytest.mark.parametrize("attention", [f"{RELEASED}/code_lra_mgk.yaml", f"{RELEASED}/lra/mgk.yaml"])
def test_runs_keep_their_names(task, attention):
    contents = read_config_files([str(CONFIGS / task), str(CONFIGS / attention)])
    assert run_name(contents, model=None) == "lra_text_tiny-code_lra_mgk"


def test_the_command_line_reads_files_by_their_old_names(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    files = ["--config", "configs/tasks/lra_text_tiny.yaml", "--config=configs/attention/mgk.yaml"]
    with pytest.raises(SystemExit) as stop:
        main(["fit", *files, "--print_config"])
    assert stop.value.code in (0, None)
    told = capsys.readouterr()
    assert yaml.safe_load(told.out)["trainer"]["max_steps"] > 0
    assert told.err.count("has moved to") == 1


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
        (b"- 1", r"wrong.yaml must hold a mapping of keys, received list"),
        (b"", r"wrong.yaml must hold a mapping of keys, received NoneType"),
        (b"a: {b: 1,\n  c: 2,\n  b: 3}", r"wrong.yaml:3: the key 'b' stands here twice"),
        (b"trainer: {a: 1}\nrun: {}\ntrainer: {b: 1}", r"wrong.yaml:3: the key 'trainer' stands"),
        (b"a: 1\n1: 2", r"wrong.yaml:2: keys must be words, received 1"),
        (b"a: 1\ntrue: 2", r"wrong.yaml:2: keys must be words, received true"),
        (b"a: \x00", r"wrong.yaml: not valid YAML: .*special characters"),
        (b"a: " + 3000 * b"[", r"wrong.yaml: nested too deeply"),
        (b"a: &a {b: *a}", r"wrong.yaml:1: an alias contains itself"),
        (LAUGHS, r"wrong.yaml: it holds more than 100000 values, aliases counted"),
        (b"trainer: {a: 1}\ntrainer.a: 2", r"wrong.yaml: trainer.a is set twice, nested and with"),
        (b"a: [" + b"1, " * 2**19 + b"1]", r"wrong.yaml has 1,572,870 bytes; a .* 1,048,576 at"),
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
    with pytest.raises(ConfigError, match=r"loop\.yaml is a link that leads to no file$"):
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


# ---- upgrading ---------------------------------------------------------------------------------

OWN = {
    "made.Layer": {
        "row_eps": (0.0, "made.OldLayer"),
        "parity": ("none", "made.OldLayer"),
        "other": (1, "made.OtherLayer"),
        "gone": (None, None),
    }
}


def entry(**arguments):
    return {"class_path": "made.Layer", "init_args": {"num_heads": 2, **arguments}}


def test_retired_options_at_their_defaults_are_dropped():
    old = entry(row_eps=0.0, parity="none", gone=None)
    assert upgrade(old, OWN) == entry()
    assert upgrade(entry(), OWN) == entry()
    assert upgrade({"class_path": "made.Layer"}, OWN) == {"class_path": "made.Layer"}


def test_another_value_selects_the_class_that_has_the_option():
    new = upgrade(entry(row_eps=1e-3, parity="none", other=1, gone=None), OWN)
    kept = {"num_heads": 2, "row_eps": 1e-3, "parity": "none"}
    assert new == {"class_path": "made.OldLayer", "init_args": kept}


def test_what_no_class_has_is_one_line():
    with pytest.raises(ConfigError, match=r"made.Layer no longer has the option gone \(3 here\)"):
        upgrade(entry(gone=3), OWN)
    with pytest.raises(ConfigError, match=r"choose one of made.OldLayer, made.OtherLayer"):
        upgrade(entry(row_eps=1.0, other=2), OWN)


def test_upgrade_is_nested_and_pure():
    sharded = {"class_path": "lit_probattn.tasks.sharding.ShardedDataParallel"}
    old = {
        "model": {"class_path": "T", "init_args": {"attention": entry(row_eps=0.0), "lr": 1.0}},
        "trainer": {"strategy": sharded, "callbacks": [entry(parity="x"), 3]},
    }
    before = copy.deepcopy(old)
    new = upgrade(old, OWN)
    assert old == before
    assert new["model"]["init_args"] == {"attention": entry(), "lr": 1.0}
    assert new["trainer"]["callbacks"][0]["class_path"] == "made.OldLayer"
    place = new["trainer"]["strategy"]["class_path"]
    assert place == "lit_probattn.training.sharding.ShardedDataParallel"
    assert configs.class_of(place).__name__ == "ShardedDataParallel"
    assert upgrade(new, OWN) == new


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("lit_probattn.attention.mgk_layer.MGKAttention", "lit_probattn.attention.MGKAttention"),
        ("lit_probattn.attention.mgk.MGKAttention", "lit_probattn.attention.MGKAttention"),
        ("lit_probattn.tasks.pair_classifier.PairClassifier", "lit_probattn.tasks.PairClassifier"),
        ("datamodules.uea.UEA", "datamodules.UEA"),
        ("datamodules.made.Other", "datamodules.made.Other"),
        ("torch.nn.Linear", "torch.nn.Linear"),
    ],
)
def test_classes_are_found_by_the_module_they_were_written_in(old, new):
    assert upgrade({"class_path": old}) == {"class_path": new}


def test_old_run_folders_are_read_in_todays_terms(tmp_path, monkeypatch, capsys):
    """What a folder's config.yaml says, compared with a new command and read by the parser."""
    monkeypatch.setitem(
        configs.RETIRED, "lit_probattn.attention.SoftmaxAttention", {"retired": (0.5, None)}
    )
    files = ["configs/tasks/tiny/lra_text.yaml", "configs/attention/softmax.yaml"]
    monkeypatch.chdir(ROOT)
    now = compose(files, {})
    old = compose(files, {"model.init_args.attention.init_args.retired": 0.5})
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(old))
    assert config_differences(read_yaml(path), now) == []
    with pytest.raises(SystemExit) as stop:
        main(["fit", "--config", str(path), "--print_config"])
    assert stop.value.code in (0, None)
    assert "retired" not in capsys.readouterr().out
    old["model"]["init_args"]["attention"]["init_args"]["retired"] = 0.75
    path.write_text(yaml.safe_dump(old))
    assert main(["fit", "--config", str(path), "--print_config"]) == 2
    assert "config.yaml: lit_probattn.attention.SoftmaxAttention no longer has the option" in (
        capsys.readouterr().err
    )


# ---- sizes -------------------------------------------------------------------------------------


def test_sizes_are_linked_where_the_constructor_takes_them():
    model = {"class_path": "lit_probattn.tasks.SeriesClassifier", "init_args": {"max_seq_len": 9}}
    known = {"num_features": 3, "num_classes": None, "vocab_size": 11}
    configs.link_sizes(model, known, type("Data", (), {"num_classes": 5, "num_features": 7}))
    assert model["init_args"] == {"max_seq_len": 9, "num_features": 3, "num_classes": 5}
    with pytest.raises(ConfigError, match=r"unknown class 'nowhere\.Model'"):
        configs.link_sizes({"class_path": "nowhere.Model"}, {})
