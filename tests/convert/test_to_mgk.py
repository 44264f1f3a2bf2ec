"""The command that converts the softmax attention of a checkpoint."""

from __future__ import annotations

import itertools
import re
from functools import partial

import pytest
import torch
import yaml

from lit_probattn import attention as variants
from lit_probattn.attention import FiSHAttention, MGKAttention
from lit_probattn.convert import files
from lit_probattn.convert.__main__ import main
from lit_probattn.tasks import SequenceClassifier
from lit_probattn.training.checkpoints import load_checkpoint
from tests.analysis import made
from tests.support.helpers import error_of

C, E, H, K = 11, 3, 4, 2

SIZES = {"embed_dim": 11, "head_dim": E, "num_layers": 2, "mlp_dim": 13}


def make_run(folder, attention="SoftmaxAttention", **arguments):
    """Write a run folder with a configuration and a checkpoint of fresh weights."""
    kind = getattr(variants, attention)
    arguments = {"num_heads": H, **arguments}
    task = SequenceClassifier(
        partial(kind, **arguments),
        vocab_size=23,
        num_classes=4,
        max_seq_len=19,
        **SIZES,
    )
    data = {"min_length": 7, "max_length": 19, "vocab_size": 23, "num_val": 24, "batch_size": 6}
    config = {
        "seed_everything": 3,
        "model": {
            "class_path": "lit_probattn.tasks.SequenceClassifier",
            "init_args": {
                **SIZES,
                "attention": {
                    "class_path": f"lit_probattn.attention.{attention}",
                    "init_args": arguments,
                },
            },
        },
        "data": {"class_path": "datamodules.Synthetic", "init_args": data},
    }
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    checkpoint = folder / "checkpoints" / "best-00000005.ckpt"
    contents = {
        "state_dict": task.state_dict(),
        "global_step": 5,
        "epoch": 0,
        "pytorch-lightning_version": "2.6.0",
        "optimizer_states": [{"state": {}}],
        "loops": {"fit_loop": {}},
    }
    torch.save(contents, checkpoint)
    return task, checkpoint


def load_converted(path):
    """Build the task from the attention file and load the converted weights."""
    with open(path.with_suffix(".yaml"), encoding="utf-8") as file:
        attention = yaml.safe_load(file)["model"]["init_args"]["attention"]
    task = SequenceClassifier(
        partial(MGKAttention, **attention["init_args"]),
        vocab_size=23,
        num_classes=4,
        max_seq_len=19,
        **SIZES,
    )
    checkpoint = load_checkpoint(path)
    task.load_state_dict(checkpoint["state_dict"])
    return task, checkpoint


def test_command_converts_prints_and_stores_the_error(tmp_path, capsys):
    old, checkpoint = make_run(tmp_path / "run", dropout=0.1)
    out = tmp_path / "mgk.ckpt"
    assert main([str(checkpoint), str(out), "--num_batches", "3"]) == 0
    printed = capsys.readouterr().out.splitlines()
    new, stored = load_converted(out)
    report = stored["conversion"]
    assert report["source_step"] == 5
    for index, line in enumerate(printed[:2]):
        errors = report["layers"][f"model.encoder.blocks.{index}.attention"]
        assert f"output error {100 * errors['output_error']:.1f} % on held-out inputs" in line
        assert sorted(itertools.chain(*errors["groups"])) == list(range(H))
    assert report["model"]["num_rows"] == 18
    assert f"{100 * report['model']['logit_error']:.1f} %" in printed[2]
    assert stored["global_step"] == 0
    assert stored["optimizer_states"] == []
    assert "loops" not in stored
    attention = new.model.encoder.blocks[0].attention
    assert (attention.num_heads, attention.num_components, attention.dropout) == (2, 2, 0.1)
    # The stored model error is what the two models do.
    from datamodules import Synthetic

    data = Synthetic(min_length=7, max_length=19, vocab_size=23, num_val=24, batch_size=6, seed=3)
    data.setup("validate")
    batches = list(itertools.islice(data.val_dataloader(), 3))
    with torch.no_grad():
        a, b = (torch.cat([task.eval()(batch) for batch in batches]) for task in (old, new))
    assert abs((b - a).norm() / a.norm() - report["model"]["logit_error"]) < 1e-4


def test_command_without_data(tmp_path, capsys):
    _, checkpoint = make_run(tmp_path / "run", bias=False)
    checkpoint = checkpoint.rename(tmp_path / "alone.ckpt")
    out = tmp_path / "mgk.ckpt"
    command = [str(checkpoint), str(out), "--weights_only", "--num_components", "4"]
    assert "--head_dim" in error_of(command, main)
    assert main([*command, "--head_dim", str(E), "--value_head_dim", "5"]) == 0
    assert "not measured (no inputs)" in capsys.readouterr().out
    new, _ = load_converted(out)
    attention = new.model.encoder.blocks[1].attention
    assert (attention.num_heads, attention.value_head_dim, attention.use_bias) == (1, 5, False)


@pytest.mark.parametrize("place", ["run", "--config", "beside"])
def test_the_configuration_tells_head_size_and_dropout_without_data(tmp_path, place):
    _, checkpoint = make_run(tmp_path / "run", dropout=0.2)
    config, flags = tmp_path / "run" / "config.yaml", []
    if place != "run":
        checkpoint = checkpoint.rename(tmp_path / "alone.ckpt")
        flags = ["--config", str(config)] if place == "--config" else []
    if place == "beside":
        config.rename(checkpoint.with_suffix(".yaml"))
    out = tmp_path / "mgk.ckpt"
    assert main([str(checkpoint), str(out), "--weights_only", *flags]) == 0
    new, _ = load_converted(out)
    attention = new.model.encoder.blocks[0].attention
    assert (attention.head_dim, attention.dropout) == (E, 0.2)
    stored = load_checkpoint(out)["hyper_parameters"]["attention"]["class_path"]
    assert stored == "lit_probattn.attention.MGKAttention"


def test_command_names_what_is_wrong(tmp_path, capsys):
    _, checkpoint = make_run(tmp_path / "run")
    _, mixture = make_run(tmp_path / "mixture", "MGKAttention")
    out = tmp_path / "mgk.ckpt"
    damaged = tmp_path / "damaged.ckpt"
    damaged.write_bytes(checkpoint.read_bytes()[:-100])
    no_numbers = torch.load(checkpoint)
    no_numbers["state_dict"]["model.encoder.blocks.0.attention.key_proj.bias"][1] = torch.nan
    torch.save(no_numbers, tmp_path / "nan.ckpt")
    alone, unknown = tmp_path / "alone.ckpt", tmp_path / "unknown.ckpt"
    alone.write_bytes(checkpoint.read_bytes())
    unknown.write_bytes(mixture.read_bytes())
    sized = tmp_path / "sized.ckpt"
    torch.save({**torch.load(checkpoint), "hyper_parameters": {"head_dim": E}}, sized)
    cases = [
        ([mixture, out], "MGKAttention"),
        ([unknown, out, "--weights_only", "--head_dim", E], "it also has core.prior.value"),
        ([damaged, out], "is corrupt"),
        ([tmp_path / "nan.ckpt", out], "attention.key_proj.bias contains NaN in 1 of 12"),
        ([alone, out, "--weights_only", "--head_dim", "5"], "a multiple of head_dim=5"),
        ([checkpoint, out, "--weights_only", "--head_dim", "6"], "--head_dim 6 differs from 3 of"),
        ([sized, out, "--weights_only", "--head_dim", "6"], "--head_dim 6 differs from 3 of"),
        ([checkpoint, out, "--head_dim", "6"], "--head_dim 6 differs from 3 of"),
        ([checkpoint, tmp_path / "mgk.yaml"], "NAME.ckpt"),
        ([checkpoint, ""], "NAME.ckpt"),
        ([checkpoint, "/"], "NAME.ckpt"),
    ]
    for command, message in cases:
        assert main([str(part) for part in command]) == 2, message
        assert message in capsys.readouterr().err
    assert not out.exists()
    broken = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text(encoding="utf-8"))
    broken["data"]["class_path"] = "datamodules.Nothing"
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(broken))
    assert "datamodules.Nothing" in error_of([str(checkpoint), str(out)], main)


@pytest.mark.parametrize("flags", [[], ["--weights_only", "--head_dim", str(E)]], ids=len)
@pytest.mark.parametrize(
    ("attention", "options", "word"),
    [
        ("SoftmaxAttention", {"score": "gaussian"}, "score=gaussian"),
        ("SoftmaxAttention", {"rotary_dim": 2}, "rotary"),
        ("LinearAttention", {}, "LinearAttention"),
    ],
)
def test_other_attention_with_the_same_parameters_is_refused(
    tmp_path, attention, options, word, flags
):
    """Its parameters have the names and shapes of those of dot-product softmax attention."""
    _, checkpoint = make_run(tmp_path / "run", attention, **options)
    out = tmp_path / "mgk.ckpt"
    assert word in error_of([str(checkpoint), str(out), *flags], main)
    assert not out.exists()


def test_other_attention_of_one_layer_is_refused(tmp_path):
    _, checkpoint = make_run(tmp_path / "run")
    path = tmp_path / "run" / "config.yaml"
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    arguments = config["model"]["init_args"]
    arguments["attention"] = {
        "default": arguments["attention"],
        "layers": {1: {"score": "gaussian"}},
    }
    path.write_text(yaml.safe_dump(config))
    out = tmp_path / "mgk.ckpt"
    line = error_of([str(checkpoint), str(out), "--weights_only", "--head_dim", str(E)], main)
    assert "score=gaussian" in line


def test_series_are_converted(tmp_path, capsys):
    """Series tell the model num_features, not vocab_size."""
    checkpoint = made.checkpoint(tmp_path, "series", "SoftmaxAttention")
    out = tmp_path / "mgk.ckpt"
    status = main([str(checkpoint), str(out), "--num_batches", "1"])
    told = capsys.readouterr()
    assert status == 0, told.err
    assert "same prediction in" in told.out
    layers = load_checkpoint(out)["conversion"]["layers"]
    assert all(0 <= errors["output_error"] < 2 for errors in layers.values())


@pytest.mark.slow  # with more commands: test_training_on.py
def test_pairs_of_texts_are_converted_from_their_run_folder(tmp_path, capsys):
    checkpoint = made.checkpoint(tmp_path, "pair", "SoftmaxAttention")
    out = tmp_path / "mgk.ckpt"
    status = main([str(checkpoint.parent.parent), str(out), "--num_batches", "1"])
    told = capsys.readouterr()
    assert status == 0, told.err
    assert "same prediction in" in told.out


def test_a_language_model_is_converted_and_its_loss_compared(tmp_path, capsys):
    """With data by its loss, as it has no prediction per row; and from its weights."""
    checkpoint = made.checkpoint(tmp_path, "text", "SoftmaxAttention")
    command = [str(checkpoint), str(tmp_path / "mgk.ckpt")]
    assert main([*command, "--num_batches", "1"]) == 0
    told = capsys.readouterr().out
    assert re.search(
        r"^model: loss [\d.]+ before, [\d.]+ after, over \d+ rows$", told, re.MULTILINE
    )
    assert "on held-out inputs" in told
    command[1] = str(tmp_path / "again.ckpt")
    assert main([*command, "--weights_only", "--head_dim", "8"]) == 0
    assert "not measured (no inputs)" in capsys.readouterr().out


def test_smgk_starts_at_the_softmax_model_and_is_annealed(tmp_path, capsys):
    """A shifted head per old head, norms put back: the same model, in the file that is written."""
    _, checkpoint = make_run(tmp_path / "run", dropout=0.1)
    out = tmp_path / "smgk.ckpt"
    flags = ["--to", "smgk", "--old_heads", "1", "--anneal", "40", "--num_batches", "2"]
    assert main([str(checkpoint), str(out), *flags]) == 0
    assert "model: output error 0.0 %, same prediction in 100.0 %" in capsys.readouterr().out
    new, stored = load_converted(out)
    config = yaml.safe_load(out.with_suffix(".yaml").read_text(encoding="utf-8"))["model"][
        "init_args"
    ]
    assert config["norm_annealing_steps"] == 40
    options = config["attention"]["init_args"]
    assert (options["shifted_keys"], options["key_norm_weight"]) == (True, 1.0)
    assert options["dropout"] == 0.1
    report = stored["conversion"]
    assert (report["to"], report["old_heads"], report["score"]) == ("smgk", 1, "gaussian")
    assert float(new.model.encoder.blocks[1].attention.core.key_norm_weight) == 1.0


def test_fish_is_written_with_its_own_file(tmp_path, capsys):
    _, checkpoint = make_run(tmp_path / "run")
    out = tmp_path / "fish.ckpt"
    flags = ["--to", "fish", "--num_global_heads", "3", "--num_batches", "2"]
    assert main([str(checkpoint), str(out), *flags]) == 0
    assert "same prediction in" in capsys.readouterr().out
    entry = yaml.safe_load(out.with_suffix(".yaml").read_text(encoding="utf-8"))["model"][
        "init_args"
    ]["attention"]
    assert entry["class_path"] == "lit_probattn.attention.FiSHAttention"
    task = SequenceClassifier(
        partial(FiSHAttention, **entry["init_args"]),
        vocab_size=23,
        num_classes=4,
        max_seq_len=19,
        **SIZES,
    )
    task.load_state_dict(load_checkpoint(out)["state_dict"])


def test_heads_with_a_bias_each_are_refused(tmp_path):
    """A Swin Transformer is opened, but its relative positions are a bias per head."""
    checkpoint = made.checkpoint(tmp_path, "picture", "SoftmaxAttention")
    line = error_of([str(checkpoint), str(tmp_path / "mgk.ckpt"), "--num_batches", "1"], main)
    assert "per-head biases (relative positions)" in line


def test_a_conversion_to_nan_is_not_written(tmp_path, monkeypatch):
    _, checkpoint = make_run(tmp_path / "run")
    out = tmp_path / "mgk.ckpt"

    def spoilt(state, layers):
        new = files.put_layers(state, layers)
        new["model.encoder.blocks.1.attention.core.prior.value"][0] = torch.nan
        return new

    monkeypatch.setattr("lit_probattn.convert.to_mgk.put_layers", spoilt)
    line = error_of([str(checkpoint), str(out)], main)
    assert "blocks.1.attention.core.prior.value contains NaN" in line
    assert not out.exists()
    assert not out.with_suffix(".yaml").exists()
