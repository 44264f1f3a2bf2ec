"""Swapping in Hugging Face transformers: random tiny models, nothing is downloaded."""

from __future__ import annotations

import copy
import fnmatch
import itertools
import json
import pickle
import sys
import types

import pytest
import torch

import lit_probattn
from lit_probattn.interop.swap import interface
from lit_probattn.interop.swap.interface import NAME
from tests.interop.swap.checks import (
    TIGHT,
    assert_same_model,
    assert_trains_in_one_graph,
    make_pairs_equal,
    swapped,
)
from tests.interop.swap.models import randomised
from tests.interop.swap.table import (
    HF_VIT,
    HOSTS,
    SIZES,
    WINDOWS,
    with_memory,
    words,
    writer,
)
from tests.support.slow import mostly_slow

T = pytest.importorskip("transformers", reason="transformers is not installed")

# More key heads than those of the table, so that there is a choice of which to join.
GROUPED = {**SIZES, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}


def bert_with_memory():
    """An encoder and a decoder of BERT, with cross-attention."""
    decoder = T.BertConfig(is_decoder=True, add_cross_attention=True, **SIZES)
    config = T.EncoderDecoderConfig.from_encoder_decoder_configs(T.BertConfig(**SIZES), decoder)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    return with_memory(T.EncoderDecoderModel(config=config))


MODELS = {
    **{name: HOSTS[name] for name in ("BERT", "RoBERTa", "transformers ViT", "GPT-2", "T5")},
    "GPT-2, scale by layer": lambda: writer("GPT2", **SIZES, scale_attn_by_inverse_layer_idx=True),
    "Llama": lambda: writer("Llama", **GROUPED),
    "Qwen 2": lambda: writer("Qwen2", **GROUPED),
    "Qwen 3": lambda: writer("Qwen3", **GROUPED),
    "Mistral": lambda: writer("Mistral", sliding_window=4, **GROUPED),
    "Gemma 3": lambda: writer("Gemma3Text", **{**GROUPED, **WINDOWS}),
    "BERT with memory": bert_with_memory,
}
ENCODERS = ("BERT", "RoBERTa", "transformers ViT")
NORMED = ("Qwen 3", "Gemma 3")
WITH_MEMORY = ("T5", "BERT with memory")
WRITERS = [name for name in MODELS if name not in ENCODERS]
LAYERS = {"T5": 6, "BERT with memory": 6}


def case(name):
    torch.manual_seed(0)
    host = MODELS[name]()
    return randomised(host.model), host.output


# Another model of the table has the same masks, norms and positions.
OTHERWISE = ("BERT", "RoBERTa", "GPT-2", "Llama", "Qwen 2")


@pytest.mark.parametrize(
    ("variant", "name"),
    mostly_slow(
        itertools.product(["softmax", "mgk"], MODELS),
        [
            *(("softmax", "GPT-2"), ("softmax", "T5")),
            *(("mgk", name) for name in MODELS if name not in OTHERWISE),
        ],
    ),
)
def test_the_model_stays_the_same_function(name, variant):
    """Padding, causality and windows too: a lost mask would change the real tokens."""
    model, call = case(name)
    new, report = swapped(model, variant, spread=0.0, example=call)
    assert len(report.layers) == LAYERS.get(name, 2)
    assert all(layer.swapped and layer.error < 1e-12 for layer in report.layers)
    assert new.config._attn_implementation == NAME
    # The library's norms of queries and keys compute in float32, whatever the model's dtype.
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if name in NORMED else TIGHT
    assert_same_model(model, new, call, tolerance, report)


@pytest.mark.parametrize(
    "name",
    mostly_slow(
        [n for n in MODELS if n not in NORMED],
        ["GPT-2, scale by layer", "Mistral", "T5"],
    ),
)
def test_joining_equal_heads_loses_nothing(name):
    """Half the heads, with rotary positions and grouped queries too."""
    model, call = case(name)
    make_pairs_equal(model, call, [(0, 3), (1, 2)])
    for module in model.modules():  # T5: one table of positions for each head
        if hasattr(module, "relative_attention_bias"):
            table = module.relative_attention_bias.weight.data
            table.copy_(table[:, :1].expand_as(table))
    new, report = swapped(model, "mgk", example=call, heads=0.5)
    grouped = report.layers[0].heads[0] == 8
    pairs = [[0, 6], [1, 7], [2, 4], [3, 5]] if grouped else [[0, 3], [1, 2]]
    assert [layer.groups for layer in report.layers] == [pairs] * len(report.layers)
    torch.testing.assert_close(call(new), call(model), rtol=1e-7, atol=1e-7)


CACHES = {
    "dynamic": {"use_cache": True},
    "static": {"cache_implementation": "static"},
    "beams": {"num_beams": 3},
}


# Every family of masks and caches once, heads kept or joined.
WRITING = {"GPT-2": 1.0, "Qwen 3": 0.5, "Mistral": 1.0, "Gemma 3": 0.5}
WRITING |= {"BERT with memory": 1.0}


@pytest.mark.parametrize(
    ("name", "heads"), mostly_slow(itertools.product(WRITERS, [1.0, 0.5]), WRITING.items())
)
def test_generate_with_a_cache_is_generate_without(name, heads):
    model, _ = case(name)
    given = words(left=name not in WITH_MEMORY)

    def write(m, **options):
        lengths = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
        more = {"output_logits": True, "return_dict_in_generate": True, "pad_token_id": 0}
        return m.generate(**given, **lengths, **more, **options)

    new, _ = swapped(model, "mgk", heads=heads, spread=0.0)
    plain = write(new, use_cache=False)
    if heads == 1.0:
        assert torch.equal(plain.sequences, write(model).sequences)
    for kind, options in CACHES.items():
        expected = plain
        if kind == "beams":
            expected = write(new, use_cache=False, **options)
        elif kind == "static" and name == "BERT with memory":
            continue  # the library has none for it
        found = write(new, **options)
        assert torch.equal(found.sequences, expected.sequences), kind
        for one, other in zip(found.logits, expected.logits, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)  # logits are float32


def test_what_a_cache_holds_is_what_the_report_says():
    model, _ = case("Llama")
    new, report = swapped(model, "mgk", heads=0.5)
    ids = words(left=True)["input_ids"]
    for each, which in ((model, 0), (new, 1)):
        cache = each(input_ids=ids, use_cache=True).past_key_values
        layer = cache.layers[0]
        held = layer.keys.nbytes + layer.values.nbytes
        assert held == ids.numel() * report.layers[0].cache_bytes[which]
    assert layer.keys.shape == (2, 2, 9, 16)
    assert layer.values.shape == (2, 2, 9, 8)


def test_maps_are_returned_where_they_are_asked_for():
    model, _ = case("BERT")
    model.set_attn_implementation("eager")
    new, _ = swapped(model, "mgk", spread=0.0)
    given = words(left=True)
    maps = [m(**given, output_attentions=True).attentions for m in (model, new)]
    assert len(maps[0]) == len(maps[1]) == 2
    for before, after in zip(*maps, strict=True):
        real = given["attention_mask"][:, None, :, None].bool().expand_as(before)
        torch.testing.assert_close(after[real], before[real], **TIGHT)


@pytest.mark.parametrize("other", ["eager", "sdpa"])
def test_another_attention_function_after_a_swap_is_refused(other):
    """It would compute the attention of before the swap, with the weights of after it."""
    model, call = case("BERT")
    new, _ = swapped(model, "smgk", example=call)
    expected = call(new)
    new.set_attn_implementation(other)
    with pytest.raises(RuntimeError, match=f"{other}.*{NAME}"):
        call(new)
    with pytest.raises(RuntimeError, match=other):
        call(pickle.loads(pickle.dumps(new)))
    new.set_attn_implementation(NAME)
    torch.testing.assert_close(call(new), expected)


PACKED = (5, 1, 8, 4)  # lengths of the documents of one row


@pytest.mark.parametrize(
    ("name", "which"),
    mostly_slow(
        itertools.product(["Llama", "Mistral", "Gemma 3", "BERT"], ["all", "first"]),
        [("Llama", "all"), ("Mistral", "first"), ("Gemma 3", "all"), ("BERT", "first")],
    ),
)
def test_packed_documents_do_not_see_each_other(name, which):
    """Bounds without positions: every document as alone, in swapped layers and in kept ones.

    Positions are without effect, as the host counts them by the row and rotates in float32.
    """
    model, _ = case(name)
    for position, tensor in (*model.named_buffers(), *model.named_parameters()):
        if "inv_freq" in position or "position_embeddings" in position:
            tensor.detach().zero_()
    names = [n for n, _ in model.named_modules()]
    first = [p for p in ("*layers.0.*", "*layer.0.*") if fnmatch.filter(names, p)]
    layers = first if which == "first" else None
    new, _ = swapped(model, "mgk", layers=layers)
    ids = torch.randint(3, 53, (1, sum(PACKED)))
    bounds = torch.tensor([0, *PACKED], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    both = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 8, "max_length_k": 8}
    with torch.no_grad():
        packed = new(input_ids=ids, use_cache=False, **both).logits
        alone = [new(input_ids=one, use_cache=False).logits for one in ids.split(PACKED, 1)]
        torch.testing.assert_close(packed, torch.cat(alone, 1), **TIGHT)
        rows = new(input_ids=ids.reshape(2, 9), use_cache=False, **row_bounds()).logits
        first = new(input_ids=ids[:, :9], use_cache=False, **row_bounds(9)).logits
        torch.testing.assert_close(rows[:1], first, **TIGHT)


def test_documents_are_regrouped_where_bounds_alone_keep_them_apart(monkeypatch):
    """Without the library's own mask there is none of ours: time goes with squared lengths."""
    monkeypatch.setattr(interface, "documents_mask", pytest.fail)
    model, _ = case("Llama")
    new, _ = swapped(model, "mgk")
    ids = torch.randint(3, 53, (1, 9))
    assert new(input_ids=ids, use_cache=False, **row_bounds(9)).logits.isfinite().all()


def row_bounds(*tokens):
    """Bounds of documents of 4 and 5 tokens, in one row or in two."""
    bounds = torch.tensor([0, 4, 9] if tokens else [0, 4, 9, 13, 18], dtype=torch.int32)
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}


def test_bounds_that_are_not_those_of_the_tokens_are_refused():
    model, _ = case("Llama")
    new, _ = swapped(model, "mgk")
    ids = torch.randint(3, 53, (1, 9))
    wrong = torch.tensor([0, 4, 8], dtype=torch.int32)
    with pytest.raises(ValueError, match="cu_seq_lens_q ends at 8, expected 9"):
        new(input_ids=ids, cu_seq_lens_q=wrong, cu_seq_lens_k=wrong)
    right = torch.tensor([0, 4, 9], dtype=torch.int32)
    cache = new(input_ids=ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="cu_seq_lens_k ends at 9, expected 18"):
        new(input_ids=ids, past_key_values=cache, cu_seq_lens_q=right, cu_seq_lens_k=right)


def test_some_layers_can_be_left():
    model, call = case("Llama")
    new, report = swapped(model, "mgk", layers=["model.layers.0.*"], spread=0.0)
    assert [layer.swapped for layer in report.layers] == [True, False]
    assert_same_model(model, new, call, report=report)
    # The other one later: the function is registered, and a core is what marks a layer.
    more, second = lit_probattn.swap(new, "mgk", layers=["model.layers.1.*"], spread=0.0)
    assert [layer.name for layer in second.swapped] == ["model.layers.1.self_attn"]
    second.recipe["layers"].update(report.recipe["layers"])
    assert_same_model(model, more, call, report=second)
    with pytest.raises(ValueError, match="it is swapped already"):
        lit_probattn.swap(more)


def test_normed_keys_start_exact_with_gaussian_scores():
    model, call = case("Qwen 3")
    for name, parameter in model.named_parameters():
        if name.endswith("k_norm.weight"):
            torch.nn.init.ones_(parameter)
    new, _ = swapped(model, "mgk", spread=0.0, score="gaussian")
    # The norm is that of x / √(mean x² + 1e-6): equal but for the 1e-6.
    torch.testing.assert_close(call(new), call(model), rtol=1e-4, atol=1e-4)


def test_what_would_be_lost_is_refused_by_name():
    model = T.Gemma2ForCausalLM(T.Gemma2Config(**GROUPED))
    with pytest.raises(ValueError, match="soft cap") as error:
        lit_probattn.swap(model)
    assert "2 of 2" in str(error.value)
    assert "model.layers.1.self_attn (Gemma2Attention)" in str(error.value)
    capped = T.Gemma2ForCausalLM(T.Gemma2Config(attn_logit_softcapping=None, **GROUPED))
    capped.model.layers[1].self_attn.attn_logit_softcapping = 30.0
    with pytest.raises(ValueError, match="1 of 2 attention layers cannot be swapped"):
        lit_probattn.swap(capped)
    assert capped.config._attn_implementation != NAME


@pytest.mark.parametrize("name", mostly_slow(["BERT", "GPT-2", "Llama", "T5"], ["GPT-2"]))
def test_a_saved_model_loads_again(name, tmp_path):
    model, call = case(name)
    model, report = lit_probattn.swap(model, "mgk", heads=0.5, seed=3)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    recipe = json.loads(json.dumps(report.recipe))
    torch.manual_seed(2)
    fresh, _ = lit_probattn.swap(randomised(MODELS[name]().model), recipe)
    fresh.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    assert torch.equal(call(fresh), call(model))
    assert torch.equal(call(copy.deepcopy(model)), call(model))


def test_reading_a_pickled_model_registers_our_functions(tmp_path, monkeypatch):
    model, _ = case("GPT-2")
    model, _ = lit_probattn.swap(model, "mgk")
    ids = words(left=True)["input_ids"]
    expected = model(ids).logits
    torch.save(model, tmp_path / "model.pt")
    for kind in (T.AttentionInterface, T.AttentionMaskInterface):
        monkeypatch.delitem(kind._global_mapping, NAME)
    read = torch.load(tmp_path / "model.pt", weights_only=False)
    assert torch.equal(read(ids).logits, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["BERT", "GPT-2", "Llama"])
def test_one_graph_when_compiled(name):
    model, call = case(name)
    model, _ = lit_probattn.swap(model, "mgk", heads=0.5)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(call(compiled), call(model), **TIGHT)


@pytest.mark.slow
@pytest.mark.parametrize("heads", [1.0, 0.5])
def test_training_with_attention_dropout_is_one_graph(heads):
    torch.manual_seed(0)
    model = randomised(T.LlamaModel(T.LlamaConfig(attention_dropout=0.3, **GROUPED)))
    model, _ = lit_probattn.swap(model, "mgk", heads=heads)
    ids = words(left=True)["input_ids"]
    assert_trains_in_one_graph(model.train(), lambda m: m(ids, use_cache=False).last_hidden_state)


def test_training_with_dropout_and_checkpointing():
    """Attention dropout of the config runs in our core; recomputation draws the same."""
    config = T.LlamaConfig(attention_dropout=0.3, **GROUPED)
    model = randomised(T.LlamaForCausalLM(config))
    model, _ = lit_probattn.swap(model, "mgk", heads=0.5)
    ids = words(left=True)["input_ids"]
    assert torch.equal(model(ids).logits, model(ids).logits)
    model.train()
    found = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        torch.manual_seed(4)
        output = model(ids, use_cache=False).logits
        output.square().mean().backward()
        found.append((output.detach(), [p.grad.clone() for p in model.parameters()]))
    assert not torch.equal(found[0][0], model(ids).logits)
    torch.testing.assert_close(found[1], found[0], **TIGHT)


def bigbird_pegasus():
    sizes = {"vocab_size": 53, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    wide = {"encoder_ffn_dim": 41, "decoder_ffn_dim": 41, "max_position_embeddings": 64}
    options = {"attention_type": "original_full", "pad_token_id": 0}
    return T.BigBirdPegasusModel(T.BigBirdPegasusConfig(**sizes, **heads, **wide, **options))


def git():
    seen = {**HF_VIT, "image_size": 16, "patch_size": 8}
    return T.GitModel(T.GitConfig(vision_config=seen, **SIZES))


@pytest.mark.parametrize("make", [bigbird_pegasus, git])
def test_layers_that_add_their_masks_get_masks_to_add(make):
    """Of models with eager attention only: true and false would be added as 1 and 0."""
    host = randomised(make().eval())
    tokens = torch.randint(3, 53, (2, 9))
    call = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    call["attention_mask"][1, 5:] = 0
    if host.config.is_encoder_decoder:
        call["decoder_input_ids"] = tokens[:, :6]
    expected = host(**call).last_hidden_state
    new, _ = lit_probattn.swap(copy.deepcopy(host), "softmax", example=call, written_out=True)
    found = new(**call).last_hidden_state
    real = call["attention_mask"].bool() if found.shape[1] == 9 else slice(None)
    torch.testing.assert_close(found[real], expected[real], **TIGHT)
    assert host.config._attn_implementation == "eager"


def test_arguments_that_the_hosts_function_reads_by_name_are_not_lost(monkeypatch):
    def eager(module, query, key, value, attention_mask, scaling=1.0, slopes=None, **kwargs): ...

    host = types.ModuleType("host_with_slopes")
    host.eager_attention_forward = eager
    monkeypatch.setitem(sys.modules, host.__name__, host)
    module = type("Attention", (torch.nn.Module,), {"__module__": host.__name__})()
    passed = {"scaling": 0.5, "position_ids": torch.arange(3), "slopes": None}
    assert interface.lost_argument(module, passed) == ""
    assert "'slopes'" in interface.lost_argument(module, {**passed, "slopes": torch.ones(4)})
    assert "sinks" in interface.lost_argument(module, {"sinks": torch.ones(4)})


def test_sparse_attention_is_refused():
    """Its indexer hides keys in a mask for the library's functions alone."""
    sizes = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
    sizes |= {"v_head_dim": 8, "head_dim": 8, "index_n_heads": 2, "index_head_dim": 16}
    experts = {"num_key_value_heads": 4, "mlp_layer_types": ["dense", "dense"]}
    config = T.DeepseekV32Config(index_topk=4, **sizes, **experts, **SIZES)
    host = T.DeepseekV32Model(config).eval()
    call, before = {"input_ids": torch.randint(3, 53, (2, 9))}, host.config._attn_implementation
    with pytest.raises(ValueError, match="it selects its keys"):
        lit_probattn.swap(host, "softmax", example=call)
    assert host.config._attn_implementation == before


@pytest.mark.parametrize("kept", [1, 3])
def test_the_last_logits_alone_are_those_of_the_whole(kept):
    """Gemma 4 cuts the queries of its last layers off, and with them the rows of the masks."""
    sizes = {"global_head_dim": 8, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2}
    sizes |= {"vocab_size_per_layer_input": 64, **GROUPED, "num_hidden_layers": 4}
    sizes |= {**WINDOWS, "layer_types": WINDOWS["layer_types"] * 2}
    torch.manual_seed(0)
    host = randomised(T.Gemma4ForCausalLM(T.Gemma4TextConfig(**sizes)))
    call = {"input_ids": torch.randint(3, 53, (2, 9)), "use_cache": False}
    new, _ = lit_probattn.swap(copy.deepcopy(host), "softmax", example=call)
    expected = host(**call).logits[:, -kept:]
    torch.testing.assert_close(new(**call, logits_to_keep=kept).logits, expected, **TIGHT)
