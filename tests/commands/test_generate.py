"""`lit-probattn generate`: the text that `predict` writes, what is told, what is refused."""

from __future__ import annotations

import json
import logging
import shutil

import pandas as pd
import pytest
import yaml

from datamodules import WikiText103
from lit_probattn.__main__ import main
from lit_probattn.configs import read_yaml
from lit_probattn.training.checkpoints import list_checkpoints
from tests.analysis.made import write_checkpoint
from tests.datamodules.text import made
from tests.support.helpers import with_options
from tests.support.runs import ROOT, arguments, only_version, run

pytestmark = pytest.mark.usefixtures("open_once")
TASK = str(ROOT / "configs/tasks/tiny/wikitext103_small.yaml")
PROMPTS = ["w1 w2 w3", "w4"]  # of unequal length; max_seq_len is 16


def command(name, place, *more):
    """Command line of a run of the tiny task."""
    return arguments(name, place, *more, task="tiny/wikitext103_small", data_dir=place / "text")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder that holds the text and a run."""
    place = tmp_path_factory.mktemp("generate")
    made.write(place / "text")
    short = ("--trainer.val_check_interval", "2", "--trainer.num_sanity_val_steps", "0")
    run(command("fit", place, "--trainer.max_steps", "4", *short))
    return place


@pytest.fixture(scope="module")
def folder(trained):
    """The folder of the run."""
    return only_version(trained)


def generate(folder, *more, prompts=PROMPTS):
    flags = [word for text in prompts for word in ("--prompt", text)]
    try:
        return main(with_options(["generate", str(folder), "--device", "cpu"], *flags, *more))
    except SystemExit as stop:  # of the parser
        return stop.code


def untrained(place, subwords=0, **texts):
    """Write text, and the folder `run` of a model of it that is not trained."""
    config = read_yaml(TASK)
    given = {"data_dir": str(made.write(place / "text", **texts))}
    config["data"]["init_args"] |= {**given, **({"subwords": subwords} if subwords else {})}
    entry = {"class_path": "lit_probattn.attention.SoftmaxAttention", "init_args": {"num_heads": 2}}
    config["model"]["init_args"]["attention"] = entry
    write_checkpoint(place / "run", config)


def texts(capsys):
    """What was printed, without its last lines: the speed, and the table."""
    out = capsys.readouterr().out.splitlines()
    return [line for line in out if "tokens generated" not in line and "table: " not in line]


def test_text_is_that_of_predict_for_the_same_seed(trained, folder, tmp_path, capsys):
    best = list_checkpoints(folder / "checkpoints", "best")[0]
    draw = {"temperature": "0.8", "top_k": "9", "top_p": "0.9", "max_new_tokens": "12"}
    flags = [word for key, value in draw.items() for word in (f"--model.init_args.{key}", value)]
    given = ["--data.init_args.prompts", json.dumps(PROMPTS), "--seed_everything", "3"]
    run(command("predict", trained, "--ckpt_path", str(best), *flags, *given))
    out = capsys.readouterr().out
    (path,) = folder.glob(f"predictions-{best.stem}-*.parquet")
    expected = pd.read_parquet(path)

    flags = [word for key, value in draw.items() for word in (f"--{key}", value)]
    table = tmp_path / "made" / "text.parquet"
    assert generate(folder, *flags, "--seed", "3", "--out", str(table)) == 0
    told = capsys.readouterr()
    pd.testing.assert_frame_equal(pd.read_parquet(table), expected)
    assert expected["prompt_text"].tolist() == PROMPTS
    assert [len(row) for row in expected["continuation"]] == [12, 12]
    for row in expected.itertuples():
        line = f"[{row.sample_id}] {row.prompt_text} ⟶ {row.continuation_text}\n"
        assert line in out
        assert line in told.out
    assert "24 tokens generated, " in told.out
    assert " tokens per second" in told.out
    assert told.out.endswith(f"table: {table}\n")
    assert "max_new_tokens" not in told.err


def test_prompts_are_read_as_they_are_given(folder, tmp_path, capsys):
    """Whatever their lines or signs are in YAML, which the options of data are written in."""
    table = tmp_path / "text.parquet"
    prompts = ["w1 w2\nw3", "w1\n\nw2\n", "w1: # w2", "[w1", "~", "1e3"]
    flags = ("--max_new_tokens", "1", "--out", str(table))
    assert generate(folder, *flags, prompts=prompts) == 0, capsys.readouterr().err
    data = WikiText103(data_dir=str(folder.parents[2] / "text"), corpus="other", prompts=prompts)
    data.prepare_data()
    data.setup("predict")
    tokens = [
        row[mask].tolist()
        for batch in data.predict_dataloader()
        for row, mask in zip(batch["inputs"], batch["key_mask"], strict=True)
    ]
    found = pd.read_parquet(table).sort_values("sample_id")["prompt_text"]
    assert found.tolist() == [data.decode(row) for row in tokens]


def test_seeds_draw_other_text_and_greedy_text_has_none(folder, capsys):
    found = {}
    for flags in ("--seed 0", "--seed 1", "--temperature 0", "--temperature 0 --seed 1"):
        assert generate(folder, "--max_new_tokens", "9", *flags.split()) == 0
        found[flags] = texts(capsys)
    assert generate(folder, "--max_new_tokens", "9", "--top_k", "1") == 0
    assert texts(capsys) == found["--temperature 0"] == found["--temperature 0 --seed 1"]
    assert len({tuple(lines) for lines in found.values()}) == 3


def test_the_default_is_lowered_to_what_fits(folder, capsys):
    assert generate(folder) == 0
    told = capsys.readouterr()
    lowered = "the model's max_seq_len is 16, the longest prompt has 3 tokens"
    lines = [line for line in told.err.splitlines() if not line.startswith("other: ")]
    assert lines == [f"--max_new_tokens 14: {lowered}"]
    assert "28 tokens generated" in told.out


def test_a_checkpoint_is_taken_and_one_token_has_no_speed(folder, capsys):
    last = list_checkpoints(folder / "checkpoints", "step")[0]
    assert generate(last, "--max_new_tokens", "1", prompts=["w1 zebra"]) == 0
    told = capsys.readouterr()
    assert told.out.startswith("[0] w1 <unk> ⟶ ")
    assert told.out.endswith("\n1 tokens generated\n")
    assert "--prompt 'w1 zebra': 1 of 2 words are missing from the vocabulary" in told.err


def test_the_trainer_does_not_speak_of_devices(folder, monkeypatch):
    logger, told = logging.getLogger("lightning.pytorch"), []
    monkeypatch.setattr(logger, "handlers", [logging.Handler()])
    monkeypatch.setattr(logger.handlers[0], "emit", lambda record: told.append(record.getMessage()))
    level = logger.level
    assert generate(folder, "--max_new_tokens", "1") == 0
    assert [line for line in told if "available" in line] == []
    assert logger.level == level


def test_a_bounded_cache_is_passed_on(folder, monkeypatch, capsys):
    """The rule reaches the caches of every layer; a bound that is not reached changes no text."""
    from lit_probattn.commands.bounded_cache import BoundedCache

    kept = []
    keep = BoundedCache.keep

    def watched(cache, places):
        keep(cache, places)
        kept.append((cache.bound.evict_by, cache.length))

    monkeypatch.setattr(BoundedCache, "keep", watched)
    assert generate(folder) == 0
    whole = texts(capsys)
    assert generate(folder, "--max_keys", "16") == 0
    assert texts(capsys) == whole
    assert not kept
    assert generate(folder, "--max_keys", "3", "--evict_by", "weight") == 0
    assert set(kept) == {("weight", 3)}
    kept.clear()
    assert generate(folder, "--max_keys", "3") == 0
    assert set(kept) == {("movement", 3)}


REFUSED = {
    "--max_new_tokens 15": "--max_new_tokens 15 does not fit: the model's max_seq_len is 16",
    "--max_new_tokens 0": "--max_new_tokens: must be at least 1, received 0",
    "--seed -1": "--seed: must be at least 0, received -1",
    "--temperature -1": "temperature must be at least 0, received -1.0",
    "--temperature 0 --top_k 3": "--top_k=3 has no effect with temperature=0.0: remove it",
    "--top_k 0": "top_k must be at least 1, received 0",
    "--top_p 1.5": "top_p must be in (0, 1], received 1.5",
    "--out text.csv": "--out must end in .parquet, received text.csv",
    "--max_keys 0": "--max_keys: must be at least 1, received 0",
    "--evict_by age": "--evict_by requires a bounded cache: add --max_keys N",
    "--device cuda:x": "unknown device 'cuda:x'",
    "--data.data_dir nowhere": "text: the release is not under",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_a_wrong_flag_is_one_line(folder, flags, capsys):
    check_refused(generate(folder, *flags.split()), REFUSED[flags], capsys)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (" ", "--prompt ' ' is empty: expected at least one word"),
        ("w1 " * 17, "has 17 tokens, but the model's max_seq_len is 16: shorten it"),
    ],
)
def test_a_wrong_prompt_is_one_line(folder, prompt, expected, capsys):
    check_refused(generate(folder, prompts=["w1", prompt]), expected, capsys)


def check_refused(status, expected, capsys):
    told = capsys.readouterr()
    lines = [line for line in told.err.splitlines() if not line.startswith("other: ")]
    assert (status, len(lines), told.out) == (2, 1, ""), told.err
    assert lines[0].startswith("error: ")
    assert expected in lines[0]


def test_a_table_is_not_overwritten(folder, tmp_path, capsys):
    table = tmp_path / "text.parquet"
    table.write_text("mine")
    check_refused(generate(folder, "--out", str(table)), "exists: choose another file", capsys)
    inside = table / "text.parquet"
    check_refused(generate(folder, "--out", str(inside)), "is a file, not a folder", capsys)
    assert table.read_text(encoding="utf-8") == "mine"


def test_other_text_than_the_runs_is_refused(folder, tmp_path, capsys):
    other = made.write(tmp_path, train="a <unk> b c\n" * 20)
    status = generate(folder, "--data.data_dir", str(other), prompts=["a"])
    lines = capsys.readouterr().err.splitlines()
    assert status == 2
    assert lines[-1].startswith("error: the checkpoint was trained with a different vocabulary: ")
    assert lines[-1].endswith("or its vocabulary: --data.vocab_file FILE")


def test_words_that_nothing_stands_for_are_refused(tmp_path, capsys):
    """A vocabulary without `<unk>`, as `predict` refuses it."""
    untrained(tmp_path, **dict.fromkeys(made.NAMES, "a b c d\n" * 30))
    expected = "'zebra' is missing from the vocabulary of 5 words"
    check_refused(generate(tmp_path / "run", prompts=["a zebra"]), expected, capsys)


@pytest.mark.parametrize(
    ("part", "name", "expected"),
    [
        (
            "model",
            "lit_probattn.tasks.SequenceClassifier",
            "SequenceClassifier, which does not generate",
        ),
        ("data", "datamodules.ListOps", "ListOps, which does not support prompts"),
    ],
)
def test_a_run_that_is_no_language_model_is_refused(folder, tmp_path, part, name, expected, capsys):
    shutil.copytree(folder, tmp_path / "run")
    path = tmp_path / "run/config.yaml"
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    config[part] = {"class_path": name, "init_args": {}}
    path.write_text(yaml.safe_dump(config))
    check_refused(generate(tmp_path / "run"), expected, capsys)


def test_a_prompt_of_sub_words_is_continued_and_not_ended(tmp_path, capsys):
    pytest.importorskip("tokenizers")
    untrained(tmp_path, subwords=300)
    table = tmp_path / "text.parquet"
    prompts = ["w1 w", "w2 w3", "w"]
    flags = ("--max_new_tokens", "2", "--out", str(table))
    assert generate(tmp_path / "run", *flags, prompts=prompts) == 0
    assert pd.read_parquet(table)["prompt_text"].tolist() == prompts
    assert len(texts(capsys)) >= len(prompts)
