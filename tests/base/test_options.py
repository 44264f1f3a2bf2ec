"""Every option of every layer has an effect, or declares without which others it has none."""

from __future__ import annotations

import itertools
import warnings
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch

from lit_probattn.attention import MGKAttention, variants
from lit_probattn.base.arguments import without_effect
from lit_probattn.randomness import RandomKey
from tests.attention.variants import layers
from tests.support.slow import mostly_slow

C, H, N = 12, 4, 5
# Values of options that are neither choices nor switches; two that differ on these sizes.
VALUES: dict[str, list[Any]] = {
    "alpha": ["learned", 1.5],
    "degree": [2, 4],
    "dpfp_nu": [1, 2],
    "dropout": [0.0, 0.3],
    "eps": [0.0, 0.1],
    "head_ratio": [2.0, 1.0],
    "key_norm_weight": [None, 0.5],
    "max_positions": [None, 8, 16],
    "mixer_ratios": [None, [2.0]],
    "noise_scale": [0.01, 0.5],
    "num_components": [2, 3],
    "num_features": [None, 5],
    "num_global_heads": [None, 3],
    "padded_len": [None, 32],
    "prior_floor": [1e-6, 0.6],
    "rotary_dim": [0, 2],
    "row_eps": [0.0, 0.1],
    "second_scale": [1.0, 2.0],
    "shift_init_std": [1.0, 0.3],
    "variance": ["equal", "paper_main", "code_lm", [1.0, 2.0]],
}
# Options of projections and engines, which `test_contract.py` holds.
ELSEWHERE = {"embed_dim", "num_heads", "head_dim", "num_kv_heads", "key_embed_dim"}
ELSEWHERE |= {"value_head_dim", "bias", "backend"}
# The same by their nature: no draw of .02 is beyond the cut at 2, and no hidden layer has a bias.
ALIKE = [{"normal_0.02", "trunc_normal_0.02"}, {"none", "hidden"}]


def record_of(cls):
    return cls.__init__.record


def values_of(cls):
    hints = get_type_hints(record_of(cls))
    found = {}
    for option in fields(record_of(cls)):
        name, hint = option.name, hints[option.name]
        if not option.init or name in ELSEWHERE:
            continue
        choices = [False, True] if hint is bool else list(get_args(hint))
        found[name] = choices if hint is bool or get_origin(hint) is Literal else VALUES[name]
    return found


def settings_of(values):
    """The defaults, each value of each option, and what rotary shifts need."""
    singles = [{name: value} for name, some in values.items() for value in some]
    both = {"shifted_keys": True, "rotary_dim": 2}
    return [{}, *singles, *([both] if both.keys() <= values.keys() else [])]


def outcome(cls, options):
    """What a layer holds and gives, in training and after; None if it refuses the options."""
    torch.manual_seed(0)
    try:
        layer = cls(C, H, backend="reference", **options)
    except ValueError:
        return None
    found = [(name, *kept.flatten().tolist()) for name, kept in layer.state_dict().items()]
    generator = torch.Generator().manual_seed(1)
    for parameter in layer.parameters():
        parameter.data.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
        parameter.data.view(-1)[0] += 0.8  # one prior is above 1
    inputs = torch.randn(2, N, C, generator=generator)
    for mode in (True, False):
        layer.train(mode)
        for step in (1, 2):
            try:
                out = layer(inputs, rng=RandomKey(3, step, torch.tensor([4, 7])))
            except ValueError as error:
                return [str(error)]
            found.append(tuple(out.flatten().tolist()))
    cores = [part for part in layer.modules() if getattr(part, "has_m_step", False)]
    sums = [core.prior.statistics() for core in cores]
    return [*found, *(tuple(each.flatten().tolist()) for each in sums)]


@pytest.mark.filterwarnings("ignore:.*no effect", "ignore:shifted keys")
@pytest.mark.parametrize(
    "name", mostly_slow(variants(), [n for n in variants() if "Released" not in n])
)
def test_an_option_has_an_effect_or_says_that_it_has_none(name):
    cls, record = variants()[name], record_of(variants()[name])
    values, cached = values_of(cls), {}
    wrong = []
    for option, setting in itertools.product(values, settings_of(values)):
        if option in setting:
            continue
        found = {}
        for value in values[option]:
            options = setting | {option: value}
            key = repr(sorted(options.items()))
            if key not in cached:
                cached[key] = outcome(cls, options)
            if cached[key] is not None:
                found[repr(value)] = cached[key], option in without_effect(record(C, H, **options))
        for one, other in itertools.combinations(found, 2):
            if any({one, other} == {repr(each) for each in pair} for pair in ALIKE):
                continue
            (first, void), (second, void_too) = found[one], found[other]
            if (first == second) != (void or void_too):
                wrong.append((setting, option, one, other, first == second))
    assert wrong == []


def test_a_layer_warns_of_an_option_without_effect():
    with pytest.warns(UserWarning, match="em_weighting=posterior .* e_step=learned"):
        MGKAttention(C, H, em_weighting="posterior")


def test_no_shipped_file_has_an_option_without_effect():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for make in layers().values():
            make()
