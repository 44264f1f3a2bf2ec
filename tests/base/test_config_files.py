"""Where configurations lie: order of the folders, names, and commands from any folder."""

from __future__ import annotations

import argparse
import inspect
import sys
from pathlib import Path

import pytest
import yaml

from lit_probattn.base import config_files
from lit_probattn.base.config_files import (
    KINDS,
    comment_of,
    file_named,
    files_in,
    find,
    is_bundle,
    is_there,
    load_yaml,
    named_files,
    run_stem,
)
from lit_probattn.base.errors import ConfigError
from lit_probattn.compare.command import protocol_of
from lit_probattn.compare.flags import Place, add_flags
from lit_probattn.compare.protocol import Options, run_config
from lit_probattn.compare.tables import kinds, read_published, read_table
from lit_probattn.configs import attention_entry, compose, read_yaml
from lit_probattn.reproduce import uea
from profiling.kernels.config import load_kernels
from profiling.sweep.config import load_sweep
from profiling.sweep.plan import make_plan
from tests.support.paths import CONFIGS

SMGK = "configs/attention/smgk.yaml"


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """A working folder, and two folders of the user's own; each may get files."""
    work, first, second = (tmp_path / name for name in ("work", "first", "second"))
    for folder in (work, first, second):
        folder.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv(config_files.VARIABLE, f"{first}:{second}")
    return work, first, second


def write(folder: Path, name: str, text: str = "trainer: {}\n") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_path_is_looked_for_as_given_then_in_own_folders_then_in_the_shipped_one(folders):
    work, first, second = folders
    assert find(SMGK) == find("attention/smgk.yaml") == CONFIGS / "attention/smgk.yaml"
    assert find("configs/attention") == CONFIGS / "attention"
    for folder in (second, first):
        own = write(folder, "attention/smgk.yaml")
        assert find(SMGK) == own
    write(work, SMGK)
    assert find(SMGK) == Path(SMGK)
    assert find(SMGK, second) == first / "attention/smgk.yaml"
    other = write(work, "elsewhere/smgk.yaml")
    assert find(other) == other


@pytest.mark.parametrize("name", [".#mine.yaml", ".#mine.bundle.yaml", ".mine.yaml"])
@pytest.mark.parametrize("place", [".", "attention", "attention/.copies"])
def test_links_and_copies_of_an_editor_are_no_configurations(name, place, folders):
    """An editor keeps a dangling link `.#mine.yaml` beside a file that has unsaved changes."""
    _, first, _ = folders
    known = named_files("attention")
    link = first / place / name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to("user@host.1234")
    assert named_files("attention") == known
    assert file_named("attention", "smgk") == str(CONFIGS / "attention/smgk.yaml")


@pytest.mark.parametrize("name", ["configs/../x.yaml", "../configs/none.yaml", "/configs/x.yaml"])
def test_paths_that_lead_out_of_the_folders_are_not_looked_for_there(name, folders):
    _, first, _ = folders
    write(first.parent, "x.yaml")
    write(first, "x.yaml")
    assert find(name) == Path(name)


def test_names_are_those_of_the_own_folders_and_the_shipped_one(folders):
    work, first, second = folders
    own = write(second, "attention/smgk.yaml")
    write(work, SMGK)  # names are looked for in the folders only
    assert file_named("attention", "smgk") == str(own)
    mine = write(first, "attention/deep/mine.yaml")
    assert file_named("attention", "deep/mine") == str(mine)
    names = list(named_files("attention"))
    assert names.index("softmax") < names.index("deep/mine")  # those of a folder, then deeper ones
    assert names.count("smgk") == 1
    assert named_files("attention")["smgk"] == own
    for given in ("x.yaml", "sub/x.yml", str(mine.with_suffix(""))):
        assert file_named("attention", given) == given


def test_every_shipped_file_has_its_name():
    for kind, (folder, _) in KINDS.items():
        written = set((CONFIGS / folder).rglob("*.yaml"))
        bundles = {path for path in written if is_bundle(path)}
        held = [
            b.parent / f"{name}.yaml"
            for b in bundles
            for name in load_yaml(b.read_text(encoding="utf-8"))
        ]
        entries = [path for path in held if path.stem not in ("under", "shared")]
        assert len(entries) == len(set(entries))
        assert sorted(named_files(kind).values()) == sorted((written - bundles) | set(entries))
    for kind in ("task", "attention", "trainer"):
        for name, path in named_files(kind).items():
            found = find(file_named(kind, name))
            assert found.absolute() == path
            assert is_there(found)
            assert run_stem(found) == run_stem(path)


@pytest.mark.parametrize(
    ("kind", "name", "expected"),
    [
        ("attention", "smgkk", r"unknown attention 'smgkk'; did you mean 'smgk'( or|, )"),
        ("task", "tiny/lra_listop", "'tiny/lra_listops'"),
        ("task", "", "unknown task ''"),
        ("trainer", "zzz", "; valid: cpu_debug, ddp, ddp_multinode, fsdp, one_gpu; `lit-probattn"),
        ("task", "../tasks/uea", "unknown task"),
    ],
)
def test_an_unknown_name_is_one_line_with_the_nearest(kind, name, expected):
    with pytest.raises(ConfigError, match=expected) as error:
        file_named(kind, name)
    assert "\n" not in str(error.value)


def test_a_variable_that_names_no_folder_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv(config_files.VARIABLE, str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"LIT_PROBATTN_CONFIGS: .*none is not a folder"):
        find("configs/none.yaml")


def test_a_wheel_reads_what_is_packed_in_it(monkeypatch, tmp_path):
    packed = write(tmp_path, "package/_configs/attention/smgk.yaml")
    monkeypatch.chdir(tmp_path.parent)
    monkeypatch.setattr(config_files, "_PACKAGE", tmp_path / "package")
    assert find(SMGK) == packed
    (tmp_path / "package/_configs").rename(tmp_path / "configs")  # as in a checkout
    assert find(SMGK) == tmp_path / SMGK


# ---- bundles -----------------------------------------------------------------------------------

BUNDLE = """\
shared: {steps: &steps 3}

# The first one.
# Good for: tests.
small/one:
  trainer: {max_steps: *steps, devices: 1}

# The second.
two: {base: small/one, trainer: {devices: 2}}
"""


def test_an_entry_of_a_bundle_is_a_file_by_name_and_by_path(folders):
    _, first, _ = folders
    write(first, "trainer/mine.bundle.yaml", BUNDLE)
    one, two = first / "trainer/small/one.yaml", first / "trainer/two.yaml"
    assert file_named("trainer", "small/one") == str(one)
    assert file_named("trainer", "two") == str(two)
    assert find("configs/trainer/two.yaml") == find("trainer/two.yaml") == two
    assert read_yaml("configs/trainer/small/one.yaml") == {
        "trainer": {"max_steps": 3, "devices": 1}
    }
    assert read_yaml(two) == {"trainer": {"max_steps": 3, "devices": 2}}
    assert {"small/one": one, "two": two}.items() <= named_files("trainer").items()
    assert "mine.bundle" not in named_files("trainer")
    assert files_in("trainer/small") == {"one.yaml": one}
    assert comment_of(one) == ["The first one.", "Good for: tests."]
    assert comment_of(two) == ["The second."]


def test_a_missing_file_is_searched_in_its_folder_only(folders):
    """The message does not depend on its subfolders, which can be the whole file system."""
    work, _, _ = folders
    write(work, "one.yaml", "trainer: {}\n")
    (work / "deep").mkdir()
    (work / "deep" / "damaged.bundle.yaml").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"^configuration file not found: onn\.yaml.*one\.yaml"):
        read_yaml("onn.yaml")


def test_what_a_bundle_says_stands_under_its_key(folders):
    _, first, _ = folders
    text = "under: model.init_args\none: {num_layers: 1}\n"
    write(first, "trainer/mine.bundle.yaml", text)
    assert read_yaml("trainer/one.yaml") == {"model": {"init_args": {"num_layers": 1}}}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "one: {trainer: {}}\ntwo: {base: onee}\n",
            r"mine\.bundle\.yaml: two: unknown base 'onee'; did you mean 'one'",
        ),
        ("one: {base: two}\ntwo: {base: one}\n", "base is circular: two -> one -> two"),
        ("two: 3\n", r"mine\.bundle\.yaml: two must be a mapping, received int"),
        ("under: 3\ntwo: {}\n", "under must be a key with dots, received 3"),
        ("two: {}\ntwo: {}\n", "duplicate key 'two'"),
        ("two: {a: *none}\n", r"mine\.bundle\.yaml"),
    ],
)
def test_an_entry_that_cannot_be_read_names_the_bundle(text, expected, folders):
    _, first, _ = folders
    write(first, "trainer/mine.bundle.yaml", text)
    with pytest.raises(ConfigError, match=expected) as error:
        read_yaml("configs/trainer/two.yaml")
    assert "\n" not in str(error.value)


def test_an_unknown_name_has_the_nearest_of_a_bundle(folders):
    _, first, _ = folders
    write(first, "trainer/mine.bundle.yaml", BUNDLE)
    with pytest.raises(ConfigError, match="unknown trainer 'small/onne'; did you mean 'small/one'"):
        file_named("trainer", "small/onne")


def test_a_bundle_is_no_configuration_of_its_own(folders):
    _, first, _ = folders
    path = write(first, "trainer/mine.bundle.yaml", BUNDLE)
    with pytest.raises(
        ConfigError, match=r"holds several configurations: name one, such as .*one\.yaml"
    ):
        read_yaml(path)


def test_a_file_stands_in_one_place(folders):
    _, first, second = folders
    write(first, "trainer/mine.bundle.yaml", BUNDLE)
    write(second, "trainer/two.yaml")  # another folder: the first is meant
    assert read_yaml("trainer/two.yaml")["trainer"]["devices"] == 2
    file = write(first, "trainer/two.yaml")
    with pytest.raises(ConfigError, match=r"yaml: a file and in .*mine\.bundle\.yaml; keep one"):
        read_yaml("trainer/two.yaml")
    file.unlink()
    write(first, "trainer/other.bundle.yaml", "two: {}\n")
    with pytest.raises(ConfigError, match=r"yaml: in .*mine\.b.* and in .*other\.b.*; keep one"):
        read_yaml("trainer/two.yaml")


# ---- what reads them ---------------------------------------------------------------------------


def test_tables_sweeps_and_prepared_numbers_are_read_from_any_folder(folders):
    assert len(read_published()) > 100
    table = read_table("mgk_table1")
    task, row = table.pairs()[0]
    assert run_config(task, row, Options())["trainer"]["max_steps"] > 0
    assert uea.make_table(uea.TABLE, Place(data_dir="none"))[0].rows
    sweep = load_sweep("quick")
    assert make_plan(sweep, Path.cwd()) == make_plan(sweep, CONFIGS.parent)
    assert attention_entry("configs/attention/fish.yaml")["class_path"].endswith("FiSHAttention")


def test_commands_take_names(folders, monkeypatch):
    parser = argparse.ArgumentParser()
    add_flags(parser)
    trainer = protocol_of(parser.parse_args(["--trainer", "one_gpu"])).trainer
    assert trainer == str(CONFIGS / "trainer/one_gpu.yaml")
    with pytest.raises(ConfigError, match="unknown trainer 'one_gpus'; did you mean 'one_gpu'"):
        protocol_of(parser.parse_args(["--trainer", "one_gpus"]))
    table, _ = uea.make_table(uea.TABLE, Place(data_dir="none"), variants=["smgk"])
    assert table.rows["smgk"].attention == str(CONFIGS / "attention/smgk.yaml")
    assert load_kernels("kernels_cpu") == load_kernels(CONFIGS / "profiling/kernels_cpu.yaml")


def test_own_tables_stand_beside_the_shipped_ones(folders):
    _, first, _ = folders
    text = read_yaml("configs/reproduce/mgk_table1.yaml")
    write(first, "reproduce/own.yaml", f"kind: fits\ntitle: {text['title']!r}\n")
    write(first, "reproduce/mgk_table2.yaml", "kind: fits\ntitle: mine\n")
    assert {"own", "mgk_table1"} <= set(kinds())
    assert kinds()["mgk_table2"]["title"] == "mine"
    assert "own.yaml" in files_in("configs/reproduce")


def test_a_missing_file_names_the_nearest_from_any_folder(folders):
    with pytest.raises(ConfigError, match=r"did you mean 'configs/tasks/lra_listops.yaml'"):
        compose(["configs/tasks/lra_listop.yaml"], {})


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.yaml"))[::12], ids=lambda path: path.stem)
def test_both_loaders_read_the_same(path):
    text = path.read_text(encoding="utf-8")
    assert load_yaml(text) == yaml.load(text, yaml.SafeLoader)


@pytest.mark.parametrize("text", ["a: [1", "a: b: c", "\ta: 1", "a: 'x", "a: [*y]", "a: !!int x"])
def test_errors_are_those_of_the_loader_in_python(text):
    """It says more; what is not YAML for one is an error for the other."""
    errors = []
    for load in (load_yaml, lambda text: yaml.load(text, yaml.SafeLoader)):
        with pytest.raises((yaml.YAMLError, ValueError)) as told:
            load(text)
        errors.append(str(told.value))
    assert errors[0] == errors[1]


@pytest.mark.parametrize(
    "text", ["a: " + 5_000 * "[", "\n".join(" " * i + "a:" for i in range(3500))], ids=["[", ":"]
)
def test_values_nested_too_deeply_do_not_end_the_process(text):
    """The C loader would overflow the stack; with a low limit Python's soon raises."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 150)
    try:
        with pytest.raises(RecursionError):
            load_yaml(text)
    finally:
        sys.setrecursionlimit(limit)
