"""The language-modelling task: sliding windows, order, resume, ranks, prediction, checkpoints."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from unittest import mock

import pandas as pd
import pytest
import torch

from lit_probattn.attention import (
    FiSHAttention,
    LinearAttention,
    LinearFiSHAttention,
    MGKAttention,
    SoftmaxAttention,
)
from lit_probattn.cli.app import main
from lit_probattn.tasks import LanguageModeling
from lit_probattn.tasks.schedules import check_schedule, schedule_values
from tests.datamodules.text import made as made_text
from tests.support.helpers import error_of
from tests.support.runs import (
    ROOT,
    arguments,
    fingerprint,
    in_ranks,
    metrics,
    only_version,
    rewound,
    run,
    write_attention,
)
from tests.support.slow import mostly_slow
from tests.tasks.tiny import trainer

CONFIGS = ROOT / "configs"
VARIANTS = {
    "softmax": partial(SoftmaxAttention, num_heads=3),
    "mgk": partial(MGKAttention, num_heads=2),
    "linear": partial(LinearAttention, num_heads=3),
    "gfish": partial(FiSHAttention, num_heads=3, num_global_heads=2, mixer="mlp"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return made_text.write(tmp_path_factory.mktemp("text"))


def task(attention="softmax", **options) -> LanguageModeling:
    """Small, with weights that are larger than at the start, so that all of them matter."""
    torch.manual_seed(0)
    sizes = {"embed_dim": 12, "head_dim": 5, "num_layers": 2, "mlp_dim": 9, "dropout": 0.1}
    given = {"vocab_size": 41, "max_seq_len": 7, "cutoffs": [9, 20], "schedule": "constant"}
    module = LanguageModeling(VARIANTS[attention], **{**given, **sizes, **options})
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return module


def test_a_prediction_adds_64_tokens_unless_told():
    """As `configs/tasks/own_text.yaml` writes out."""
    assert task().max_new_tokens == 64
    assert task(max_new_tokens=3).max_new_tokens == 3


# ---- evaluation --------------------------------------------------------------------------------


def direct_loop(module: LanguageModeling, stream: torch.Tensor, window: int) -> list[float]:
    """Loss of every token after the first, one window at a time, as the papers evaluate."""
    module.eval()
    losses: list[float] = []
    with torch.no_grad():
        for start in range(len(stream) - window):
            piece = stream[start : start + window][None]
            log_probs = module.model.log_probs(module.model(piece))[0]
            follows = stream[start + 1 : start + window + 1]
            of_window = -log_probs.gather(1, follows[:, None])[:, 0]
            losses += of_window.tolist() if start == 0 else of_window[-1:].tolist()
    return losses


@pytest.mark.parametrize("variant", mostly_slow(VARIANTS, ["softmax", "linear"]))
def test_batched_windows_equal_the_direct_loop_token_by_token(folder, variant):
    module, data = task(variant), made_text.data(folder, eval_batch_size=11)
    stream = _stream(data)
    expected = direct_loop(module, stream, 7)
    assert len(expected) == len(stream) - 1
    with torch.no_grad():
        module.trainer = trainer()
        found = torch.cat([module.token_losses(real(b)) for b in data.test_dataloader()]).tolist()
    assert found == pytest.approx(expected, abs=2e-6, rel=2e-6)


def real(batch):
    """The rows of a batch that do not only fill up."""
    keep = batch["sample_ids"] >= 0
    return {k: v[keep] if isinstance(v, torch.Tensor) else v for k, v in batch.items()}


@pytest.mark.parametrize("rows", mostly_slow([1, 10, 64], [10]))
def test_perplexity_counts_each_token_once(folder, rows):
    module = task()
    (values,) = trainer().test(module, made_text.data(folder, eval_batch_size=rows), verbose=False)
    stream = _stream(made_text.data(folder))
    expected = direct_loop(module, stream, 7)
    assert values["test/tokens_sliding"] == len(stream) - 1
    mean = sum(expected) / len(expected)
    assert values["test/ppl_sliding"] == pytest.approx(math.exp(mean), rel=1e-5)


def _stream(data):
    data.setup()
    return torch.from_numpy(data.open().array("test_tokens").astype("int64"))


def test_the_form_is_named_and_segments_are_independent(folder):
    module = task()
    options = {"val_stride": 3, "test_stride": None, "eval_batch_size": 4}
    run_ = trainer()
    (test,) = run_.test(module, made_text.data(folder, **options), verbose=False)
    (val,) = run_.validate(module, made_text.data(folder, **options), verbose=False)
    assert set(test) == {"test/ppl_segments", "test/tokens_segments"}
    assert set(val) == {"val/ppl_stride3", "val/tokens_stride3"}
    stream = _stream(made_text.data(folder))
    losses: list[float] = []
    module.eval()
    with torch.no_grad():
        for start in range(0, len(stream) - 1, 7):
            piece = stream[start : start + 8]
            log_probs = module.model.log_probs(module.model(piece[None, :-1]))[0]
            losses += (-log_probs.gather(1, piece[1:, None])[:, 0]).tolist()
    assert test["test/ppl_segments"] == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-5)
    assert test["test/tokens_segments"] == len(losses) == len(stream) - 1


# ---- training ----------------------------------------------------------------------------------


def test_loss_is_the_mean_over_tokens(folder):
    module = task(dropout=0.0)
    data = made_text.data(folder)
    data.setup()
    batch = next(iter(data.train_dataloader()))
    module.trainer = trainer()
    log_probs = module.model.log_probs(module.model(batch["inputs"]))
    picked = -log_probs.gather(-1, batch["target"][..., None])
    torch.testing.assert_close(module.batch_loss(batch), picked.mean())


def test_accumulation_changes_nothing_but_the_order_of_sums(folder):
    losses = []
    for parts in (1, 4):
        runner = trainer(1, accumulate_grad_batches=parts)
        runner.fit(task(dropout=0.0), made_text.data(folder))
        losses.append(float(runner.callback_metrics["train/loss"]))
    assert losses[1:] == pytest.approx(losses[:1], rel=1e-6)


@pytest.mark.parametrize("precision", mostly_slow(["32-true", "bf16-mixed"], ["bf16-mixed"]))
def test_it_learns_with_clipping(folder, precision):
    runner = trainer(15, gradient_clip_val=0.25, precision=precision)
    module = task("mgk", lr=4e-2)
    runner.fit(module, made_text.data(folder))
    (values,) = runner.test(module, made_text.data(folder), verbose=False)
    assert values["test/ppl_sliding"] < 20  # of 41 words


def test_schedule_of_the_papers():
    def at(step):
        return schedule_values(
            "cosine_global", step, peak_lr=2.5e-4, total_steps=500000, warmup_steps=2000
        ).lr

    assert [at(0), at(999), at(1999)] == pytest.approx([2.5e-4 / 2000, 1.25e-4, 2.5e-4])
    for step in (2000, 250000, 499999):
        expected = 2.5e-4 * (1 + math.cos(math.pi * step / 500000)) / 2
        assert at(step) == pytest.approx(expected, rel=1e-9)


def test_inverse_square_root_has_no_end():
    def at(step):
        return schedule_values(
            "inverse_sqrt", step, peak_lr=5e-4, total_steps=-1, warmup_steps=4000
        ).lr

    assert [at(0), at(2000), at(4000)] == pytest.approx([1e-7, 2.5005e-4, 5e-4])
    assert at(16000) == pytest.approx(2.5e-4)
    check_schedule("inverse_sqrt", total_steps=10, warmup_steps=4000)
    with pytest.raises(ValueError, match="warmup_steps 10"):
        check_schedule("cosine_global", total_steps=10, warmup_steps=10)


# ---- the command line --------------------------------------------------------------------------


def command(name, place, text, *more, tiny="small"):
    every = ("--trainer.log_every_n_steps", "1", "--trainer.max_steps", "4")
    every += ("--trainer.val_check_interval", "2", "--run.checkpoint_every", "2")
    return arguments(name, place, *every, *more, task=f"tiny/wikitext103_{tiny}", data_dir=text)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, folder):
    place = tmp_path_factory.mktemp("trained")
    run(command("fit", place, folder))
    return place


def test_a_run_resumes_exactly(tmp_path, trained, folder):
    resumed = rewound(only_version(trained), 2, tmp_path)
    run(command("fit", tmp_path, folder, "--ckpt_path", "last"))
    assert fingerprint(resumed) == fingerprint(only_version(trained))
    assert metrics(resumed) == metrics(only_version(trained))


def test_ranks_that_write_the_attention_file_never_read_half_of_it(tmp_path):
    """Each writes it as it makes its command, while the others may read it."""
    with open(write_attention(tmp_path), encoding="utf-8") as reading:
        path = write_attention(tmp_path, "MGKAttention")
        assert "SoftmaxAttention" in reading.read()  # the file that was opened, whole
    assert "MGKAttention" in Path(path).read_text(encoding="utf-8")
    assert [file.name for file in tmp_path.iterdir()] == ["variant.yaml"]


def test_predict_writes_text_and_speed(trained, folder, capsys):
    run(command("predict", trained, folder, "--ckpt_path", "last"))
    out = capsys.readouterr().out
    assert "16 tokens generated" in out
    assert "tokens per second" in out
    table = pd.read_parquet(only_version(trained) / "predictions-step-00000004.parquet")
    assert table["sample_id"].tolist() == [0, 1]
    assert [len(row) for row in table["continuation"]] == [8, 8]
    decode = made_text.data(folder).decode
    for row in table.itertuples():
        assert row.prompt_text == decode(row.prompt)
        assert row.continuation_text == decode(row.continuation)
        assert row.continuation_text in out


def test_filler_rows_are_not_predicted():
    """Ranks with fewer samples than the others have some."""
    module = task(max_new_tokens=2).eval()
    module.trainer = mock.MagicMock()
    module.trainer.datamodule.decode = str
    generator = torch.Generator().manual_seed(3)
    prompts = torch.randint(0, 41, (3, 5), generator=generator)
    mask = torch.arange(5) >= torch.tensor([[2], [0], [1]])
    batch = {"inputs": prompts, "key_mask": mask, "sample_ids": torch.tensor([11, -1, 13])}
    found = module.predict_step(batch, 0)
    alone = module.predict_step({name: value[[0, 2]] for name, value in batch.items()}, 0)
    assert found["prompt_text"] == [str(prompts[0, 2:].tolist()), str(prompts[2, 1:].tolist())]
    assert {k: str(v) for k, v in found.items()} == {k: str(v) for k, v in alone.items()}


POSITIONS = {"prior_share": "head_position", "max_positions": 32}
NOISE = {"num_global_heads": 2, "noise_scale": 0.5, "noise_at_eval": True}


@pytest.mark.parametrize("temperature", [0.0, 2.0])
@pytest.mark.parametrize(
    "attention",
    [
        partial(SoftmaxAttention),
        partial(MGKAttention, **POSITIONS),
        partial(FiSHAttention, **NOISE),
        partial(LinearFiSHAttention, **NOISE),
        partial(MGKAttention, shifted_keys=True, rotary_dim=4, rotary_shift="after"),
    ],
    ids=["softmax", "priors by position", "noise of pairs", "noise of states", "rotary"],
)
def test_a_prompt_continues_alike_beside_any_others(attention, temperature):
    made = partial(attention, num_heads=4)
    options = {"max_new_tokens": 27, "max_seq_len": 32, "temperature": temperature, "seed": 3}
    options |= {"positions": "rotary"} if attention.keywords.get("rotary_dim") else {}
    with mock.patch.dict(VARIANTS, made=made):
        module = task("made", **options).eval()
    module.trainer = mock.MagicMock()
    module.trainer.datamodule = None
    prompts, lengths = torch.randint(0, 41, (4, 5)), torch.tensor([[2], [5], [2], [4]])
    mask = torch.arange(5) >= 5 - lengths
    batch = {"inputs": prompts, "key_mask": mask, "sample_ids": torch.tensor([11, 4, 13, 0])}
    found = module.predict_step(batch, 0)["continuation"]
    for row, length in enumerate(lengths[:, 0].tolist()):
        one = {name: value[row : row + 1] for name, value in batch.items()}
        one |= {name: one[name][:, 5 - length :] for name in ("inputs", "key_mask")}
        assert torch.equal(module.predict_step(one, 0)["continuation"][0], found[row])


def test_a_checkpoint_of_another_vocabulary_is_refused(trained, tmp_path):
    other = made_text.write(tmp_path / "other", train="a <unk> b c\n" * 20)
    message = error_of(command("test", trained, other, "--ckpt_path", "last"), alone=False)
    assert "the checkpoint was trained with a different vocabulary: " in message
    assert "the data have 5 words, sha256" in message
    assert "--data.init_args.vocab_file FILE" in message


@pytest.mark.slow  # a vocabulary in a file: tests/datamodules/text/test_wikitext103.py
def test_the_vocabulary_of_the_checkpoint_can_be_given(trained, folder, tmp_path):
    other = made_text.write(tmp_path / "other", train="w1 <unk> zebra\n" * 20)
    words = tmp_path / "words.txt"
    words.write_text("\n".join(made_text.data(folder).vocabulary.words) + "\n")
    options = ("--ckpt_path", "last", "--data.init_args.vocab_file", str(words))
    assert main(command("test", trained, other, *options)) == 0


@pytest.mark.slow  # its configuration: tests/house/test_configs.py
def test_one_step_of_the_other_model(tmp_path, folder):
    run(command("fit", tmp_path, folder, "--trainer.fast_dev_run", "1", tiny="value_aware"))


@pytest.mark.slow
def test_two_processes_score_like_one(trained, folder):
    options = ("--ckpt_path", "last", "--data.init_args.eval_batch_size", "5")
    report = only_version(trained) / "test-step-00000004.json"
    run(command("test", trained, folder, *options))
    one = json.loads(report.read_text(encoding="utf-8"))
    report.unlink()
    two = ("--trainer.devices", "2", "--trainer.strategy", "ddp")
    assert in_ranks(lambda: main(command("test", trained, folder, *options, *two))) == [0, 0]
    found = json.loads(report.read_text(encoding="utf-8"))
    assert found["test/tokens_sliding"] == one["test/tokens_sliding"] > 0
    assert found["test/ppl_sliding"] == pytest.approx(one["test/ppl_sliding"], rel=1e-6)
