"""Softmax layers become sMGK and FiSH layers; norms that are put back; layers that are taught."""

from __future__ import annotations

import pytest
import torch

from lit_probattn.attention import SoftmaxAttention
from lit_probattn.convert import LayerInputs, Mixture, convert_layer
from lit_probattn.convert.fish import convert_to_fish
from lit_probattn.convert.layer import head_forms
from lit_probattn.interop.algebra import second_moment, shifted_key_factors
from lit_probattn.interop.weights import head_rows

C, H, E = 11, 4, 3
EXACT = 1e-9


def softmax_layer(**options):
    torch.manual_seed(3)
    layer = SoftmaxAttention(C, H, head_dim=E, **options).double().eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter *= 2
    return layer


def draw_inputs(samples=24, length=13, is_causal=False):
    generator = torch.Generator().manual_seed(4)
    scale = torch.linspace(0.2, 2.0, C, dtype=torch.float64)
    x = torch.randn(samples, length, C, generator=generator, dtype=torch.float64) * scale + 0.3
    mask = torch.ones(samples, length, dtype=torch.bool)
    mask[1, 9:] = False
    return LayerInputs(x, mask, is_causal)


def outputs(layer, inputs):
    return layer(inputs.x, key_mask=inputs.key_mask, is_causal=inputs.is_causal)[inputs.real]


# ---------------------------------------------------------------------- sMGK
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("with_inputs", [True, False])
def test_a_shifted_head_per_old_head_is_the_old_layer_while_norms_are_put_back(bias, with_inputs):
    """Whatever the shifts are; without the norms it is another layer."""
    old, inputs = softmax_layer(bias=bias), draw_inputs()
    mixture = Mixture(shifted_keys=True, old_heads=1, key_norm_weight=1.0)
    new, errors = convert_layer(old, mixture, inputs=inputs if with_inputs else None)
    assert (new.num_heads, new.core.key_shift.shape) == (H, (H, 2, E))
    assert errors.logit_error < 1e-6
    torch.testing.assert_close(outputs(new, inputs), outputs(old, inputs), rtol=0, atol=EXACT)
    assert (new.core.key_shift[:, 0] - new.core.key_shift[:, 1]).abs().min() > 1e-4
    new.core.set_norm_weight(0.0)
    assert (outputs(new, inputs) - outputs(old, inputs)).abs().max() > 0.1


def test_half_the_heads_have_the_mean_of_two_forms_and_the_error_that_is_told():
    old, inputs = softmax_layer(), draw_inputs()
    mixture = Mixture(shifted_keys=True, key_norm_weight=1.0)
    new, errors = convert_layer(old, mixture, inputs=inputs)
    assert (new.num_heads, new.num_components) == (2, 2)
    with torch.no_grad():
        (query, key), (own_query, own_key) = head_forms(old), head_forms(new)
    fit = inputs.part(slice(0, 18))
    x = torch.cat([fit.x, torch.ones_like(fit.x[..., :1])], -1)[fit.real]
    moment = second_moment(x)
    error = total = 0.0
    for place, group in enumerate(errors.groups):
        ours = own_query[place].mT @ own_key[place]
        for head in group:
            form = query[head].mT @ key[head]
            error += float((form - ours).mT.matmul(moment).matmul(form - ours).mul(moment).sum())
            total += float(form.mT.matmul(moment).matmul(form).mul(moment).sum())
    assert errors.logit_error == pytest.approx((error / total) ** 0.5, rel=1e-6)
    assert 0.05 < errors.logit_error < 1.0


def test_shifts_are_what_the_mean_key_lacks():
    """At full rank W_qᵀ b_r = (A_r − Ā) x̄ exactly, and the spread is added to that."""
    generator = torch.Generator().manual_seed(1)
    query, key = torch.randn(2, 2, E, 6, generator=generator, dtype=torch.float64)
    centre = torch.randn(6, generator=generator, dtype=torch.float64)
    factors, shifts = shifted_key_factors(query, key, 6, None, centre)
    forms = query.mT @ key
    mean = forms.mean(0)
    torch.testing.assert_close(factors.query.mT @ factors.keys[0], mean, rtol=0, atol=1e-12)
    for form, shift in zip(forms, shifts, strict=True):
        lacking = (form - mean) @ centre
        torch.testing.assert_close(factors.query.mT @ shift, lacking, rtol=0, atol=1e-10)


def test_the_spread_is_that_of_the_keys_and_follows_from_the_seed():
    old, inputs = softmax_layer(), draw_inputs(samples=64, length=5)
    made = {}
    for name, spread, seed in (("none", 0.0, 0), ("a", 0.5, 0), ("again", 0.5, 0), ("b", 0.5, 1)):
        mixture = Mixture(shifted_keys=True, num_components=2, spread=spread, seed=seed)
        made[name], _ = convert_layer(old, mixture, inputs=inputs)
    shifts = {name: layer.core.key_shift for name, layer in made.items()}
    assert torch.equal(shifts["a"], shifts["again"])
    assert not torch.equal(shifts["a"], shifts["b"])
    _, keys = head_forms(made["none"])
    x = inputs.x[:48][inputs.real[:48]]
    deviation = (torch.cat([x, x.new_ones(len(x), 1)], -1) @ keys.mT).std(1).mean(-1)
    size = (shifts["a"] - shifts["none"]).flatten(1).std(1)
    assert (size / (0.5 * deviation)).sub(1).abs().max() < 0.6


def test_gaussian_mgk_with_norms_put_back_is_the_dot_product_one():
    old, inputs = softmax_layer(), draw_inputs(is_causal=True)
    dot, dot_errors = convert_layer(old, inputs=inputs)
    mixture = Mixture(score="gaussian", key_norm_weight=1.0)
    gaussian, errors = convert_layer(old, mixture, inputs=inputs)
    torch.testing.assert_close(outputs(gaussian, inputs), outputs(dot, inputs), rtol=0, atol=EXACT)
    assert errors.output_error == pytest.approx(dot_errors.output_error)
    _, at_once = convert_layer(old, Mixture(score="gaussian"), inputs=inputs)
    assert at_once.output_error > 1.03 * errors.output_error


# ---------------------------------------------------------------------- FiSH
@pytest.mark.parametrize("with_inputs", [True, False])
@pytest.mark.parametrize("head_dim", [None, H * E])
def test_fish_with_as_many_global_heads_is_the_old_layer(head_dim, with_inputs):
    """At the old head size: every global form is that of an old head."""
    old, inputs = softmax_layer(), draw_inputs()
    seen = inputs if with_inputs else None
    new, errors = convert_to_fish(old, num_global_heads=H, inputs=seen, head_dim=head_dim)
    assert torch.equal(new.core.mixing.weights[0], torch.eye(H).to(inputs.x))
    assert errors.logit_error < 1e-6
    if not with_inputs:
        return
    assert errors.output_error < 1e-6
    torch.testing.assert_close(
        outputs(new.eval(), inputs), outputs(old, inputs), rtol=0, atol=EXACT
    )


@pytest.mark.parametrize("with_inputs", [True, False])
def test_fish_error_is_that_of_the_mixed_forms(with_inputs):
    old, inputs = softmax_layer(), draw_inputs()
    new, errors = convert_to_fish(old, inputs=inputs if with_inputs else None)
    assert (new.num_heads, new.num_global_heads, new.layout.query) == (H, 2, 2)
    query, key = head_forms(old)
    projections = (new.query_proj, new.key_proj)
    own_query, own_key = (head_rows(proj.weight, proj.bias, 2) for proj in projections)
    mixed = torch.einsum("hg,ged,gef->hdf", new.core.mixing.weights[0], own_query, own_key)
    fit = inputs.part(slice(0, 18))
    x = torch.cat([fit.x, torch.ones_like(fit.x[..., :1])], -1)[fit.real]
    moment = second_moment(x) if with_inputs else torch.eye(C + 1, dtype=torch.float64)
    forms = query.mT @ key
    weights = [
        (part.mT @ moment @ part @ moment).diagonal(dim1=-2, dim2=-1).sum().item()
        for part in (forms - mixed, forms)
    ]
    assert errors.logit_error == pytest.approx((weights[0] / weights[1]) ** 0.5, rel=1e-6)
    assert (errors.output_error is None) == (not with_inputs)


def test_fish_takes_the_best_global_forms():
    """Heads that are two forms and their sums need two global heads, and no more is lost."""
    old = softmax_layer(bias=False)
    with torch.no_grad():
        for proj in (old.query_proj, old.key_proj):
            rows = proj.weight.unflatten(0, (H, E))
            rows[2:] = rows[:2]
        old.query_proj.weight.unflatten(0, (H, E))[2:] *= -0.7
    new, errors = convert_to_fish(old, head_dim=H * E)
    assert errors.logit_error < 1e-6
    inputs = draw_inputs()
    torch.testing.assert_close(
        outputs(new.eval(), inputs), outputs(old, inputs), rtol=0, atol=EXACT
    )
