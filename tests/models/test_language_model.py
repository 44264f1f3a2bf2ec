"""Language models: sizes as published, independent sums, decoding, positions, output layers."""

from __future__ import annotations

import copy
import itertools
import math
from functools import partial

import pytest
import torch

from lit_probattn.attention import LinearAttention, MGKAttention, SoftmaxAttention
from lit_probattn.configs import attention_entry, attention_factory
from lit_probattn.models.embeddings import Sinusoid
from lit_probattn.models.language_model import IGNORE, LanguageModel
from lit_probattn.randomness import RandomKey
from tests.support.by_hand import attend, layer_norm, mlp
from tests.support.paths import shipped
from tests.support.slow import mostly_slow

VOCAB, LENGTH = 47, 11


def softmax(heads=3, **more):
    return partial(SoftmaxAttention, num_heads=heads, **more)


def mgk(heads=2, **more):
    return partial(MGKAttention, num_heads=heads, **more)


linear = partial(LinearAttention, num_heads=2)


def small(attention=None, **options) -> LanguageModel:
    torch.manual_seed(0)
    sizes = {"embed_dim": 14, "head_dim": 5, "num_layers": 2, "mlp_dim": 17, "dropout": 0.0}
    cutoffs = {} if options.get("output") == "full" else {"cutoffs": [7, 20, 29]}
    model = LanguageModel(
        attention or softmax(),
        **{"vocab_size": VOCAB, "max_seq_len": LENGTH, **cutoffs, **sizes, **options},
    )
    for parameter in model.parameters():  # larger than at the start, so that everything matters
        torch.nn.init.normal_(parameter, std=0.4)
    return model.eval()


def tokens(rows=3, length=LENGTH):
    return torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(1))


# ---- sizes -------------------------------------------------------------------------------------

MEDIUM = {"embed_dim": 256, "head_dim": 32, "max_seq_len": 384}
VALUE_AWARE = {
    **{"embed_dim": 512, "head_dim": 64, "max_seq_len": 512, "num_layers": 6},
    **{"vocab_size": 267744, "output": "full", "output_bias": False, "attention_bias": True},
    **{"positions": "forward", "init": "xavier"},
}


@pytest.mark.parametrize(
    ("attention", "options", "total", "layers"),
    [
        (softmax(8), {}, 44018394, 9480192),
        pytest.param(softmax(4), {}, 43494106, None, marks=pytest.mark.slow),
        (mgk(4), {}, 43625306, 9087104),
        pytest.param(mgk(8), {}, 44280794, None, marks=pytest.mark.slow),
        (mgk(4, shifted_keys=True), {}, 43496282, None),
        pytest.param(mgk(8, shifted_keys=True), {}, 44022746, None, marks=pytest.mark.slow),
        pytest.param(softmax(8), MEDIUM, 89833434, None, marks=pytest.mark.slow),
        (mgk(4), MEDIUM, 88260698, None),
        (softmax(8), VALUE_AWARE, 155999232, None),
    ],
)
def test_parameter_counts_of_the_specification(attention, options, total, layers):
    with torch.device("meta"):
        model = LanguageModel(attention, **{"vocab_size": 267735, "max_seq_len": 256, **options})
    assert sum(p.numel() for p in model.parameters()) == total
    if layers is not None:
        assert sum(p.numel() for p in model.encoder.parameters()) == layers


# ---- the model against independent sums --------------------------------------------------------


def oracle(model: LanguageModel, inputs: torch.Tensor) -> torch.Tensor:
    """Log-probabilities in float64, from the weights alone."""
    model, length = copy.deepcopy(model).double(), inputs.shape[1]
    x = model.tokens.weight[inputs] * math.sqrt(14)
    for place, m in itertools.product(range(length), range(7)):
        angle = (length - 1 - place) * 10000.0 ** (-2 * m / 14)
        x[:, place, m] += math.sin(angle)
        x[:, place, 7 + m] += math.cos(angle)
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    for block in model.encoder.blocks:
        x = layer_norm(x + attend(block.attention, x, x, hidden), block.norm1)
        x = layer_norm(x + mlp(block.mlp, x, torch.relu), block.norm2)
    return torch.nn.functional.linear(x, model.tokens.weight, model.output.bias).log_softmax(-1)


def test_model_equals_sums_written_out():
    model = small(output="full")
    inputs = tokens(2, 6)
    found = model.log_probs(model(inputs))
    torch.testing.assert_close(found.double(), oracle(model, inputs), rtol=0, atol=2e-5)


@torch.no_grad()
def test_start_is_as_specified():
    model = LanguageModel(mgk(4), vocab_size=500, max_seq_len=8, cutoffs=[100], num_layers=4)
    for name, value in model.named_parameters():
        far = 5 / value.numel() ** 0.5  # five standard errors of a mean, in deviations
        if "norm" in name and name.endswith("weight"):
            assert float(value.mean()) == pytest.approx(1.0, abs=0.02 * far)
            assert float(value.std()) == pytest.approx(0.02, rel=far / 2**0.5)
        elif name.endswith("bias"):
            assert float(value.abs().max()) == 0.0, name
        elif value.dim() == 2 and "prior" not in name:
            assert float(value.std()) == pytest.approx(0.02, rel=far / 2**0.5), name
            assert float(value.mean()) == pytest.approx(0.0, abs=0.02 * far), name
    assert not any("attention" in name and "bias" in name for name, _ in model.named_parameters())


def test_the_model_decides_on_bias_and_dropout_unless_told_not_to():
    layer = small(softmax(dropout=0.3)).encoder.blocks[0].attention
    assert (layer.dropout, layer.query_proj.bias) == (0.0, None)
    kept = small(softmax(dropout=0.3), attention_bias=None, attention_dropout=None)
    layer = kept.encoder.blocks[0].attention
    assert layer.dropout == 0.3
    assert layer.query_proj.bias is not None


# ---- positions ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "counted", "last"), [("forward", (2, 5), 3), ("reversed", (8, 5), 4)]
)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 3e-8), (torch.float64, 1e-15)])
def test_sinusoids_are_as_exact_as_their_precision(kind, counted, last, dtype, bound):
    """`forward` is that of the value-aware model; a cast to bfloat16 and back loses nothing."""
    table = Sinusoid(max_seq_len=9, embed_dim=8, kind=kind).bfloat16().to(dtype)
    found = table(torch.tensor([0, 3]), 9)
    assert found.dtype == dtype
    assert table.state_dict() == {}
    for row, position in enumerate(counted):
        for m in range(4):
            angle = position * math.exp(-m * math.log(10000) / last)
            assert float(found[row, m]) == pytest.approx(math.sin(angle), abs=bound)
            assert float(found[row, 4 + m]) == pytest.approx(math.cos(angle), abs=bound)


def test_rotary_positions_need_rotary_attention():
    with pytest.raises(ValueError, match=r"positions=rotary.*rotary_dim 4"):
        small(positions="rotary")
    model = small(softmax(rotary_dim=4), positions="rotary", norm_first=True)
    inputs = tokens()
    swapped = inputs.clone()
    swapped[:, [0, 1]] = inputs[:, [1, 0]]
    assert not torch.allclose(model(inputs)[:, -1], model(swapped)[:, -1])
    still = small(softmax(), positions="forward")
    assert still(inputs).shape == (3, LENGTH, 14)


def test_a_longer_segment_is_refused():
    with pytest.raises(ValueError, match=r"segment of 12 tokens: max_seq_len is 11"):
        small()(tokens(1, 12))


# ---- every variant -----------------------------------------------------------------------------

ATTENTION = shipped("attention")


# One file of each class; options of a class are those of tests/attention/test_contract.py.
CLASSES = {attention_entry(path)["class_path"]: path for path in reversed(ATTENTION)}


@pytest.mark.parametrize("path", mostly_slow(ATTENTION, [p.name for p in CLASSES.values()]))
def test_every_attention_file_makes_a_causal_model_that_trains(path):
    entry = attention_entry(path)
    factory = attention_factory(entry["class_path"], entry["init_args"])
    sizes = {"embed_dim": 12, "head_dim": 6, "num_layers": 1, "mlp_dim": 10, "max_seq_len": 16}
    model = LanguageModel(factory, vocab_size=VOCAB, cutoffs=[7], dropout=0.0, **sizes)
    inputs, key = tokens(2, 9), RandomKey(0, 3)
    losses = model.token_losses(model(inputs, rng=key), inputs)
    losses.mean().backward()
    assert bool(losses.isfinite().all())
    assert all(p.grad is not None for p in model.parameters())
    model.eval()
    other = inputs.clone()
    other[:, 6:] = (other[:, 6:] + 1) % VOCAB
    with torch.no_grad():
        before, after = model(inputs, rng=key), model(other, rng=key)
    torch.testing.assert_close(before[:, :6], after[:, :6])
    assert not torch.allclose(before[:, 6:], after[:, 6:])


@pytest.mark.parametrize(
    "attention",
    [softmax(), mgk(), linear],
    ids=["softmax", "mgk", "linear"],
)
@pytest.mark.parametrize("positions", ["reversed", "forward"])
def test_decoding_from_caches_equals_the_full_pass(attention, positions):
    model = small(attention, positions=positions)
    inputs = tokens(2)
    with torch.no_grad():
        # A full segment: its positions count down from max_seq_len - 1, as in decoding.
        whole = model.log_probs(model(inputs))
        caches = model.new_caches(LENGTH)
        place = torch.arange(LENGTH).expand(2, -1)
        first = model.next_logits(
            inputs[:, :4], key_mask=None, positions=place[:, :4], caches=caches
        )
        steps = [first] + [
            model.next_logits(
                inputs[:, i : i + 1],
                key_mask=None,
                positions=place[:, i : i + 1],
                caches=caches,
            )
            for i in range(4, LENGTH)
        ]
    torch.testing.assert_close(torch.stack(steps, 1), whole[:, 3:], rtol=1e-4, atol=1e-5)


def test_tokens_after_those_in_caches_need_their_positions():
    """They would otherwise have the positions of a new segment."""
    model = small()
    with pytest.raises(ValueError, match="received caches without positions"):
        model(tokens(2), caches=model.new_caches())


def test_only_scored_tokens_reach_the_output():
    model = small()
    inputs = tokens(2)
    target = torch.full_like(inputs, IGNORE)
    target[0, 3], target[1, 10] = 5, 46
    found = model.token_losses(model(inputs), target)
    whole = model.log_probs(model(inputs))
    torch.testing.assert_close(found, -torch.stack([whole[0, 3, 5], whole[1, 10, 46]]))
