"""Attention by layers: each layer gets its own, and what does not fit is said."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import timm
import torch
import yaml

from lit_probattn.attention import FiSHAttention, MGKAttention, SoftmaxAttention
from lit_probattn.base.errors import ConfigError
from lit_probattn.compare.protocol import attention_option, draws_noise_at_eval
from lit_probattn.configs import attention_factory, canonical, read_yaml
from lit_probattn.models.encoder_decoder import EncoderDecoder
from lit_probattn.models.images.replace import replace_attention
from lit_probattn.models.per_layer import CLASS_PATH, in_full, layer_factories, per_layer
from lit_probattn.models.series.encoder import SeriesTransformer
from lit_probattn.models.transformer import Transformer
from tests.support.paths import ROOT
from tests.support.runs import only_version, printed_config, run

MGK = {"class_path": "lit_probattn.attention.MGKAttention", "init_args": {"num_heads": 2}}
SOFTMAX = {"class_path": "lit_probattn.attention.SoftmaxAttention", "init_args": {"num_heads": 3}}
SHORT = {"default": MGK, "layers": {0: {"num_heads": 4, "head_dim": 6}, 2: SOFTMAX}}
softmax = partial(SoftmaxAttention, num_heads=2)
SIZES = {"embed_dim": 8, "head_dim": 4, "mlp_dim": 16}
LAYERS = per_layer(softmax, {1: partial(MGKAttention, num_heads=3)}, {1: 5, 2: 7})


def shapes(layers) -> list[tuple[type, int, int]]:
    return [(type(layer), layer.num_heads, layer.head_dim) for layer in layers]


EXPECTED = [(SoftmaxAttention, 2, 4), (MGKAttention, 3, 5), (SoftmaxAttention, 2, 7)]


def written_out(entry=SHORT):
    return canonical({"model": {"init_args": {"attention": copy.deepcopy(entry)}}})["model"][
        "init_args"
    ]["attention"]


def test_every_layer_of_an_encoder_has_its_own():
    model = Transformer(LAYERS, num_layers=3, **SIZES)
    assert shapes(block.attention for block in model.blocks) == EXPECTED
    assert model(torch.randn(2, 5, 8)).shape == (2, 5, 8)


def test_arguments_that_a_model_adds_reach_every_layer():
    model = Transformer(partial(LAYERS, dropout=0.25), num_layers=3, **SIZES)
    assert [block.attention.dropout for block in model.blocks] == [0.25] * 3
    assert shapes(block.attention for block in model.blocks) == EXPECTED


def test_each_attention_of_an_encoder_decoder_has_layers_of_its_own():
    model = EncoderDecoder(
        softmax,
        cross_attention=LAYERS,
        source_vocab_size=9,
        vocab_size=9,
        max_seq_len=7,
        embed_dim=8,
        head_dim=4,
        num_encoder_layers=2,
        num_decoder_layers=3,
        mlp_dim=16,
    )
    assert shapes(block.cross_attention for block in model.decoder.blocks) == EXPECTED
    assert (
        shapes(block.attention for block in model.decoder.blocks) == [(SoftmaxAttention, 2, 4)] * 3
    )


def test_layers_of_series_models_and_blocks_of_pictures():
    model = SeriesTransformer(
        LAYERS,
        num_features=2,
        num_classes=3,
        max_seq_len=6,
        embed_dim=8,
        head_dim=4,
        num_layers=3,
        mlp_dim=16,
    )
    assert shapes(block.attention for block in model.blocks) == EXPECTED
    assert model(torch.zeros(5, 4, 2)).shape == (5, 3)  # of fewer steps than the longest
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, embed_dim=24, depth=3, num_heads=2)
    replace_attention(vit, LAYERS)
    found = [(type(b.attn.attention), b.attn.attention.head_dim) for b in vit.blocks]
    assert found == [(SoftmaxAttention, 12), (MGKAttention, 5), (SoftmaxAttention, 7)]


def test_the_short_form_stands_for_whole_attentions():
    entry = written_out()
    assert entry["class_path"] == CLASS_PATH
    assert entry["init_args"]["layers"] == {
        0: {**MGK, "init_args": {"num_heads": 4}},
        2: SOFTMAX,
    }
    assert entry["init_args"]["head_dims"] == {0: 6}
    assert canonical(entry) == entry
    factory = attention_factory(entry["class_path"], entry["init_args"])
    made = [layer(12, head_dim=4) for layer in layer_factories(factory, 3)]
    expected = [(MGKAttention, 4, 6), (MGKAttention, 2, 4), (SoftmaxAttention, 3, 4)]
    assert shapes(made) == expected


def test_options_are_told_by_layers_where_they_differ():
    config = {"model": {"init_args": {"attention": written_out()}}}
    assert attention_option(config, "num_heads") == "2/4/3"
    assert attention_option(config, "dropout") == 0.0
    assert draws_noise_at_eval(config) is None
    noisy = {"class_path": f"lit_probattn.attention.{FiSHAttention.__name__}"}
    noisy["init_args"] = {"num_heads": 4, "num_global_heads": 2}
    config["model"]["init_args"]["attention"] = written_out({"default": MGK, "layers": {1: noisy}})
    assert draws_noise_at_eval(config) is False


@pytest.mark.parametrize(
    "entry", [MGK, {**SOFTMAX, "default": MGK}, {"num_heads": 2}, "a name", None]
)
def test_what_is_no_short_form_is_left_as_it_is(entry):
    before = copy.deepcopy(entry)
    assert in_full(entry) is entry
    assert entry == before


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"default": MGK, "layer": {}}, "supports the keys default and layers, received layer"),
        ({"default": {"num_heads": 2}}, "attention.default must be an attention"),
        ({"default": MGK, "layers": [1]}, "must map layer indices"),
        ({"default": MGK, "layers": {"first": {}}}, "must be layer indices"),
        ({"default": MGK, "layers": {-1: {}}}, "must be layer indices from 0, received -1"),
        ({"default": MGK, "layers": {1: 4}}, "attention.layers.1 must be an attention or"),
        (
            {"default": MGK, "layers": {1: {**SOFTMAX, "num_heads": 4}}},
            "only init_args and head_dim are supported, received num_heads",
        ),
    ],
)
def test_what_is_not_of_the_form_is_named(entry, message):
    with pytest.raises(ConfigError, match=f"attention: .*{message}"):
        written_out(entry)


def test_layers_that_the_model_does_not_have_are_refused():
    with pytest.raises(
        ValueError, match="attention is set for layer 2, but the model has 2 layers"
    ):
        Transformer(LAYERS, num_layers=2, **SIZES)
    one = "attention is set for layers 1, 2, but the model has 1 layer, index 0"
    with pytest.raises(ValueError, match=one):
        Transformer(LAYERS, num_layers=1, **SIZES)
    with pytest.raises(ValueError, match="head_dim of a layer must be at least 1, received 0"):
        layer_factories(per_layer(softmax, None, {0: 0}), 1)
    (smallest,) = layer_factories(per_layer(softmax, None, {0: 1}), 1)
    assert smallest(8, head_dim=4).head_dim == 1
    with pytest.raises(ValueError, match="requires a model that indexes its layers"):
        LAYERS(8, head_dim=4)


@pytest.fixture
def command(tmp_path):
    """Return words of a run whose second layer has another number and size of heads."""
    path = tmp_path / "by_layers.yaml"
    short = {"default": MGK, "layers": {1: {"num_heads": 1, "head_dim": 6}}}
    path.write_text(yaml.safe_dump({"model": {"init_args": {"attention": short}}}))
    files = ["--task", str(ROOT / "configs/tasks/tiny/lra_text.yaml"), "--attention", str(path)]
    return [*files, "--run.root", str(tmp_path / "runs"), "--trainer.accelerator", "cpu"]


def assert_told_apart(stored):
    """Compare the written configuration with the layers of the command."""
    attention = stored["model"]["init_args"]["attention"]
    assert [attention_option(stored, name) for name in ("num_heads", "dropout")] == ["2/1", 0.0]
    assert {int(key): size for key, size in attention["init_args"]["head_dims"].items()} == {1: 6}


def test_a_command_takes_layers(command):
    assert_told_apart(printed_config(["fit", *command]))


@pytest.mark.slow
def test_a_run_is_trained_tested_and_told_apart(command, tmp_path):
    run(["fit", *command, "--trainer.max_steps", "2"])
    folder = only_version(tmp_path)
    assert folder.parent.name == "lra_text_tiny-by_layers"
    assert_told_apart(read_yaml(folder / "config.yaml"))
    run(["test", "--config", str(folder / "config.yaml"), "--ckpt_path", "last"])
    assert list(folder.glob("test-*.json"))
