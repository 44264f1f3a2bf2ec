"""Question answering: the loss, answers of windows in unlike batches, predictions, thresholds."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from datamodules import QuestionAnswering as Questions
from lit_probattn.tasks import QuestionAnswering
from lit_probattn.tasks.fine_tuning.answers import Prediction, scores_of
from lit_probattn.training.trained import open_trained
from tests.datamodules.text.fine_tuning import made
from tests.support.helpers import error_of
from tests.support.runs import arguments, only_version, run
from tests.support.slow import mostly_slow
from tests.tasks.tiny import softmax


def make_task(**options) -> QuestionAnswering:
    torch.manual_seed(2)
    sizes = {"vocab_size": 23, "max_seq_len": 12, "embed_dim": 8, "head_dim": 4, "num_layers": 1}
    task = QuestionAnswering(softmax, **{**sizes, "mlp_dim": 8, **options})
    return task.eval().double()


def batch():
    generator = torch.Generator().manual_seed(3)
    mask = torch.arange(9) < torch.tensor([9, 6, 7])[:, None]
    return {
        "inputs": torch.randint(23, (3, 9), generator=generator),
        "key_mask": mask,
        "token_types": ((torch.arange(9) > 2) & mask).long(),
        "target": torch.tensor([[4, 6], [0, 0], [3, 3]]),
        "sample_ids": torch.arange(3),
    }


def test_the_loss_is_the_mean_of_both_cross_entropies_over_real_tokens():
    task, data = make_task(), batch()
    start, end = task.model(
        data["inputs"], key_mask=data["key_mask"], token_types=data["token_types"]
    )
    total = 0.0
    for row in range(3):
        for logits, target in zip((start[row], end[row]), data["target"][row], strict=True):
            real = logits.detach()[data["key_mask"][row]]
            total += (math.log(sum(math.exp(x) for x in real)) - float(real[target])) / 2
    assert task.batch_loss(data).item() == pytest.approx(total / 3, rel=1e-12)


def test_padding_changes_no_loss():
    task, data = make_task(), batch()
    wide = {
        name: torch.nn.functional.pad(data[name], (0, 3), value=7 if name == "inputs" else 0)
        for name in ("inputs", "key_mask", "token_types")
    }
    torch.testing.assert_close(
        task.batch_loss({**data, **wide}), task.batch_loss(data), rtol=1e-12, atol=0
    )


def test_weight_decay_leaves_out_biases_and_norms():
    task = make_task(weight_decay=0.3)
    decayed, bare = task.configure_optimizers().param_groups
    assert (decayed["weight_decay"], bare["weight_decay"]) == (0.3, 0.0)
    assert all(parameter.ndim == 2 for parameter in decayed["params"])
    assert all(parameter.ndim == 1 for parameter in bare["params"])
    assert len(decayed["params"]) + len(bare["params"]) == len(list(task.parameters()))


# ---- runs --------------------------------------------------------------------------------------


def command(name: str, folder: Path, *more: str, task: str = "squad") -> list[str]:
    version = "2.0" if task == "squad_v2" else "1.1"
    text = folder / f"text{version}"
    if not text.exists():
        made.write_squad(text, version)
    given = {"path": text, "cache_dir": folder / "cache"}
    return arguments(name, folder, *more, task=f"tiny/{task}", **given)


SHORT = ("--trainer.max_steps", "4", "--trainer.val_check_interval", "4")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return what gives the folder of a task's run; trained once."""
    found: dict[str, Path] = {}

    def folder(task: str) -> Path:
        if task not in found:
            found[task] = tmp_path_factory.mktemp(task)
            run(command("fit", found[task], *SHORT, task=task))
        return found[task]

    return folder


def test_only_a_checkpoint_that_validation_chose_was_selected_on_its_questions(trained):
    """The last one: below."""
    folder = trained("squad_v2")
    run(command("validate", folder, *SHORT, "--ckpt_path", "best", task="squad_v2"))
    (report,) = only_version(folder).glob("validate-best-*.json")
    assert json.loads(report.read_text(encoding="utf-8"))["selected_on_test"] is True


@pytest.mark.parametrize(
    ("version", "prediction", "files"),
    [("1.1", "fg", {".json"}), ("2.0", "", {".json", "-null_odds.json"})],
)
def test_only_version_2_predicts_that_there_is_no_answer(version, prediction, files):
    task = make_task()
    asked = [SimpleNamespace(id="one", question="which?", context="abcdefghi", answers=["fg"])]
    data = SimpleNamespace(version=version, predict_split="test", questions=lambda split: asked)
    task._data = lambda: data
    found = [[0, 9.0, [(2.5, 5, 7), (0.5, 0, 1)]]]
    table = task.finish_predictions(pd.DataFrame({"found": found}))
    (row,) = table.to_dict("records")
    assert (row["n_best"], row["null_odds"]) == (["fg", "a"], 6.5)
    written = task.prediction_files(table)
    assert json.loads(written[".json"]) == {"one": row["prediction"]} == {"one": prediction}
    assert set(written) == files


@pytest.mark.parametrize("task", mostly_slow(["squad", "squad_v2"], ["squad_v2"]))
def test_scores_are_those_of_every_span_of_every_window(trained, task):
    """Brute force: all windows of a question, one at a time; and the written predictions."""
    folder = trained(task)
    for name in ("test", "predict"):
        run(command(name, folder, *SHORT, "--ckpt_path", "last", task=task))
    version = only_version(folder)
    report = json.loads((version / "test-step-00000004.json").read_text(encoding="utf-8"))
    assert report["selected_on_test"] is False
    table = pd.read_parquet(version / "predictions-step-00000004.parquet")
    official = json.loads((version / "predictions-step-00000004.json").read_text(encoding="utf-8"))
    place = version / "checkpoints/step-00000004.ckpt"
    opened = open_trained(Namespace(checkpoint=place, config=None, data=[], device="cpu"))
    data: Questions = opened.data
    rows, losses, split = [], [], data.split("test")
    assert len(split) > split.num_questions  # some have several windows
    for number, asked in enumerate(data.questions("test")):
        best: dict[str, float] = {}
        null = math.inf
        for window in range(len(split)):
            if split.question_of(window) != number:
                continue
            one = data.collate()([split[window]])
            with torch.no_grad():
                logits = opened.task(one)
                losses.append(float(opened.task.window_losses(*logits, one["target"])))
            start, end = (x[0].tolist() for x in logits)
            null = min(null, start[0] + end[0])
            places = one["answerable"][0].nonzero().flatten().tolist()
            for first in places:
                for last in places:
                    if first <= last < first + 6:
                        begin, stop = data.characters("test", window, first, last)
                        text = asked.context[begin:stop].strip()
                        best[text] = max(best.get(text, -math.inf), start[first] + end[last])
        text = max(best, key=best.__getitem__)
        rows.append(Prediction(text, null - best[text], asked.answers))
        row = table[table["id"] == asked.id].iloc[0]
        assert row["n_best"][0] == text
        assert row["null_odds"] == pytest.approx(null - best[text], abs=1e-5)
        ranked = sorted(best.values(), reverse=True)[: len(row["n_best"])]
        assert row["n_best_scores"] == pytest.approx(ranked, abs=1e-5)
        expected = "" if data.version == "2.0" and null > best[text] else text
        assert official[asked.id] == row["prediction"] == expected
    scores = {"loss": sum(losses) / len(split), **scores_of(rows, data.version)}
    for name, value in scores.items():
        assert report[f"test/{name}"] == pytest.approx(value, abs=1e-4), name
    assert len(table) == len(official) == 9
    assert (version / "predictions-step-00000004-null_odds.json").is_file() == (task == "squad_v2")


def test_new_questions_without_answers_are_answered(trained, tmp_path):
    """As those of the validation file, which they repeat; only scores need answers."""
    folder = trained("squad")
    content = json.loads((folder / "text1.1/dev.json").read_text(encoding="utf-8"))
    asked = [a for part in content["data"] for p in part["paragraphs"] for a in p["qas"]]
    new = [f"--data.init_args.new_path={tmp_path / 'new.json'}", "--ckpt_path", "last"]
    version, tables = only_version(folder), {}
    for answered in (True, False):
        for item in asked if not answered else ():
            del item["answers"]
        (tmp_path / "new.json").write_text(json.dumps(content), encoding="utf-8")
        if answered:
            run(command("test", folder, *SHORT, *new))
        before = set(version.glob("predictions-*.parquet"))
        run(command("predict", folder, *SHORT, *new))
        (path,) = set(version.glob("predictions-*.parquet")) - before
        tables[answered] = pd.read_parquet(path)
    assert len(tables[False]) == len(asked)
    assert tables[False]["prediction"].tolist() == tables[True]["prediction"].tolist()
    (path,) = version.glob("test-step-00000004-*.json")
    report = json.loads(path.read_text(encoding="utf-8"))
    assert report["selected_on_test"] is False
    assert "has no answers" in error_of(command("test", folder, *SHORT, *new))
    for path in version.glob("*-step-00000004-*"):
        path.unlink()


@pytest.mark.parametrize(("split", "shown"), [("val", {"val/loss", "val/f1"}), ("test", set())])
def test_the_progress_bar_shows_the_loss_and_f1_of_validations(split, shown, monkeypatch):
    task, found = make_task(), {}
    data = SimpleNamespace(version="1.1", questions=lambda split: [])
    monkeypatch.setattr(QuestionAnswering, "_data", lambda self: data)
    monkeypatch.setattr(task, "log", lambda name, value, prog_bar: found.update({name: prog_bar}))
    task.log_scores(split)
    assert {name for name, on_bar in found.items() if on_bar} == shown
    assert found.keys() > {f"{split}/loss", f"{split}/f1"}


def test_only_data_of_questions_with_as_many_token_types_are_supported():
    """The messages of whole commands: tests/bad_inputs."""
    texts = {"characters": None, "version": "1.1", "num_token_types": 2}
    for types, found, message in (
        (0, texts, None),
        (2, texts, None),
        (1, texts, "tokeniser has 2 token types, received num_token_types 1"),
        (2, {"num_token_types": 2}, "answers require data with the texts of questions"),
    ):
        task = make_task(num_token_types=types)
        task._trainer = SimpleNamespace(datamodule=SimpleNamespace(**found))
        with pytest.raises(ValueError, match=message) if message else nullcontext():
            task.setup("test")


def test_setup_compiles_the_model_if_requested(monkeypatch):
    texts = SimpleNamespace(characters=None, version="1.1", num_token_types=2)
    for compiled in (False, True):
        task, calls = make_task(compile=compiled), []
        task._trainer = SimpleNamespace(datamodule=texts)
        monkeypatch.setattr(task.model, "compile", lambda calls=calls: calls.append(1))
        task.setup("test")
        assert len(calls) == compiled


def test_steps_teach_the_spans_of_a_batch():
    task, data = make_task(dropout=0.0), batch()
    optimizer = torch.optim.Adam(task.parameters(), lr=0.02)
    for _ in range(60):
        optimizer.zero_grad()
        task.batch_loss(data).backward()
        optimizer.step()
    start, end = task(data)
    assert torch.equal(torch.stack([start, end], -1).argmax(1), data["target"])
