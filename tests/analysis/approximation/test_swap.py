"""Approximations inside models: identities at full size, errors by hand, refusals."""

from __future__ import annotations

from functools import partial

import pandas as pd
import pytest
import torch

from lit_probattn.analysis.approximation.layers import (
    checked_layers,
    open_call,
    replaced_cores,
)
from lit_probattn.analysis.approximation.measure import (
    LocalErrors,
    Witnesses,
    observed,
    score,
    score_approximated,
)
from lit_probattn.analysis.approximation.methods import (
    ESTIMATE,
    EXACT,
    Aware,
    ByNorm,
    Hashing,
    Oblivious,
    RandomFeatures,
    Reoptimised,
    SlidingWindow,
)
from lit_probattn.attention import (
    FiSHAttention,
    LinearAttention,
    LinearFiSHAttention,
    MGKAttention,
    ReleasedLinearAttention,
    SoftmaxAttention,
)
from lit_probattn.base.errors import UnsupportedError
from lit_probattn.tasks import LanguageModeling, MaskedLanguageModeling, SequenceClassifier
from tests.support.slow import taking_turns

VOCAB, LENGTH, C, E = 41, 13, 12, 5
KINDS = [Oblivious, Aware, Reoptimised, ByNorm, partial(SlidingWindow, window="exact_r")]
VARIANTS = {
    "softmax": lambda c, head_dim, **o: SoftmaxAttention(c, 3, head_dim=head_dim, **o),
    "elu": lambda c, head_dim, **o: LinearAttention(c, 3, head_dim=head_dim, **o),
    "mgk": lambda c, head_dim, **o: MGKAttention(c, 2, head_dim=head_dim, **o),
    "gfish": lambda c, head_dim, **o: FiSHAttention(
        c, 4, head_dim=head_dim, num_global_heads=2, mixer="mlp", **o
    ),
    "multi-query": lambda c, head_dim, **o: SoftmaxAttention(
        c, 3, head_dim=head_dim, num_kv_heads=1, **o
    ),
}


def randomised(task):
    for parameter in task.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return task.eval()


def language_model(variant="softmax"):
    """A model with a variant of the table, or with what makes its layers."""
    torch.manual_seed(0)
    attention = VARIANTS[variant] if isinstance(variant, str) else variant
    sizes = {"embed_dim": C, "head_dim": E, "num_layers": 2, "mlp_dim": 9, "cutoffs": [9, 20]}
    return randomised(
        LanguageModeling(attention, vocab_size=VOCAB, max_seq_len=LENGTH, dropout=0.0, **sizes)
    )


def masked_model():
    torch.manual_seed(0)
    sizes = {"embed_dim": C, "head_dim": E, "num_layers": 2, "mlp_dim": 9}
    attention = VARIANTS["softmax"]
    return randomised(
        MaskedLanguageModeling(attention, vocab_size=VOCAB, max_seq_len=LENGTH, **sizes)
    )


def batches(count=2, padded=False):
    generator = torch.Generator().manual_seed(3)
    made = []
    for number in range(count):
        inputs = torch.randint(VOCAB - 3, (3, LENGTH), generator=generator)
        mask = torch.ones(3, LENGTH, dtype=torch.bool)
        if padded:
            mask[0, 8:] = False
        ids = torch.arange(3) + 3 * number
        target = inputs.roll(-1, 1).masked_fill(~mask, -100)
        made.append({"inputs": inputs, "key_mask": mask, "target": target, "sample_ids": ids})
    return made


def layers_of(task):
    return {name: m for name, m in task.model.named_modules() if hasattr(m, "query_proj")}


@pytest.mark.parametrize(("variant", "kind"), taking_turns(VARIANTS, KINDS))
def test_all_keys_give_exact_attention(variant, kind):
    task = language_model(variant)
    exact = score(task, batches(padded=True))
    found = score_approximated(task, batches(padded=True), layers_of(task), kind(LENGTH))
    assert found.value == pytest.approx(exact.value, rel=1e-5)
    assert found.count == exact.count > 50
    fewer = score_approximated(task, batches(padded=True), layers_of(task), kind(1))
    assert abs(fewer.value / exact.value - 1) > 1e-4


def test_masked_model_with_full_hashing_and_wide_windows():
    task = masked_model()
    exact = score(task, batches())
    assert exact.metric == "error"
    for method in (
        Hashing(2 * LENGTH, 2, "union", 0),
        SlidingWindow(2 * LENGTH - 1, "literal"),
        Oblivious(LENGTH),
        Aware(E + 1),
    ):
        found = score_approximated(task, batches(), layers_of(task), method)
        assert (found.loss, found.wrong) == pytest.approx((exact.loss, exact.wrong), rel=1e-5)


def test_random_features_depend_on_draw_and_layer_and_repeat():
    task = language_model()

    def value(seed, rows="performer", count=64):
        method = RandomFeatures(count, rows, seed)
        return score_approximated(task, batches(), layers_of(task), method).value

    assert value(0) == value(0)
    assert value(0) != value(1)
    exact = score(task, batches()).value
    many = [abs(value(seed, count=256) - exact) for seed in range(3)]
    few = [abs(value(seed, count=4) - exact) for seed in range(3)]
    assert max(many) < max(few)


def test_one_layer_and_one_head_at_a_time():
    task = language_model()
    layers = layers_of(task)
    first = dict(list(layers.items())[:1])
    method = Oblivious(2)

    def by_hand(layers, heads):
        """The two largest weights of these heads, divided by their sum."""

        def core(opened):
            top, places = opened.weights.topk(2)
            kept = torch.zeros_like(opened.weights).scatter(-1, places, top)
            kept = kept / kept.sum(-1, keepdim=True)
            found = opened.output.clone()
            found[:, heads] = (kept @ opened.value)[:, heads].to(found.dtype)
            return found

        with replaced_cores(layers, core):
            return score(task, batches()).value

    cases = [(layers, None, [0, 1, 2]), (first, None, [0, 1, 2]), (first, 1, [1]), (first, 2, [2])]
    values = [score(task, batches()).value]
    for chosen, head, heads in cases:
        values.append(score_approximated(task, batches(), chosen, method, head=head).value)
        assert values[-1] == pytest.approx(by_hand(chosen, heads), rel=1e-6)
    assert len(set(values)) == 5


def test_cores_are_restored_even_after_an_error():
    task = language_model()
    layers = layers_of(task)
    before = score(task, batches()).value

    def fail(opened):
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"), replaced_cores(layers, fail):
        score(task, batches())
    assert score(task, batches()).value == before
    assert not any("forward" in vars(layer) for layer in layers.values())


@pytest.mark.parametrize("padded", [False, True])
def test_local_errors_by_hand(padded):
    """Of a causal model, and of one whose batch has padding, which counts nowhere."""
    task = masked_model() if padded else language_model()
    layers, data = layers_of(task), batches(1, padded)
    methods = [Oblivious(3), Aware(3), Aware(E + 1), SlidingWindow(3, "exact_r")]
    errors = observed(LocalErrors(methods), task, data, layers)
    rows = pd.DataFrame(errors.rows())
    seen = []

    def core(opened):
        seen.append(opened)
        return opened.output

    with torch.no_grad(), replaced_cores(layers, core):
        score(task, data)
    opened = seen[1]  # the second layer
    total, projected = [], []
    for b in range(3):
        # Real queries that see three keys or more.
        for i in range(0 if padded else 2, int(data[0]["key_mask"][b].sum())):
            parts = []
            for h in range(3):
                a, v = opened.weights[b, h, i].double(), opened.value[b, h].double()
                top = a.argsort(descending=True)[:3]
                found = (a[top, None] * v[top]).sum(0) / a[top].sum()
                exact = a @ v
                parts.append(exact - found)
                if h == 1:
                    total.append(float((exact - found).norm() / exact.norm()))
            weight = opened.layer.out_proj.weight.double()
            projected.append(float((weight @ torch.cat(parts)).detach().norm()))
    (row,) = rows.query("method == 'ovo' and layer == 2 and head == 2").to_dict("records")
    assert row["rel_error"] == pytest.approx(sum(total) / len(total), rel=1e-4)
    assert row["proj_error"] == pytest.approx(sum(projected) / len(projected), rel=1e-4)
    assert row["queries"] == len(total)
    merged = rows.pivot_table(
        index=["layer", "head"], columns=["method", "num_kept"], values="abs_error"
    )
    assert (merged["ova", 3] <= merged["ovo", 3] + 1e-9).all()
    assert (merged["ova", E + 1] == 0).all()
    skew = pd.DataFrame(errors.skew_rows())
    assert skew["effective_support"].between(1, LENGTH).all()
    assert skew["top_64"].tolist() == pytest.approx([1.0] * len(skew), abs=1e-5)


def test_outputs_of_a_model_have_witnesses():
    task = language_model("elu")
    found = observed(Witnesses(), task, batches(), layers_of(task))
    assert found.limit == E + 1
    assert found.most_keys <= E + 1
    assert found.largest_error < 1e-12
    assert found.num_queries == 2 * 2 * 3 * LENGTH  # layers, batches, heads, one sample's tokens


def test_status_says_what_is_exact():
    assert [Aware(r).status(E) for r in (1, 2, E, E + 1)] == [EXACT, ESTIMATE, ESTIMATE, EXACT]


def test_signed_weights_and_other_outputs_are_refused():
    no_maps = LinearFiSHAttention(C, 4, head_dim=E, num_global_heads=2).eval()
    with pytest.raises(UnsupportedError, match="no attention maps"):
        open_call("layer", no_maps, torch.randn(2, 7, C))
    signed = SoftmaxAttention(C, 3, head_dim=E).eval()
    signed.weights = lambda query, *_, **__: torch.full((2, 3, 7, 7), -0.1)  # type: ignore
    with pytest.raises(UnsupportedError, match="negative weights"):
        open_call("layer", signed, torch.randn(2, 7, C))
    scaled = ReleasedLinearAttention(C, 3, head_dim=E, output_scale="inv_sqrt_head_dim").eval()
    with pytest.raises(UnsupportedError, match="is not the mean of its values"):  # noqa: SIM117
        with torch.no_grad(), checked_layers({"layer": scaled}):
            scaled(torch.randn(2, 7, C))


@pytest.mark.parametrize("variant", ["mgk", "elu"])
def test_hashing_and_features_need_the_exponential_kernel(variant):
    task = language_model(variant)
    with pytest.raises(UnsupportedError, match="remove lsh and orf"):
        score_approximated(task, batches(1), layers_of(task), RandomFeatures(8, "performer", 0))


def test_classifiers_are_scored_by_their_errors():
    sizes = {"embed_dim": C, "head_dim": E, "num_layers": 1, "mlp_dim": 9}
    task = SequenceClassifier(
        VARIANTS["softmax"],
        vocab_size=VOCAB,
        num_classes=3,
        max_seq_len=LENGTH,
        dropout=0.0,
        **sizes,
    ).eval()
    data = [{**b, "target": torch.tensor([0, 1, 2])} for b in batches(3)]
    with torch.no_grad():
        logits = torch.cat([task(b) for b in data])
    wrong = int((logits.argmax(-1) != torch.arange(3).repeat(3)).sum())
    assert 0 < wrong < 9
    by_hand = score(task, data)
    assert (by_hand.metric, by_hand.wrong, by_hand.count) == ("error", wrong, 9)
    assert by_hand.value == pytest.approx(100 * wrong / 9)
    exact, found = (
        score(task, data),
        score_approximated(task, data, layers_of(task), Oblivious(LENGTH)),
    )
    assert found.loss == pytest.approx(exact.loss, rel=1e-5)
