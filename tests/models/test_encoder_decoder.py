"""The encoder-decoder against PyTorch's and Hugging Face's, its tables, masks, caches, start."""

from __future__ import annotations

import itertools
import math
from functools import partial

import pytest
import torch
from torch import nn

from lit_probattn.attention import (
    FiSHAttention,
    LinearAttention,
    MGKAttention,
    ReleasedLinearAttention,
    SoftmaxAttention,
)
from lit_probattn.models.encoder_decoder import EOS, PAD, EncoderDecoder
from lit_probattn.models.transformer import Transformer
from lit_probattn.randomness import RandomKey
from tests.attention.variants import examples, layers
from tests.support.slow import mostly_slow

B, S, T, C, E, H, MLP = 3, 11, 7, 12, 5, 2, 23
SOURCE_WORDS, WORDS, LONGEST = 17, 19, 29
VARIANTS = {**layers(), **examples()}
# One of each class, and options that reach caches or noise; the contract of layers has them all.
QUICK = {make.func: name for name, make in reversed(layers().items())}.values()
QUICK = [*QUICK, *("smgk", "hard_lfish")]
NAMES = RandomKey(5, step=3, sample_ids=torch.tensor([19, 4, 8]))


def factory(make):
    """What makes a variant of `VARIANTS` of any width and head size."""

    def made(embed_dim, *, head_dim, **overrides):
        options = {**make.keywords, **overrides, "head_dim": head_dim}
        return make.func(embed_dim, *make.args[1:], **options)

    return made


softmax = partial(SoftmaxAttention, num_heads=H)


def tiny(attention=softmax, **options):
    sizes = {"source_vocab_size": SOURCE_WORDS, "vocab_size": WORDS, "max_seq_len": LONGEST}
    sizes |= {"embed_dim": C, "head_dim": E, "mlp_dim": MLP}
    sizes |= {"num_encoder_layers": 2, "num_decoder_layers": 2}
    return EncoderDecoder(attention, **{**sizes, **options}).double().eval()


def moved(model):
    """The model with all weights off their start, and noise drawn at evaluation too."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.rand_like(parameter)
    for module in model.modules():
        if hasattr(module, "noise_at_eval"):
            module.noise_at_eval = True
    return model


def pairs():
    """Source and inputs with padding on the right, and their masks."""
    source, inputs = torch.randint(4, SOURCE_WORDS, (B, S)), torch.randint(4, WORDS, (B, T))
    source_mask = torch.arange(S) < torch.tensor([[S], [6], [9]])
    key_mask = torch.arange(T) < torch.tensor([[5], [T], [3]])
    inputs[:, 0] = EOS
    return (
        *(source.masked_fill(~source_mask, PAD), inputs.masked_fill(~key_mask, PAD)),
        *(source_mask, key_mask),
    )


def copy_attention(ours, theirs):
    """Give our layer the weights of `nn.MultiheadAttention`."""
    weights, biases = theirs.in_proj_weight.chunk(3), theirs.in_proj_bias.chunk(3)
    projections = (ours.query_proj, ours.key_proj, ours.value_proj)
    for proj, weight, bias in zip(projections, weights, biases, strict=True):
        proj.load_state_dict({"weight": weight, "bias": bias})
    ours.out_proj.load_state_dict(theirs.out_proj.state_dict())


def copy_block(ours, theirs):
    """Give our block the weights of PyTorch's layer of an encoder or decoder."""
    copy_attention(ours.attention, theirs.self_attn)
    ours.mlp.fc1.load_state_dict(theirs.linear1.state_dict())
    ours.mlp.fc2.load_state_dict(theirs.linear2.state_dict())
    ours.norm1.load_state_dict(theirs.norm1.state_dict())
    last = theirs.norm2
    if ours.cross_attention is not None:
        copy_attention(ours.cross_attention, theirs.multihead_attn)
        ours.norm_cross.load_state_dict(theirs.norm2.state_dict())
        last = theirs.norm3
    ours.norm2.load_state_dict(last.state_dict())


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equal_to_torch_transformer(norm_first, dtype):
    """Output and gradients of inputs and weights, with masks, for real tokens."""
    options = {"dropout": 0.0, "batch_first": True, "norm_first": norm_first, "dtype": dtype}
    theirs = nn.Transformer(H * E, H, 2, 2, MLP, **options)
    if not norm_first:  # fairseq has no norm after the last post-norm block
        theirs.encoder.norm = theirs.decoder.norm = None
    sizes = {"embed_dim": H * E, "head_dim": E, "num_layers": 2, "mlp_dim": MLP}
    sizes |= {"norm_first": norm_first, "activation": "relu"}
    encoder = Transformer(softmax, **sizes).to(dtype)
    decoder = Transformer(softmax, **sizes, cross_attention=softmax).to(dtype)
    for ours, stack in ((encoder, theirs.encoder), (decoder, theirs.decoder)):
        for block, layer in zip(ours.blocks, stack.layers, strict=True):
            copy_block(block, layer)
        if norm_first:
            ours.norm.load_state_dict(stack.norm.state_dict())
    _, _, source_mask, key_mask = pairs()
    source, inputs = torch.randn(B, S, H * E).to(dtype), torch.randn(B, T, H * E).to(dtype)
    cotangent = torch.randn(B, T, H * E).to(dtype) * key_mask[..., None]
    found, gradients = [], []
    for owner in ("ours", "theirs"):
        x, y = source.clone().requires_grad_(), inputs.clone().requires_grad_()
        if owner == "ours":
            memory = encoder(x, key_mask=source_mask)
            seen = {"memory": memory, "memory_mask": source_mask}
            out = decoder(y, is_causal=True, **seen)
            block = decoder.blocks[1]
            weights = [block.cross_attention.out_proj.weight, encoder.blocks[0].norm1.weight]
        else:
            out = theirs(
                *(x, y),
                src_key_padding_mask=~source_mask,
                memory_key_padding_mask=~source_mask,
                tgt_key_padding_mask=~key_mask,
                tgt_mask=torch.ones(T, T).triu(1).bool(),
            )
            layer = theirs.decoder.layers[1]
            weights = [layer.multihead_attn.out_proj.weight, theirs.encoder.layers[0].norm1.weight]
        found.append(out[key_mask])
        gradients.append(torch.autograd.grad((out * cotangent).sum(), [x, y, *weights]))
    bound = 1e-12 if dtype == torch.float64 else 1e-6
    torch.testing.assert_close(*found, rtol=bound, atol=bound)
    for ours, other in zip(*gradients, strict=True):
        largest = float(other.abs().max())
        torch.testing.assert_close(ours, other, rtol=bound, atol=bound * largest)


def written_out(length, width):
    """fairseq's table: position p of a token that counts from 2."""
    half = width // 2
    rates = [math.exp(-math.log(10000) * i / (half - 1)) for i in range(half)]
    return torch.tensor(
        [
            [f((p + 2) * rate) for f in (math.sin, math.cos) for rate in rates]
            for p in range(length)
        ],
        dtype=torch.float64,
    )


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
def test_embeddings_are_scaled_and_have_fairseqs_positions(positions):
    model = moved(tiny(positions=positions))
    source, inputs, *_ = pairs()
    seen = []
    for stack in (model.encoder, model.decoder):
        stack.blocks[0].register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    model(source, inputs)
    for ids, side, x in ((source, "source_", seen[0]), (inputs, "", seen[1])):
        tokens = getattr(model, f"{side}tokens").weight[ids] * C**0.5
        table = written_out(ids.shape[1], C)
        if positions == "learned":
            table = getattr(model, f"{side}positions").weight[: ids.shape[1]]
        torch.testing.assert_close(x, tokens + table, rtol=0, atol=1e-12)


@pytest.mark.parametrize("share", ["decoder", "none"])
def test_logits_are_products_with_the_output_table(share):
    model = moved(tiny(share=share))
    hidden = torch.randn(B, T, C).double()
    table = model.tokens.weight if share == "decoder" else model.output.weight
    torch.testing.assert_close(model.logits(hidden), hidden @ table.T, rtol=0, atol=1e-12)


def test_logits_call_their_own_output_layer():
    """An adapter around the layer, or a hook, takes part in the logits."""
    model, hidden = tiny(share="none"), torch.randn(B, T, C, dtype=torch.float64)
    plain = model.logits(hidden)
    model.output.register_forward_hook(lambda layer, inputs, out: out + 1)
    torch.testing.assert_close(model.logits(hidden), plain + 1)


def test_start_is_fairseqs():
    mgk = partial(MGKAttention, num_heads=2)
    model = tiny(mgk, embed_dim=128, head_dim=64, mlp_dim=256, vocab_size=997, positions="learned")
    for table in (model.tokens.weight, model.positions.weight, model.source_positions.weight):
        far = 5 / (2 * table.numel()) ** 0.5  # five standard errors
        assert float(table.detach().std()) == pytest.approx(128**-0.5, rel=far)
    assert not model.tokens.weight[PAD].any()
    layer = model.decoder.blocks[0].cross_attention
    for proj, gain in (
        *((proj, 0.5**0.5) for proj in (layer.query_proj, layer.key_proj, layer.value_proj)),
        (layer.out_proj, 1.0),
    ):
        limit = gain * (6 / sum(proj.weight.shape)) ** 0.5
        assert 0.97 * limit < float(proj.weight.detach().abs().max()) <= limit
    assert not layer.out_proj.bias.any()
    mlp = model.encoder.blocks[0].mlp.fc1
    assert 0.97 < float(mlp.weight.detach().abs().max()) * 128**0.5 <= 1.0
    fish = tiny(partial(FiSHAttention, num_heads=4, num_global_heads=2), embed_dim=128)
    mixing = fish.encoder.blocks[0].attention.core.mixing
    assert all(float(p.detach().abs().max()) <= 2**-0.5 for p in mixing.parameters())


@pytest.mark.parametrize("share", ["decoder", "all", "none"])
def test_shared_tables_are_one_parameter(share):
    model = tiny(share=share, source_vocab_size=WORDS)
    names = {name for name, p in model.named_parameters() if p.shape == (WORDS, C)}
    expected = {"decoder": {"tokens.weight", "source_tokens.weight"}, "all": {"tokens.weight"}}
    whole = {"tokens.weight", "source_tokens.weight", "output.weight"}
    assert names == expected.get(share, whole)
    assert {name for name in model.state_dict() if model.state_dict()[name].shape[0] == WORDS} == (
        names
    )
    source, inputs, *_ = pairs()
    model.logits(model(source, inputs)).logsumexp(-1).sum().backward()
    if share == "none":
        assert not model.tokens.weight.grad[PAD].any()
    else:  # as output words the padding's row learns
        assert model.tokens.weight.grad[PAD].any()


def test_each_attention_has_a_factory_and_one_default():
    kinds = {}

    def named(kind):
        def make(embed_dim, **options):
            layer = SoftmaxAttention(embed_dim, H, **options)
            kinds[layer] = kind
            return layer

        return make

    model = tiny(named("all"), cross_attention=named("cross"), decoder_attention=named("decoder"))
    for block in model.encoder.blocks:
        assert kinds[block.attention] == "all"
    for block in model.decoder.blocks:
        assert (kinds[block.attention], kinds[block.cross_attention]) == ("decoder", "cross")
    assert all(layer.head_dim == E and layer.use_bias for layer in kinds)
    assert len(kinds) == 6


def test_dropouts_that_are_not_named_are_those_of_fairseqs_recipe():
    """IWSLT'14: 0.3 behind layers, none inside attention and MLP."""
    sizes = {"source_vocab_size": SOURCE_WORDS, "vocab_size": WORDS, "max_seq_len": LONGEST}
    model = EncoderDecoder(softmax, **sizes, embed_dim=C, head_dim=E, mlp_dim=MLP)
    blocks = [*model.encoder.blocks, *model.decoder.blocks]
    assert {block.mlp.dropout1.p for block in blocks} == {0.0}
    assert {block.attention.dropout for block in blocks} == {0.0}
    assert {block.cross_attention.dropout for block in model.decoder.blocks} == {0.0}
    assert {block.dropout.p for block in blocks} | {model.dropout.p} == {0.3}


def test_dropouts_are_where_they_are_named():
    model = tiny(dropout=0.31, activation_dropout=0.17, attention_dropout=0.07)
    blocks = [*model.encoder.blocks, *model.decoder.blocks]
    assert {block.mlp.dropout1.p for block in blocks} == {0.17}
    assert {block.mlp.dropout2.p for block in blocks} == {0.31}
    assert {block.dropout.p for block in blocks} | {model.dropout.p} == {0.31}
    assert {block.attention.dropout for block in blocks} == {0.07}
    kept = tiny(partial(softmax, dropout=0.23, bias=False), attention_dropout=None)
    assert kept.decoder.blocks[0].cross_attention.dropout == 0.23
    free = tiny(partial(softmax, bias=False), attention_bias=None)
    assert free.decoder.blocks[0].cross_attention.key_proj.bias is None


def test_draws_of_all_attentions_differ_and_repeat():
    model = tiny(dropout=0.0, attention_dropout=0.5).train()
    drawn = {}
    for name, module in model.named_modules():
        if isinstance(module, SoftmaxAttention):
            module.core.register_forward_pre_hook(
                lambda _, given, name=name: drawn.__setitem__(name, given[0].dropout.key.layer)
            )
    source, inputs, *_ = pairs()
    first = model(source, inputs, rng=NAMES)
    assert len(drawn) == len(set(drawn.values())) == 6
    assert torch.equal(model(source, inputs, rng=NAMES), first)
    other = RandomKey(6, step=3, sample_ids=NAMES.sample_ids)
    assert not torch.equal(model(source, inputs, rng=other), first)


@pytest.mark.parametrize("name", mostly_slow(VARIANTS, QUICK))
def test_padding_and_caches_change_nothing(name):
    """Padding of both sides; tokens in parts through the state, rows taken by `reorder`."""
    model = moved(tiny(factory(VARIANTS[name])))
    source, inputs, source_mask, key_mask = pairs()
    whole = model(source, inputs, source_mask=source_mask, key_mask=key_mask, rng=NAMES)
    for row in range(B):
        mine = RandomKey(5, step=3, sample_ids=NAMES.sample_ids[row : row + 1])
        one = slice(row, row + 1)
        long, short = int(source_mask[row].sum()), int(key_mask[row].sum())
        alone = model(source[one, :long], inputs[one, :short], rng=mine)
        torch.testing.assert_close(whole[one, :short], alone, rtol=0, atol=1e-11)
    full = model(source, inputs, source_mask=source_mask, rng=NAMES)
    with torch.no_grad():
        state = model.new_state(model.encode(source, source_mask, NAMES), source_mask, 2)
        parts = [
            model.decode(inputs[:, first:last], state=state, rng=NAMES)
            for first, last in ((0, 1), (1, 2), (2, 4))
        ]
        torch.testing.assert_close(torch.cat(parts, 1), full[:, :4], rtol=0, atol=1e-11)
        rows = torch.tensor([2, 0, 0, 1])
        state.reorder(rows)
        named = RandomKey(5, step=3, sample_ids=NAMES.sample_ids[rows])
        rest = model.decode(inputs[rows, 4:], state=state, rng=named)
        torch.testing.assert_close(rest, full[rows, 4:], rtol=0, atol=1e-11)
    assert state.length == T


def test_state_projects_the_memory_once_and_linear_states_do_not_grow():
    calls = {"key_proj": 0}
    for attention, grows in ((softmax, True), (partial(LinearAttention, num_heads=H), False)):
        model = tiny(attention)
        layer = model.decoder.blocks[0].cross_attention
        calls["key_proj"] = 0
        layer.key_proj.register_forward_hook(
            lambda *_: calls.__setitem__("key_proj", calls["key_proj"] + 1)
        )
        source, inputs, source_mask, _ = pairs()
        with torch.no_grad():
            state = model.new_state(model.encode(source, source_mask), source_mask)
            sizes = []
            for step in range(T):
                model.decode(inputs[:, step : step + 1], state=state)
                sizes.append(state.num_bytes)
        assert calls["key_proj"] == 1
        per_token = 2 * B * H * 2 * E * 8 if grows else 0
        assert {after - before for before, after in itertools.pairwise(sizes)} == {per_token}


def test_reorder_with_the_same_sources_keeps_memories():
    model = tiny()
    source, _, source_mask, _ = pairs()
    with torch.no_grad():
        state = model.new_state(model.encode(source, source_mask), source_mask)
        before = state.memories[0].cache.read()[0]
        state.reorder(torch.tensor([1, 0, 2]), same_sources=True)
        assert torch.equal(state.memories[0].cache.read()[0], before)
        state.reorder(torch.tensor([1, 0, 2]))
        assert torch.equal(state.memories[0].cache.read()[0], before[[1, 0, 2]])


def test_memories_of_large_keys_keep_their_scale():
    """Random features of keys far from 0 are tiny: exp(−‖k‖²/2) without their common factor."""
    layer = LinearAttention(C, 2, feature_map="favor").double().eval()
    with torch.no_grad():
        layer.key_proj.weight *= 200.0
        memory, x = torch.randn(B, S, C).double(), torch.randn(B, T, C).double()
        expected = layer(x, memory)
        kept = layer.remember(memory)
        assert kept.cache.log_scale.max() < -750  # exp(−746) is 0
        torch.testing.assert_close(layer(x, memory=kept), expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        (partial(softmax, rotary_dim=4), r"cannot rotate by positions of two .*set rotary_dim=0"),
        (
            partial(ReleasedLinearAttention, num_heads=H, denominator="sqrt_len"),
            r"\(denominator=sqrt_len\): set padded_len",
        ),
    ],
)
def test_attention_without_cross_attention_is_refused(attention, message):
    with pytest.raises(
        ValueError, match=f"Attention does not support cross-attention: it .*{message}"
    ):
        tiny(attention)
    assert tiny(attention, cross_attention=softmax).decoder.is_decoder


def test_bad_sizes_are_refused():
    model = tiny()
    source, inputs, *_ = pairs()
    long = torch.full((B, LONGEST + 1), 5)
    with pytest.raises(ValueError, match="a source of 30 tokens: max_seq_len is 29"):
        model(long, inputs)
    with pytest.raises(ValueError, match="a target of 30 tokens: max_seq_len is 29"):
        model(source, long)
    with pytest.raises(
        ValueError, match=r"share=all requires one vocabulary, received .*=17 and .*19"
    ):
        tiny(share="all")
    with pytest.raises(ValueError, match="vocab_size must exceed the 4 special tokens"):
        tiny(vocab_size=4)
    with pytest.raises(ValueError, match="a decoder requires an encoder memory"):
        model.decode(inputs)
    with pytest.raises(ValueError, match="these blocks have no cross-attention"):
        model.encoder(torch.zeros(1, 3, C).double(), memory=torch.zeros(1, 3, C).double())
    layer = model.decoder.blocks[0].cross_attention
    memory, x = layer.remember(torch.randn(2, 5, C).double()), torch.randn(2, 3, C).double()
    with pytest.raises(
        ValueError, match="memory contains all keys to attend to; received also key"
    ):
        layer(x, x, memory=memory)
    with pytest.raises(ValueError, match="received also is_causal"):
        layer(x, is_causal=True, memory=memory)
    with pytest.raises(ValueError, match="query has batch size 1 and the memory 2"):
        layer(x[:1], memory=memory)


def test_checkpointing_changes_no_gradient():
    source, inputs, source_mask, key_mask = pairs()
    found = []
    for checkpointing in (False, True):
        torch.manual_seed(3)
        options = {"dropout": 0.0, "attention_dropout": 0.2}
        model = tiny(**options, activation_checkpointing=checkpointing).train()
        out = model(source, inputs, source_mask=source_mask, key_mask=key_mask, rng=NAMES)
        out.square().sum().backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(found[0]) == len(found[1]) > 50
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def copy_hugging(ours, theirs):
    """Give our block the weights of Hugging Face's layer."""
    named = [(ours.attention, theirs.self_attn)]
    if ours.cross_attention is not None:
        named.append((ours.cross_attention, theirs.encoder_attn))
        ours.norm_cross.load_state_dict(theirs.encoder_attn_layer_norm.state_dict())
    for layer, other in named:
        parts = zip(("query", "key", "value", "out"), ("q", "k", "v", "out"), strict=True)
        for mine, name in parts:
            state = getattr(other, f"{name}_proj").state_dict()
            getattr(layer, f"{mine}_proj").load_state_dict(state)
    ours.mlp.fc1.load_state_dict(theirs.fc1.state_dict())
    ours.mlp.fc2.load_state_dict(theirs.fc2.state_dict())
    ours.norm1.load_state_dict(theirs.self_attn_layer_norm.state_dict())
    ours.norm2.load_state_dict(theirs.final_layer_norm.state_dict())


def test_equal_to_hugging_face_marian():
    """Logits and gradients of a whole model, from token ids, under copied weights."""
    transformers = pytest.importorskip("transformers")
    config = transformers.MarianConfig(
        vocab_size=WORDS,
        max_position_embeddings=LONGEST,
        d_model=C,
        **{"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": MLP},
        **{"decoder_ffn_dim": MLP, "encoder_attention_heads": H, "decoder_attention_heads": H},
        **{"activation_function": "relu", "scale_embedding": True, "pad_token_id": PAD},
        **{"eos_token_id": EOS, "decoder_start_token_id": EOS, "dropout": 0.0},
    )
    torch.manual_seed(0)
    theirs = transformers.MarianMTModel(config).double().eval()
    ours = tiny(source_vocab_size=WORDS, share="all", head_dim=C // H, positions="learned")
    base = theirs.model
    ours.tokens.load_state_dict(base.shared.state_dict())
    for place, stack, other in (
        (ours.source_positions, ours.encoder, base.encoder),
        (ours.positions, ours.decoder, base.decoder),
    ):
        place.load_state_dict(other.embed_positions.state_dict())
        for block, layer in zip(stack.blocks, other.layers, strict=True):
            copy_hugging(block, layer)
    source, inputs, source_mask, key_mask = pairs()
    expected = theirs(
        input_ids=source,
        attention_mask=source_mask.long(),
        decoder_input_ids=inputs,
        decoder_attention_mask=key_mask.long(),
    ).logits
    hidden = ours(source, inputs, source_mask=source_mask, key_mask=key_mask)
    found = ours.logits(hidden)
    torch.testing.assert_close(found[key_mask], expected[key_mask], rtol=0, atol=1e-12)
    cotangent = torch.randn(*found.shape).double() * key_mask[..., None]
    weights = [ours.tokens.weight, ours.decoder.blocks[0].cross_attention.key_proj.weight]
    others = [base.shared.weight, base.decoder.layers[0].encoder_attn.k_proj.weight]
    a = torch.autograd.grad((found * cotangent).sum(), weights)
    b = torch.autograd.grad((expected * cotangent).sum(), others)
    for mine, other in zip(a, b, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)
