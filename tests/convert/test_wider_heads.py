"""Theorem 2: the embedding, the separating inputs, students; parameter counts as printed."""

from __future__ import annotations

from argparse import Namespace
from functools import partial

import pytest
import torch
import yaml

from lit_probattn.analysis.head_size.strictness import (
    Heads,
    difference,
    fit_students,
    separating_input,
    theorem_target,
)
from lit_probattn.attention import SoftmaxAttention
from lit_probattn.convert.__main__ import main
from lit_probattn.convert.wider_heads import embed_into_head_size, pad_heads
from lit_probattn.models.language_model import LanguageModel
from lit_probattn.reproduce.head_size.parameters import (
    Sizes,
    matched_embed_dim,
    matched_mlp_dim,
    model_weights,
)
from lit_probattn.training.checkpoints import load_checkpoint, save_checkpoint
from lit_probattn.training.trained import open_trained
from tests.analysis import made
from tests.support.helpers import error_of

B, N, C, E, H = 2, 11, 15, 5, 3


def layer(**options):
    torch.manual_seed(1)
    made = SoftmaxAttention(C, H, head_dim=E, **options).double()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    return made


def same_function(narrow, wide, x):
    """Relative difference of two layers' outputs."""
    with torch.no_grad():
        exact = narrow(x)
        return float((wide(x) - exact).norm() / exact.norm())


# ---- inclusion ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [5, 6, 8, 20])
@pytest.mark.parametrize(
    "options",
    [{}, {"bias": False}, {"num_kv_heads": 1}, {"value_head_dim": 3}, {"key_embed_dim": 7}],
    ids=str,
)
@pytest.mark.parametrize("std", [0.0, 0.1])
def test_embedding_is_exact(size, options, std):
    narrow = layer(**options)
    wide = embed_into_head_size(narrow, size, padding_std=std)
    assert (wide.head_dim, wide.value_head_dim, wide.num_heads) == (size, size, H)
    x = torch.randn(B, N, C, dtype=torch.float64)
    others = [torch.randn(B, 13, 7, dtype=torch.float64)] if "key_embed_dim" in options else []
    calls = [{}] if others else [{}, {"is_causal": True}, {"key_mask": torch.rand(B, N) > 0.3}]
    for call in calls:
        exact = narrow(x, *others, **call)
        error = (wide(x, *others, **call) - exact).norm() / exact.norm()
        assert float(error.detach()) < 1e-12
    if not others:
        assert same_function(narrow, wide, x) < 1e-12


def test_embedding_in_single_precision():
    narrow = layer().float()
    wide = embed_into_head_size(narrow, 16)
    assert same_function(narrow, wide, torch.randn(B, N, C)) < 2e-6


def test_padding_of_keys_and_values_lets_training_leave_the_saddle():
    x = torch.randn(B, N, C, dtype=torch.float64)

    def padded_gradients(std):
        wide = embed_into_head_size(layer(), 8, padding_std=std)
        wide(x).square().sum().backward()
        query = wide.query_proj.weight.grad.view(H, 8, C)[:, E:]
        out = wide.out_proj.weight.grad.view(C, H, 8)[..., E:]
        return float(query.abs().max()), float(out.abs().max())

    assert padded_gradients(0.0) == (0.0, 0.0)
    assert min(padded_gradients(0.1)) > 0


def test_heads_are_padded_one_by_one():
    weight = torch.arange(12.0).view(4, 3)  # two heads of two rows
    found = pad_heads(weight, 2, 3)
    expected = torch.cat([weight[:2], torch.zeros(1, 3), weight[2:], torch.zeros(1, 3)])
    assert torch.equal(found, expected)
    assert torch.equal(pad_heads(weight.mT, 2, 3, axis=1), expected.mT)


def test_refusals():
    with pytest.raises(ValueError, match="head_dim must be at least 5, received 4"):
        embed_into_head_size(layer(), 4)
    with pytest.raises(ValueError, match="only dot-product softmax attention"):
        embed_into_head_size(layer(score="gaussian"), 8)
    with pytest.raises(ValueError, match="rotary on"):
        embed_into_head_size(layer(rotary_dim=4), 8)


def test_a_checkpoint_keeps_its_loss(tmp_path):
    source = made.checkpoint(tmp_path, "text", "SoftmaxAttention", num_heads=2)
    content = load_checkpoint(source)
    content["hyper_parameters"]["head_dim"] = 8  # as a run's
    save_checkpoint(content, source)
    wide = tmp_path / "wide.ckpt"
    assert main(["wider_heads", str(source), str(wide), "--head_dim", "16"]) == 0
    assert "exists" in error_of(["wider_heads", str(source), str(wide), "--head_dim", "16"], main)
    added = yaml.safe_load(wide.with_suffix(".yaml").read_text(encoding="utf-8"))
    assert added == {"model": {"init_args": {"head_dim": 16}}}
    state = load_checkpoint(wide)["state_dict"]
    assert state["model.encoder.blocks.0.attention.query_proj.weight"].shape == (32, 16)
    losses = []
    for files, checkpoint in ([], source), ([wide.with_suffix(".yaml")], wide):
        files = [source.parent.parent / "config.yaml", *files]
        opened = open_trained(Namespace(checkpoint=checkpoint, config=files, data=[], device="cpu"))
        batch = next(iter(opened.data.val_dataloader()))
        losses.append(opened.task.batch_loss(batch).item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


@pytest.mark.parametrize(
    ("attention", "options", "word"),
    [
        ("LinearAttention", {}, "LinearAttention"),
        ("SoftmaxAttention", {"score": "gaussian"}, "score=gaussian"),
    ],
)
def test_a_checkpoint_of_other_attention_is_refused(tmp_path, attention, options, word):
    source = made.checkpoint(tmp_path, "text", attention, num_heads=2, **options)
    content = load_checkpoint(source)
    content["hyper_parameters"]["head_dim"] = 8
    save_checkpoint(content, source)
    wide = tmp_path / "wide.ckpt"
    assert word in error_of(["wider_heads", str(source), str(wide), "--head_dim", "16"], main)
    assert not wide.exists()


# ---- strictness --------------------------------------------------------------------------------


def random_heads(generator, num_heads=4, size=2, embed_dim=8):
    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64) * embed_dim**-0.5

    rows = (num_heads, size, embed_dim)
    return Heads(draw(*rows), draw(*rows), draw(*rows), draw(num_heads, embed_dim, size))


def by_loops(heads, inputs):
    """The sum over heads and tokens written out, one input (d, n)."""
    length, out = inputs.shape[1], torch.zeros_like(inputs)
    for i in range(len(heads.query)):
        for column in range(length):
            q = heads.query[i] @ inputs[:, column]
            exps = [
                ((heads.key[i] @ inputs[:, j]) @ q / heads.query.shape[1] ** 0.5).exp()
                for j in range(length)
            ]
            for j in range(length):
                share = exps[j] / sum(exps)
                out[:, column] += share * (heads.out[i] @ (heads.value[i] @ inputs[:, j]))
    return out


def test_heads_are_the_papers_sum():
    generator = torch.Generator().manual_seed(1)
    heads = random_heads(generator)
    x = torch.randn(3, 8, 5, generator=generator, dtype=torch.float64)
    expected = torch.stack([by_loops(heads, one) for one in x])
    torch.testing.assert_close(heads(x), expected, atol=1e-12, rtol=0)


def test_separating_inputs_in_all_three_cases():
    generator = torch.Generator().manual_seed(2)
    target = theorem_target(8, 4, 4, generator)
    student = random_heads(generator)
    assert difference(student, target, separating_input(student, target)) > 0.1
    # The same value maps: equal tokens cannot tell; one token and zeros can.
    total = target.value_maps.sum(0)
    left, values, right = torch.linalg.svd(total)
    out = (left * values.sqrt()).view(8, 4, 2).movedim(1, 0)
    value = (values.sqrt()[:, None] * right).view(4, 2, 8)
    second = Heads(student.query, student.key, value, out)
    torch.testing.assert_close(second.value_maps.sum(0), total, atol=1e-12, rtol=0)
    same = torch.randn(8, 1, generator=generator, dtype=torch.float64).expand(-1, 2)
    assert difference(second, target, same) < 1e-12
    found = separating_input(second, target)
    assert float(found[:, 1].abs().max()) == 0.0
    assert difference(second, target, found) > 1e-6
    # Products that differ by a skew matrix: one token cannot tell, two can.
    skew = torch.randn(8, 8, generator=generator, dtype=torch.float64)
    skew = 0.3 * (skew - skew.mT)
    full = target.products[0] + skew
    eye = torch.eye(8, dtype=torch.float64).expand(4, -1, -1)
    third = Heads(8**0.5 * full.expand(4, -1, -1), eye, value, out)
    alone = torch.zeros(8, 2, dtype=torch.float64)
    alone[:, 0] = same[:, 0]
    first_column = (third(alone[None]) - target(alone[None]))[0, :, 0]
    assert float(first_column.norm()) < 1e-12
    found = separating_input(third, target)
    assert float(found[:, 1].norm()) > 0
    assert difference(third, target, found) > 1e-6


def test_equal_layers_are_not_separated():
    generator = torch.Generator().manual_seed(3)
    target = theorem_target(8, 4, 4, generator)
    with pytest.raises(ValueError, match="no separating input found"):
        separating_input(target, target)
    with pytest.raises(ValueError, match="seq_len must be at least 2"):
        separating_input(target, target, seq_len=1)
    with pytest.raises(ValueError, match="theorem 2 needs"):
        theorem_target(8, 2, 4, generator)


def test_larger_heads_fit_better():
    """A short fit; the full one is `theory --strictness`."""
    target = theorem_target(8, 4, 4, torch.Generator().manual_seed(0))
    settings = {"batch_size": 48, "num_seeds": 2, "lr": 3e-2}
    narrow, wide = (fit_students(target, size, 60, **settings) for size in (1, 4))
    assert min(narrow) > 0.1
    assert max(wide) < 0.5 * min(narrow)


# ---- counting ----------------------------------------------------------------------------------

PRINTED = [
    *((1024, h, 1024 // h, 4096, 336.2) for h in (8, 16, 32)),
    *((512, h, 128, 4096, m) for h, m in ((8, 167.7), (12, 192.9), (16, 218.1), (32, 318.9))),
    *((512, 8, e, 4096, m) for e, m in ((32, 129.9), (64, 142.5), (256, 218.1))),
    *((768, h, 128, 3072, m) for h, m in ((8, 214.1), (12, 251.8), (16, 289.6), (20, 327.4))),
]


def bert_parameters(sizes):
    """Parameters of BERT in pre-training: biases and norms of blocks, tables, and heads."""
    d, a, f = sizes.embed_dim, sizes.inner_dim, sizes.mlp_dim
    blocks = sizes.num_layers * ((3 * a + d + f + d) + 4 * d)
    tables = (512 + 2) * d + 2 * d  # positions, segments, norm
    heads = (
        (d * d + d) + (d * d + d + 2 * d + sizes.vocab_size) + (2 * d + 2)
    )  # pooler, words, next
    return model_weights(sizes) + blocks + tables + heads


@pytest.mark.parametrize(("width", "heads", "size", "mlp", "millions"), PRINTED)
def test_printed_totals(width, heads, size, mlp, millions):
    sizes = Sizes(width, heads, size, mlp, 24, 30522)
    assert round(bert_parameters(sizes) / 1e6, 1) == millions


def test_counts_of_a_real_model():
    sizes = Sizes(embed_dim=12, num_heads=3, head_dim=7, mlp_dim=10, num_layers=2, vocab_size=41)
    made = SoftmaxAttention(12, 3, head_dim=7)
    assert made.cost(9).macs == 9 * (4 * 12 * 21 + 2 * 9 * 21)  # n (4 d a + 2 n a)
    model = LanguageModel(
        partial(SoftmaxAttention, num_heads=3),
        vocab_size=41,
        max_seq_len=9,
        embed_dim=12,
        head_dim=7,
        num_layers=2,
        mlp_dim=10,
        output="full",
        output_bias=False,
        attention_bias=True,
    )
    assert sum(p.numel() for p in model.parameters() if p.dim() > 1) == model_weights(sizes)


def test_matching_rules():
    base = {"embed_dim": 256, "head_dim": 32, "mlp_dim": 1024, "num_layers": 6}
    widths = {}
    for heads in (1, 2, 4, 8, 16, 32, 64):
        fixed = Sizes(num_heads=heads, vocab_size=32000, **base)
        widths[heads] = matched_mlp_dim(fixed)
        other = Sizes(256, heads, 256 // heads, widths[heads], 6, 32000)
        assert model_weights(other) == model_weights(fixed)
    assert widths == {1: 576, 2: 640, 4: 768, 8: 1024, 16: 1536, 32: 2560, 64: 4608}
    seventy = Sizes(num_heads=70, vocab_size=32000, **base)
    assert matched_embed_dim(seventy, 1) == 455
    near = Sizes(455, 1, 455, 1024, 6, 32000)
    assert model_weights(near) == pytest.approx(model_weights(seventy), rel=2e-3)
    with pytest.raises(ValueError, match="must be divisible by num_heads"):
        matched_mlp_dim(Sizes(256, 70, 32, 1024, 6, 32000))
    with pytest.raises(ValueError, match="too small"):
        matched_mlp_dim(Sizes(256, 1, 1, 16, 6, 32000))
