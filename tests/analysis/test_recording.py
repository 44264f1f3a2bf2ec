"""Recording what layers see: nothing changes, and the recorded call makes the layer's output."""

from __future__ import annotations

import argparse
import os

import pytest
import torch

from lit_probattn.analysis.recording import in_double, record
from lit_probattn.analysis.sampling import sequences
from lit_probattn.attention import MGKAttention, SoftmaxAttention
from lit_probattn.base.errors import ConfigError, DataError
from lit_probattn.training.trained import choose_device, crop, identity
from tests.analysis.made import checkpoint, layer_call, opened

VARIANTS = {
    "sequence": ("MGKAttention", {"variance": "paper_main"}),
    "pair": ("SoftmaxAttention", {}),
    "picture": (
        "FiSHAttention",
        {"num_global_heads": 2, "mixer": "mlp", "noise_at_eval": True, "noise_scale": 0.5},
    ),
    "text": ("MGKAttention", {"shifted_keys": True, "bias": False}),
}


@pytest.mark.parametrize("task", VARIANTS)
def test_model_computes_the_same_and_calls_explain_the_layers(task, tmp_path):
    cls, options = VARIANTS[task]
    trained = opened(checkpoint(tmp_path, task, cls, **options))
    batch = next(iter(trained.batches("val", 5)))
    outputs = {}

    def keep(name):
        return lambda module, args, out: outputs.__setitem__(name, out)

    hooks = [layer.register_forward_hook(keep(n)) for n, layer in trained.layers.items()]
    with torch.no_grad():
        plain = trained.forward(batch)
        with record(trained.task.model) as calls:
            recorded = trained.forward(batch)
    for hook in hooks:
        hook.remove()
    assert torch.equal(plain, recorded)
    assert [call.name for call in calls] == list(trained.layers)
    assert not any(m._forward_pre_hooks for m in trained.task.model.modules())
    for call in calls:
        layer = call.layer
        value = layer.value_proj(call.query).unflatten(-1, (layer.layout.value, -1))
        value = value.transpose(1, 2).repeat_interleave(layer.num_heads // value.shape[2], 1)
        maps = call.weights()
        made = layer.out_proj((maps @ value).transpose(1, 2).flatten(2))
        alone = call.one(1, padded=True).weights()[0]  # noise too is that of its sequence
        torch.testing.assert_close(alone, maps[1], rtol=2e-4, atol=1e-5)
        expected = outputs[call.name]
        if call.key_mask is not None:
            made, expected = made[call.key_mask], expected[call.key_mask]
        torch.testing.assert_close(made, expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(("task", "part"), [("pair", "model"), ("picture", "ema.module")])
def test_a_moving_average_is_opened_in_place_of_the_weights(task, part, tmp_path):
    path = checkpoint(tmp_path, task, "SoftmaxAttention")
    stored = torch.load(path, weights_only=True)["state_dict"]
    for name, tensor in opened(path).task.model.state_dict().items():
        assert torch.equal(tensor, stored[f"{part}.{name}"]), name


@pytest.mark.parametrize("causal", [False, True])
def test_one_sequence_alone_has_its_part_of_the_maps(causal):
    lengths = torch.tensor([7, 11])
    mask = torch.arange(11) < lengths[:, None]
    bias = torch.randn(2, 3, 11, 11, dtype=torch.float64)
    layer = MGKAttention(10, 3, head_dim=4, prior_share="head_position", max_positions=13)
    torch.nn.init.uniform_(layer.core.prior.value, 0.1, 0.9)
    call = layer_call(layer, key_mask=mask, is_causal=causal, bias=bias)
    both = call.weights()
    for index, length in enumerate(lengths.tolist()):
        one = call.one(index).weights()
        assert one.shape == (1, 3, length, length)
        torch.testing.assert_close(one[0], both[index, :, :length, :length], rtol=0, atol=1e-14)
        assert call.one(index, padded=True).weights().shape == (1, 3, 11, 11)


def test_copy_in_double_has_the_same_weights():
    layer = SoftmaxAttention(10, 3, head_dim=4)
    copy = in_double(layer)
    assert copy.query_proj.weight.dtype == torch.float64
    assert layer.query_proj.weight.dtype == torch.float32
    assert torch.equal(copy.key_proj.weight.float(), layer.key_proj.weight)


def test_decoding_is_refused():
    layer = SoftmaxAttention(10, 3, head_dim=4).eval()
    with record(layer), pytest.raises(ValueError, match="run whole sequences"):
        layer(torch.randn(1, 2, 10), cache=layer.new_cache())


def test_samples_are_drawn_by_seed_and_whatever_the_batch_size(tmp_path):
    trained = opened(checkpoint(tmp_path, "pair", "SoftmaxAttention"))
    flags = {"split": "val", "num_samples": 5, "max_len": 0, "seed": 3}

    def draw(**changed):
        options = argparse.Namespace(**{**flags, "batch_size": 2, **changed})
        found = [one for batch in sequences(trained, options) for one in batch]
        return [(one.layer, one.sample_id, one.part) for one in found], found

    keys, found = draw()
    assert sorted(keys) == sorted(draw(batch_size=5)[0])
    assert set(keys) != set(draw(seed=4)[0])
    assert len({sample for _, sample, _ in keys}) == 5
    assert {part for _, _, part in keys} == {0, 1}  # the two texts of a pair
    for one in found:
        sample = trained.data.collate()([trained.data.split("val")[one.sample_id]])
        real = int(sample["key_mask"][0, one.part].sum())
        assert one.call.query.shape[1] == real
        assert one.tokens == sample["inputs"][0, one.part, :real].tolist()


def test_cropping_keeps_labels_and_cuts_what_has_positions():
    batch = {
        "inputs": torch.zeros(3, 2, 9),
        "key_mask": torch.ones(3, 2, 9, dtype=torch.bool),
        "target": torch.zeros(3),
        "form": "segments",
    }
    cut = crop(batch, 4)
    assert cut["inputs"].shape == cut["key_mask"].shape == (3, 2, 4)
    assert cut["target"].shape == (3,)
    assert crop(batch, None) is batch


def test_samples_are_drawn_without_replacement_and_follow_the_seed(tmp_path):
    trained = opened(checkpoint(tmp_path, "sequence", *VARIANTS["sequence"][:1]))

    def drawn(count, seed):
        found = trained.batches("val", count, seed=seed, rows=3)
        return [batch["sample_ids"].tolist() for batch in found]

    total = len(trained.data.split("val"))
    first = drawn(7, 0)
    assert [len(rows) for rows in first] == [3, 3, 1]
    assert first == drawn(7, 0)
    assert first != drawn(7, 1)
    everything = [number for rows in drawn(total + 5, 0) for number in rows]
    assert sorted(everything) == list(range(total))
    assert everything != sorted(everything)


def test_a_checkpoint_is_known_by_its_name_step_size_and_time(tmp_path):
    path = checkpoint(tmp_path, "sequence", *VARIANTS["sequence"][:1])
    os.utime(path, ns=(5, 1_700_000_000_123_456_789))
    trained = opened(path)
    assert identity(trained) == {
        "checkpoint": path.name,
        "step": trained.step,
        "bytes": len(path.read_bytes()),
        "modified_ns": 1_700_000_000_123_456_789,
    }


@pytest.mark.parametrize("there", [False, True])
def test_the_device_is_a_gpu_if_there_is_one(there, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    assert choose_device("auto").type == ("cuda" if there else "cpu")
    assert choose_device("cpu").type == "cpu"
    if there:
        assert choose_device("cuda:1") == torch.device("cuda", 1)
    else:
        with pytest.raises(ConfigError, match="cuda:1 is not available: no CUDA device"):
            choose_device("cuda:1")


def test_data_of_other_classes_than_a_checkpoint_are_refused(tmp_path):
    path = checkpoint(tmp_path, "series", "SoftmaxAttention")
    classes = opened(path).data.classes
    content = torch.load(path, weights_only=True)
    torch.save({**content, "UEA": {"classes": classes[::-1]}}, path)
    with pytest.raises(DataError, match="class 0 was"):
        opened(path)
