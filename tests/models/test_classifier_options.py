"""Options of the authors' Long Range Arena models: class token, fixed positions, tied layers."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch.nn import functional as F

from lit_probattn.attention import MGKAttention, SoftmaxAttention
from lit_probattn.models.classifiers import Classifier, PairClassifier
from lit_probattn.models.decoding import generate
from lit_probattn.models.embeddings import SineTable, TokenEmbedding
from lit_probattn.models.language_model import LanguageModel
from lit_probattn.models.masked_language_model import MaskedLanguageModel
from lit_probattn.models.per_layer import per_layer
from lit_probattn.models.transformer import Transformer
from lit_probattn.randomness import RandomKey
from tests.support.by_hand import attend, layer_norm, mlp

VOCAB, CLASSES, LONGEST, WIDTH, HEAD, INNER = 19, 5, 13, 10, 7, 11
SIZES = {"vocab_size": VOCAB, "max_seq_len": LONGEST, "embed_dim": WIDTH, "head_dim": HEAD}
SIZES |= {"num_layers": 3, "mlp_dim": INNER}
BLOCK = {"embed_dim": WIDTH, "head_dim": HEAD, "mlp_dim": INNER}
softmax = partial(SoftmaxAttention, num_heads=3)


def classifier(made=Classifier, **options):
    torch.manual_seed(1)
    model = made(softmax, num_classes=CLASSES, **SIZES, dropout=0.0, **options)
    return model.double()


def tokens():
    inputs, mask = torch.randint(1, VOCAB, (2, 11)), torch.ones(2, 11, dtype=torch.bool)
    mask[1, 6:] = False
    return inputs, mask


def encode(model, x, mask, blocks):
    for block in blocks:
        normed = layer_norm(x, block.norm1)
        x = x + attend(block.attention, normed, normed, ~mask[:, None])
        x = x + mlp(block.mlp, layer_norm(x, block.norm2), F.gelu)
    return layer_norm(x, model.encoder.norm) * mask[..., None]


def fixed(length):
    """Sines and cosines by turns, as the code's `fixed_pos_emb` makes them."""
    table = torch.zeros(length, WIDTH, dtype=torch.float64)
    for position in range(length):
        for i in range(0, WIDTH, 2):
            angle = position * math.exp(i * -(math.log(10000.0) / WIDTH))
            table[position, i], table[position, i + 1] = math.sin(angle), math.cos(angle)
    return table


def oracle(model, inputs, mask, *, cls, sinusoidal, tied):
    x = model.embedding.tokens.weight[inputs]
    if cls:
        front = model.embedding.class_token.expand(len(inputs), 1, WIDTH)
        x = torch.cat([front, x], 1)
        mask = torch.cat([torch.ones(len(mask), 1, dtype=torch.bool), mask], 1)
    count = x.shape[1]
    x = x + (fixed(count) if sinusoidal else model.embedding.positions.weight[:count])
    blocks = [model.encoder.blocks[0]] * 3 if tied else list(model.encoder.blocks)
    x = encode(model, x, mask, blocks)
    pooled = x[:, 0] if cls else x.sum(1) / LONGEST
    head = model.head
    hidden = F.linear(pooled, head.fc1.weight, head.fc1.bias).clamp_min(0)
    return F.linear(hidden, head.fc2.weight, head.fc2.bias)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"pooling": "cls"}, {"cls": True, "sinusoidal": False, "tied": False}),
        ({"positions": "sinusoidal"}, {"cls": False, "sinusoidal": True, "tied": False}),
        ({"share_layers": True}, {"cls": False, "sinusoidal": False, "tied": True}),
        (
            {"pooling": "cls", "positions": "sinusoidal", "share_layers": True},
            {"cls": True, "sinusoidal": True, "tied": True},
        ),
    ],
)
def test_it_equals_the_model_written_out(options, expected):
    model, (inputs, mask) = classifier(**options), tokens()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    logits = model(inputs, key_mask=mask)
    wanted = oracle(model, inputs, mask, **expected)
    torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-12)
    weight, parameters = torch.randn_like(logits), list(model.parameters())
    found, other = (
        torch.autograd.grad((out * weight).sum(), parameters) for out in (logits, wanted)
    )
    for a, b in zip(found, other, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


# ---- class token -------------------------------------------------------------------------------
def test_padding_changes_nothing_and_an_empty_sequence_has_its_class_token():
    model, (inputs, mask) = classifier(pooling="cls"), tokens()
    short = model(inputs, key_mask=mask)
    longer = F.pad(inputs, (0, 2)), F.pad(mask, (0, 2))
    torch.testing.assert_close(model(longer[0], key_mask=longer[1]), short, rtol=0, atol=1e-13)
    empty = torch.zeros_like(mask)
    assert bool(model(inputs, key_mask=empty).isfinite().all())
    whole = torch.ones(2, 11, dtype=torch.bool)
    assert torch.equal(model(inputs), model(inputs, key_mask=whole))


def test_the_longest_sequence_has_room_for_the_class_token():
    model = classifier(pooling="cls")
    assert model.embedding.positions.weight.shape[0] == LONGEST + 1
    assert model(torch.ones(2, LONGEST, dtype=torch.int64)).shape == (2, CLASSES)
    with pytest.raises(ValueError, match=f"length {LONGEST + 1}: max_seq_len is {LONGEST}"):
        model(torch.ones(2, LONGEST + 1, dtype=torch.int64))
    more = sum(p.numel() for p in model.parameters())
    assert more - sum(p.numel() for p in classifier().parameters()) == 2 * WIDTH


def test_the_class_token_starts_as_small_as_the_tokens():
    embedding = TokenEmbedding(
        vocab_size=VOCAB, max_seq_len=LONGEST, embed_dim=400, init_std=0.02, class_token=True
    )
    for weight in (embedding.class_token, embedding.tokens.weight, embedding.positions.weight):
        assert 0.015 < weight.std().item() < 0.025


def test_texts_of_a_pair_have_class_tokens_too():
    model, (inputs, mask) = classifier(PairClassifier, pooling="cls"), tokens()
    pairs = torch.stack([inputs, inputs.flip(0)], 1), torch.stack([mask, mask.flip(0)], 1)
    logits = model(pairs[0], key_mask=pairs[1])
    x = [
        encode_with_class(model, pairs[0][:, i], pairs[1][:, i]) for i in range(2)
    ]  # class vectors of both texts
    feature = torch.cat([*x, x[0] * x[1], x[0] - x[1]], -1)
    head = model.head
    hidden = F.linear(feature, head.fc1.weight, head.fc1.bias).clamp_min(0)
    expected = F.linear(hidden, head.fc2.weight, head.fc2.bias)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-12)


def encode_with_class(model, inputs, mask):
    front = model.embedding.class_token.expand(len(inputs), 1, WIDTH)
    x = torch.cat([front, model.embedding.tokens.weight[inputs]], 1)
    x = x + model.embedding.positions.weight[: x.shape[1]]
    mask = F.pad(mask, (1, 0), value=True)
    return encode(model, x, mask, model.encoder.blocks)[:, 0]


def test_fixed_positions_are_exact_in_float64_and_no_weights():
    table = SineTable(LONGEST, WIDTH).double()
    torch.testing.assert_close(table.table, fixed(LONGEST), rtol=0, atol=1e-14)
    assert not table.state_dict()
    assert not list(table.parameters())
    with pytest.raises(ValueError, match="need an even embed_dim, received 7"):
        SineTable(3, 7)


# ---- tied layers -------------------------------------------------------------------------------
def test_a_shared_block_is_stored_and_counted_once():
    one, three = (Transformer(softmax, num_layers=n, **BLOCK) for n in (1, 3))
    tied = Transformer(softmax, num_layers=3, share_layers=True, **BLOCK)
    assert list(tied.state_dict()) == list(one.state_dict())
    assert sum(p.numel() for p in tied.parameters()) == sum(p.numel() for p in one.parameters())
    block = {k.removeprefix("blocks.0."): v for k, v in tied.state_dict().items() if "blocks" in k}
    three.load_state_dict(
        {k: block.get(k.split(".", 2)[-1], tied.state_dict().get(k)) for k in three.state_dict()}
    )
    x = torch.randn(2, 5, WIDTH)
    assert torch.equal(tied(x), three(x))


def test_its_passes_draw_numbers_of_their_own():
    """Layer i of a tied stack draws as layer i of three that are alike."""
    noisy = partial(SoftmaxAttention, num_heads=2, dropout=0.5, backend="reference")
    tied = Transformer(noisy, num_layers=3, share_layers=True, **BLOCK)
    three = Transformer(noisy, num_layers=3, **BLOCK)
    for block in three.blocks:
        block.load_state_dict(tied.blocks[0].state_dict())
    three.norm.load_state_dict(tied.norm.state_dict())
    x, rng = torch.randn(2, 5, WIDTH), RandomKey(3, step=1)
    assert torch.equal(tied(x, rng=rng), three(x, rng=rng))


def test_checkpointing_and_gradients_of_a_shared_block():
    x, grads = torch.randn(2, 5, WIDTH), []
    for checkpointing in (False, True):
        torch.manual_seed(2)
        model = Transformer(
            softmax,
            num_layers=3,
            **BLOCK,
            activation_checkpointing=checkpointing,
            share_layers=True,
        )
        model(x).square().sum().backward()
        grads.append([p.grad for p in model.parameters()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_every_pass_of_a_language_model_has_a_cache_of_its_own():
    torch.manual_seed(3)
    made = LanguageModel(softmax, **SIZES, share_layers=True, output="full", dropout=0.0)
    model = made.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.4)
    prompt = torch.randint(0, VOCAB, (2, 4))
    assert len(model.new_caches()) == 3
    assert len(model.encoder.blocks) == 1
    found = generate(model, prompt, max_new_tokens=6).tokens
    for step in range(6):
        text = torch.cat([prompt, found[:, :step]], 1)
        positions = torch.arange(text.shape[1]).expand(2, -1)
        hidden = model(text, positions=positions)
        assert torch.equal(model.log_probs(hidden[:, -1]).argmax(-1), found[:, step])


def test_m_steps_see_every_pass():
    """Sums of a shared layer are those of all passes together."""
    soft = partial(MGKAttention, num_heads=2, e_step="soft")
    tied = Transformer(soft, num_layers=3, share_layers=True, **BLOCK)
    three = Transformer(soft, num_layers=3, **BLOCK)
    for block in three.blocks:
        block.load_state_dict(tied.blocks[0].state_dict())
    x = torch.randn(2, 5, WIDTH)
    tied(x), three(x)
    total = sum(block.attention.core.prior_statistics() for block in three.blocks)
    torch.testing.assert_close(tied.blocks[0].attention.core.prior_statistics(), total)


def test_attention_by_layers_has_no_place_in_a_shared_block():
    layers = per_layer(softmax, {1: partial(MGKAttention, num_heads=3)})
    for factory in (layers, partial(layers, dropout=0.1)):
        with pytest.raises(ValueError, match="share_layers=true"):
            Transformer(factory, num_layers=3, share_layers=True, **BLOCK)


def test_masked_language_models_take_it():
    model = MaskedLanguageModel(softmax, **SIZES, share_layers=True)
    assert len(model.encoder.blocks) == 1
    assert len(model.encoder.layers) == 3
