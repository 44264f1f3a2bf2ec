"""The encoder of series and its task: padding, positions, head, recipes, ranks, any attention."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lit_probattn.attention import FiSHAttention
from lit_probattn.cli.app import main
from lit_probattn.models.series.encoder import (
    FlattenedClassifier,
    SeriesEmbedding,
    SeriesTransformer,
)
from lit_probattn.models.series.norm import SeriesBatchNorm
from lit_probattn.randomness import RandomKey
from lit_probattn.tasks import SeriesClassifier, Task
from lit_probattn.tasks.distributed import sum_with_gradients
from lit_probattn.training.checkpoints import CheckedCheckpointIO
from lit_probattn.training.saving import RunCheckpoint
from tests.support.paths import CONFIGS
from tests.support.runs import arguments, in_ranks, only_version
from tests.tasks.tiny import soft_mgk, softmax, trainer

FEATURES, CLASSES, LENGTH = 3, 5, 13
LENGTHS = (13, 4, 1, 7)


gfish = partial(FiSHAttention, num_heads=4, num_global_heads=2, mixer="mlp")


def model(attention=softmax, **options) -> SeriesTransformer:
    torch.manual_seed(0)
    sizes = {"num_features": FEATURES, "num_classes": CLASSES, "max_seq_len": LENGTH}
    small = {"embed_dim": 14, "head_dim": 6, "num_layers": 2, "mlp_dim": 17, "dropout": 0.0}
    return SeriesTransformer(attention, **sizes, **{**small, **options})


def batch(steps: int = LENGTH, dtype=torch.float64) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    full = torch.randn(len(LENGTHS), LENGTH, FEATURES, generator=generator, dtype=dtype)
    mask = torch.arange(steps) < torch.tensor(LENGTHS)[:, None]
    return {
        "inputs": torch.where(mask[..., None], full[:, :steps], 0.0),
        "key_mask": mask,
        "target": torch.tensor([0, 4, 2, 2]),
        "sample_ids": torch.arange(4),
    }


# ---- model ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["batch", "layer"])
@pytest.mark.parametrize("attention", [softmax, gfish, soft_mgk])
def test_padding_changes_nothing(attention, norm):
    """The three shorter series alone, padded to 7 or to 13 steps, in training and evaluation."""
    whole = batch()
    inputs, mask = whole["inputs"][1:], whole["key_mask"][1:]
    short, padded = model(attention, norm=norm).double(), model(attention, norm=norm).double()
    rng = RandomKey(0, 0, torch.arange(1, 4))  # noise is drawn by sample and position
    for mode in (False, True):
        short.train(mode), padded.train(mode)
        expected = short(inputs[:, :7], key_mask=mask[:, :7], rng=rng)
        out = padded(inputs, key_mask=mask, rng=rng)
        torch.testing.assert_close(out, expected)
    (expected**2).sum().backward()
    (out**2).sum().backward()
    for (name, first), second in zip(short.named_parameters(), padded.parameters(), strict=True):
        torch.testing.assert_close(second.grad, first.grad, msg=name)


def test_layers_in_the_order_of_the_source():
    """One block written out, with torch's own modules and our attention."""
    net = model(num_layers=1, final_norm=True).double().train()
    x, mask = batch()["inputs"], torch.ones(4, LENGTH, dtype=torch.bool)
    block = net.blocks[0]

    def batch_norm(values, norm):
        flat = F.batch_norm(values.transpose(1, 2), None, None, norm.weight, norm.bias, True)
        return flat.transpose(1, 2)

    h = net.embedding.features(x) * math.sqrt(14) + net.embedding.positions
    h = batch_norm(h + block.attention(h), block.norm1)
    h = batch_norm(h + block.mlp.fc2(F.gelu(block.mlp.fc1(h))), block.norm2)
    h = F.layer_norm(h, (14,), net.norm.weight, net.norm.bias)
    expected = net.head.output(F.gelu(h).reshape(4, -1))
    torch.testing.assert_close(net(x, key_mask=mask), expected)


def test_positions():
    learned = SeriesEmbedding(num_features=FEATURES, max_seq_len=LENGTH, embed_dim=14)
    assert learned.positions.abs().max() <= 0.02
    net = model(positions="fixed")
    for dtype, bound in ((torch.float32, 3e-8), (torch.float64, 1e-14)):
        fixed = net.bfloat16().to(dtype).embedding.positions.table  # a cast between loses nothing
        for step, channel in ((0, 0), (5, 4), (12, 7)):
            angle = step / 10000 ** (2 * (channel // 2) / 14)
            value = math.sin(angle) if channel % 2 == 0 else math.cos(angle)
            assert float(fixed[step, channel]) == pytest.approx(value, abs=bound)
    assert "embedding.positions" not in net.state_dict()
    with pytest.raises(ValueError, match="even embed_dim, received 15"):
        model(positions="fixed", embed_dim=15)


def test_head_reads_every_step_and_no_padding():
    head = FlattenedClassifier(embed_dim=2, max_seq_len=3, num_classes=CLASSES)
    x, mask = torch.randn(1, 2, 2), torch.tensor([[True, False]])
    kept = torch.cat([F.gelu(x[0, 0]), torch.zeros(4)])
    torch.testing.assert_close(head(x, mask)[0], head.output(kept))


@pytest.mark.parametrize("steps", [2, 3])
def test_head_calls_its_output_layer(steps):
    """An adapter around the layer, or a hook, takes part in the logits."""
    head = FlattenedClassifier(embed_dim=2, max_seq_len=3, num_classes=CLASSES)
    x = torch.randn(1, steps, 2)
    plain = head(x)
    head.output.register_forward_hook(lambda layer, inputs, out: out + 1)
    torch.testing.assert_close(head(x), plain + 1)


def test_projections_start_as_in_multihead_attention():
    net = model(embed_dim=64, head_dim=16)
    reference = nn.MultiheadAttention(64, 4)
    layer = net.blocks[0].attention
    bound = math.sqrt(6 / (4 * 64))
    assert float(reference.in_proj_weight.detach().abs().max()) == pytest.approx(bound, rel=0.01)
    assert float(layer.key_proj.weight.detach().abs().max()) == pytest.approx(bound, rel=0.01)
    assert layer.key_proj.weight.abs().max() <= bound
    assert not layer.out_proj.bias.any()
    assert not torch.equal(layer.key_proj.weight, net.blocks[1].attention.key_proj.weight)
    default = model(embed_dim=64, head_dim=16, attention_init="default")
    assert default.blocks[0].attention.key_proj.weight.abs().max() <= 1 / math.sqrt(64)
    assert default.blocks[0].attention.key_proj.bias.any()


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="up to 13 steps of 3 features"):
        model()(torch.zeros(1, 14, FEATURES))
    with pytest.raises(ValueError, match="14 steps and 2 features"):
        model()(torch.zeros(1, 14, 2))
    with pytest.raises(ValueError, match="num_layers must be in"):
        model(num_layers=0)
    with pytest.raises(ValueError, match="13 steps, received 7: set pad_to=max"):
        model(norm_positions="all")(torch.zeros(2, 7, FEATURES))


# ---- task ----------------------------------------------------------------------------------------


class Repeated(torch.utils.data.IterableDataset):
    """The same batch again and again."""

    def __init__(self, one) -> None:
        self.one = one

    def __iter__(self):
        while True:
            yield self.one


def fit(module, steps=3, one=None, **options):
    one = batch(dtype=torch.float32) if one is None else one
    run = trainer(steps, **options)
    run.fit(module, torch.utils.data.DataLoader(Repeated(one), batch_size=None))
    return run


def task(attention=softmax, **options) -> SeriesClassifier:
    torch.manual_seed(0)
    sizes = {"num_features": FEATURES, "num_classes": CLASSES, "max_seq_len": LENGTH}
    small = {"embed_dim": 14, "head_dim": 6, "num_layers": 1, "mlp_dim": 17, "dropout": 0.0}
    recipe = {"lr": 1e-2, "eps": 1e-8, "schedule": "constant"}
    return SeriesClassifier(attention, **sizes, **{**small, **recipe, **options})


@pytest.mark.parametrize(
    "attention",
    [gfish, *(pytest.param(other, marks=pytest.mark.slow) for other in (softmax, soft_mgk))],
)
def test_any_attention_learns_four_series_by_heart(attention):
    run = fit(task(attention, lr=3e-2), steps=40)
    assert float(run.callback_metrics["train/loss"]) < 0.1
    assert isinstance(run.optimizers[0], torch.optim.RAdam)


def test_batch_norm_refuses_accumulation_and_layer_norm_does_not():
    with pytest.raises(ValueError, match="accumulate_grad_batches is 2: set it to 1"):
        fit(task(), accumulate_grad_batches=2)
    fit(task(norm="layer", optimizer="adamw"), accumulate_grad_batches=2)


def test_resumed_run_has_the_weights_and_averages_of_an_uninterrupted_one(tmp_path):
    loader = torch.utils.data.DataLoader(Repeated(batch(dtype=torch.float32)), batch_size=None)
    found = []
    for start in (None, tmp_path / "checkpoints/step-00000001.ckpt"):
        saving = RunCheckpoint(tmp_path / "checkpoints", every_n_steps=1)
        run = trainer(
            2, callbacks=[saving], plugins=[CheckedCheckpointIO()], enable_checkpointing=True
        )
        module = task()
        run.fit(module, loader, ckpt_path=start, weights_only=True)
        found.append(module.state_dict())
    whole, resumed = found
    assert any("running_mean" in name for name in whole)
    for name, value in whole.items():
        assert torch.equal(resumed[name], value), name


def test_batch_norm_is_over_all_ranks_but_for_the_search_of_a_bad_module(monkeypatch):
    """The rank that looks for it repeats its batch alone; the norm itself: test_series_norm.py."""
    module, seen = task(), []
    norms = [part for part in module.modules() if isinstance(part, SeriesBatchNorm)]
    monkeypatch.setattr(
        Task, "_describe_my_window", lambda self: seen.extend(n.sum_over_ranks for n in norms)
    )
    fit(module, steps=1)
    assert [norm.sum_over_ranks for norm in norms] == [sum_with_gradients] * 2
    module._describe_my_window()
    assert [alone(3.5) for alone in seen] == [3.5, 3.5]
    assert sum_with_gradients not in seen
    assert [norm.sum_over_ranks for norm in norms] == [sum_with_gradients] * 2


# ---- command line --------------------------------------------------------------------------------


def command(name: str, folder: Path, *more: str) -> list[str]:
    short = ["--trainer.max_steps", "2", "--trainer.limit_val_batches", "1"]
    short += ["--run.checkpoint_every", "1", "--trainer.log_every_n_steps", "1"]
    # torch's dropout differs by rank; attention dropout and noise are drawn by sample
    short += ["--model.init_args.dropout", "0"]
    given = {"attention": str(CONFIGS / "attention/gfish.yaml"), "data_dir": folder}
    return arguments(name, folder, *short, *more, task="tiny/uea", **given)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    pytest.importorskip("aeon")
    folder = tmp_path_factory.mktemp("one")
    assert main(command("fit", folder)) == 0
    return folder


def test_result_holds_protocol_and_hashes(trained):
    assert main(command("test", trained, "--ckpt_path", "last")) == 0
    result = json.loads(
        (only_version(trained) / "test-step-00000002.json").read_text(encoding="utf-8")
    )
    assert result["archive"] == "JapaneseVowels"
    assert result["selected_on_test"] is False
    assert result["archive_version"].startswith("aeon ")
    assert len(result["archive_sha256"]["JapaneseVowels_TEST.ts"]) == 64
    assert result["test/accuracy"] * 370 == pytest.approx(round(result["test/accuracy"] * 370))


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_one_activation_for_blocks_and_head(activation):
    """The model written out; `relu` reaches the head too, as in mvts."""
    made = model(activation=activation, norm="layer").double()
    data = batch()
    x, mask = data["inputs"].clone().requires_grad_(), data["key_mask"]

    def active(h):
        return h.clamp_min(0) if activation == "relu" else h * (1 + torch.erf(h / 2**0.5)) / 2

    embedding, width = made.embedding, made.embedding.features.out_features
    h = F.linear(x, embedding.features.weight, embedding.features.bias) * width**0.5
    h = h + embedding.positions[:LENGTH]
    for block in made.blocks:
        h = block.norm1(h + block.attention(h, key_mask=mask), mask)
        inner = active(F.linear(h, block.mlp.fc1.weight, block.mlp.fc1.bias))
        h = block.norm2(h + F.linear(inner, block.mlp.fc2.weight, block.mlp.fc2.bias), mask)
    flat = (active(h) * mask[..., None]).flatten(1)
    expected = F.linear(flat, made.head.output.weight, made.head.output.bias)
    found = made(x, key_mask=mask)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    weight, leaves = torch.randn_like(found), [x, *made.parameters()]
    ours, theirs = (torch.autograd.grad((out * weight).sum(), leaves) for out in (found, expected))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


@pytest.mark.slow
def test_loss_that_is_not_finite_on_one_rank_stops_both(tmp_path, monkeypatch, capfd):
    """The rank that looks for the bad module repeats its batch alone: it must wait for nobody."""
    pytest.importorskip("aeon")
    loss = SeriesClassifier.batch_loss

    def poisoned(self, batch):
        bad = self.global_rank == 1 and self.trainer.global_step == 1
        return loss(self, batch) * (float("nan") if bad else 1.0)

    monkeypatch.setattr(SeriesClassifier, "batch_loss", poisoned)
    two = command("fit", tmp_path, "--trainer.devices", "2", "--trainer.strategy", "ddp")
    assert in_ranks(lambda: main(two), timeout=60) == [1, 1]
    errors = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error")]
    assert len(errors) == 2
    assert all("the loss is not finite at step 1: rank 1" in line for line in errors)
