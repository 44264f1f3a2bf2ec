"""Dropping components that are hardly used: usage, what stays, and what the model loses."""

from __future__ import annotations

import copy
import re

import pytest
import torch
import yaml

from lit_probattn.attention import MGKAttention
from lit_probattn.convert.__main__ import main
from lit_probattn.convert.layer import LayerInputs
from lit_probattn.convert.prune.components import (
    component_usage,
    kept_components,
    prune_layers,
    prune_state,
    pruned_entry,
)
from lit_probattn.training.checkpoints import load_checkpoint
from tests.convert.test_to_mgk import load_converted, make_run

B, H, N, E, C = 3, 2, 7, 3, 11
FAR = 60.0  # a component whose keys are this far away answers no query
FORMS = {
    "mgk": {},
    "smgk": {"shifted_keys": True},
    "softmax prior": {"prior_param": "softmax"},
    "prior per layer": {"prior_share": "layer"},
    "prior per position": {"prior_share": "head_position", "max_positions": 19},
    "M-step": {"e_step": "soft"},
    "hard": {"e_step": "hard"},
    "learned variances": {"learn_variance": True, "include_log_det": True},
    "different variances": {"variance": [0.5, 1.0, 2.0]},
    "grouped": {"num_heads": 4, "num_kv_heads": 2},
    "grouped, shifted": {"num_heads": 4, "num_kv_heads": 2, "shifted_keys": True},
}


def layer_of(dead, **options):
    """A layer whose heads each have a component, given by `dead`, that answers nothing."""
    torch.manual_seed(0)
    options = {"num_heads": H, "num_components": 3, **options}
    layer = MGKAttention(C, head_dim=E, **options).double().eval()
    kill(layer, dead)
    return layer


@torch.no_grad()
def kill(layer, dead):
    for name, parameter in layer.core.named_parameters():
        if name.startswith(("prior", "variance")):
            parameter.copy_(torch.rand_like(parameter) * 0.5 + 0.2)
    if layer.shifted_keys:
        for head, place in enumerate(dead):
            layer.core.key_shift[head, place] = FAR
    else:
        heads = layer.key_proj.bias.view(layer.layout.key, layer.num_components, E)
        for head, place in enumerate(dead):
            heads[head, place] = FAR


def inputs():
    torch.manual_seed(1)
    mask = torch.rand(B, N) < 0.8
    mask[:, 0] = True
    return LayerInputs(torch.randn(B, N, C, dtype=torch.float64), mask, is_causal=True)


@pytest.mark.parametrize("form", FORMS)
def test_a_component_without_usage_leaves_nothing_behind(form):
    """Heads drop different components where they can; outputs stay, up to the dropped mass."""
    options = FORMS[form]
    together = "layer" in form or "different" in form
    layer, seen = layer_of([1, 1] if together else [0, 2], **options), inputs()
    usage = component_usage(layer, seen)
    assert usage.shape == (2, 3)
    torch.testing.assert_close(usage.sum(1).clamp_min(1.0), usage.sum(1))
    places = kept_components({"a": layer}, {"a": usage}, 0.01)["a"]
    assert places.tolist() == ([[0, 2], [0, 2]] if together else [[1, 2], [0, 1]])
    entry = {"class_path": "MGKAttention", "init_args": {"num_heads": H, **options}}
    arguments = pruned_entry(entry, layer, places)["init_args"]
    assert arguments["num_components"] == 2
    small = MGKAttention(C, head_dim=E, **arguments).double().eval()
    state = {f"a.{name}": value for name, value in layer.state_dict().items()}
    state |= prune_state(state, "a", layer, places)
    small.load_state_dict({name.removeprefix("a."): value for name, value in state.items()})
    call = {"key_mask": seen.key_mask, "is_causal": True}
    real = seen.key_mask
    found, expected = (one(seen.x, **call)[real] for one in (small, layer))
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)
    if small.core.prior is not None:
        probabilities = small.core.prior.probabilities(N)
        assert (probabilities <= 1).all()
        if "position" not in form:
            one = torch.ones_like(probabilities[..., 0, :])
            torch.testing.assert_close(probabilities.sum(-2), one)


def test_usage_equals_the_sums():
    layer, seen = layer_of([], variance="paper_main"), inputs()
    call = layer.call(seen.x, key_mask=seen.key_mask, is_causal=True)
    weights, shares = layer.core.posterior(call)
    expected = torch.zeros(H, 3, dtype=torch.float64)
    for b, i in seen.key_mask.nonzero().tolist():
        expected += (weights[b, :, None, i] * shares[b, :, :, i]).sum(-1)
    expected /= int(seen.key_mask.sum())
    torch.testing.assert_close(component_usage(layer, seen), expected)
    torch.testing.assert_close(expected.sum(1), torch.ones(H, dtype=torch.float64))


def test_of_heads_that_share_keys_the_one_that_uses_a_component_most_counts():
    layer, seen = layer_of([], num_heads=4, num_kv_heads=2), inputs()
    call = layer.call(seen.x, key_mask=seen.key_mask, is_causal=True)
    weights, shares = layer.core.posterior(call)
    read = (weights[:, :, None] * shares).sum(-1).transpose(1, 3)[seen.key_mask]  # (·, K, H)
    of_heads = read.mean(0).T
    expected = torch.stack([torch.maximum(*of_heads[:2]), torch.maximum(*of_heads[2:])])
    assert (of_heads[:2] - expected[0]).abs().max() > 1e-3, "heads that use them alike"
    torch.testing.assert_close(component_usage(layer, seen), expected)


def test_with_one_prior_for_the_layer_all_heads_keep_the_same():
    usage = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]])
    for share, kept in (("layer", [[0, 2], [0, 2]]), ("head", [[0], [2]])):
        layer = layer_of([], prior_share=share)
        assert kept_components({"a": layer}, {"a": usage}, 0.4)["a"].tolist() == kept


def test_a_moving_average_of_the_weights_is_pruned_too():
    layer = layer_of([])
    names = [f"{prefix}.blocks.{i}.a" for prefix in ("model", "ema.module") for i in (1, 11)]
    state = {
        f"{n}.{k}": v * (1 + i) for i, n in enumerate(names) for k, v in layer.state_dict().items()
    }
    state["model.head.weight"] = torch.ones(2)
    layers = {"blocks.1.a": layer, "blocks.11.a": layer}
    places = {"blocks.1.a": torch.tensor([[0], [1]]), "blocks.11.a": torch.tensor([[2], [0]])}
    fresh = prune_layers(state, layers, places)
    assert fresh.keys() == state.keys()
    assert fresh["model.head.weight"] is state["model.head.weight"]
    for i, name in enumerate(names):
        heads = layer.key_proj.weight.detach().view(H, 3, E, C) * (1 + i)
        kept = [heads[row, place] for row, (place,) in enumerate(places[name[name.index("b") :]])]
        torch.testing.assert_close(fresh[f"{name}.key_proj.weight"], torch.cat(kept))


def test_the_head_that_needs_most_decides():
    layers = {"a": layer_of([]), "b": layer_of([])}
    usage = {
        "a": torch.tensor([[0.9, 0.07, 0.03], [0.02, 0.02, 0.96]]),
        "b": torch.tensor([[0.01, 0.98, 0.01], [0.5, 0.04, 0.46]]),
    }
    kept = kept_components(layers, usage, 0.05)
    assert {n: v.tolist() for n, v in kept.items()} == {
        "a": [[0, 1], [0, 2]],
        "b": [[0, 1], [0, 2]],
    }
    assert kept_components(layers, usage, 0.6)["b"].tolist() == [[1], [0]]
    assert kept_components(layers, usage, 0.99)["a"].tolist() == [[0], [2]], "one stays"
    fixed = {name: layer_of([], variance=[1.0, 2.0, 4.0]) for name in layers}
    assert kept_components(fixed, usage, 0.47)["a"].tolist() == [[0, 1, 2]] * 2
    usage["b"][1] = torch.tensor([0.05, 0.9, 0.05])
    usage["a"][1] = torch.tensor([0.9, 0.06, 0.04])
    assert kept_components(fixed, usage, 0.1)["a"].tolist() == [[0, 1]] * 2


# ---- the command -------------------------------------------------------------------------------


def make_mgk(tmp_path, dead=True, **options):
    task, checkpoint = make_run(tmp_path / "run", "MGKAttention", num_heads=2, num_components=3)
    if dead:
        layers = [m for m in task.modules() if isinstance(m, MGKAttention)]
        for number, layer in enumerate(layers):
            kill(layer, [number, 2])
        content = torch.load(checkpoint, weights_only=False)
        torch.save(content | {"state_dict": task.state_dict()}, checkpoint)
    return task, checkpoint


def test_the_command_prunes_prints_and_stores(tmp_path, capsys):
    task, _ = make_mgk(tmp_path)
    out = tmp_path / "pruned.ckpt"
    assert main(["prune", str(tmp_path / "run"), str(out), "--num_batches", "2"]) == 0
    told = capsys.readouterr().out
    assert "components per head: 3 before, 2 after" in told
    assert "(0.000)" in told
    assert re.search(r"model: output error 0\.\d %, same prediction in 100\.0 %", told)
    before, after = re.search(r"loss ([\d.]+) before, ([\d.]+) after", told).groups()
    assert abs(float(before) - float(after)) < 1e-3
    arguments = yaml.safe_load(out.with_suffix(".yaml").read_text(encoding="utf-8"))["model"][
        "init_args"
    ]
    assert arguments["attention"]["init_args"]["num_components"] == 2
    new, _ = load_converted(out)
    old = copy.deepcopy(task).eval()
    x, mask = torch.randint(23, (2, 13)), torch.ones(2, 13, dtype=torch.bool)
    found, expected = (t.model(x, key_mask=mask) for t in (new.eval(), old))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    stored = load_checkpoint(out)
    assert stored["pruning"]["threshold"] == 0.05
    assert stored["optimizer_states"] == []


def test_the_threshold_that_the_error_gives_is_the_one_that_prunes(tmp_path, capsys):
    make_mgk(tmp_path, dead=False)
    words = ["prune", str(tmp_path / "run"), str(tmp_path / "pruned.ckpt"), "--threshold"]
    assert main([*words, "0.01"]) == 2
    least = float(re.search(r"raise --threshold above ([\d.]+)$", capsys.readouterr().err)[1])
    assert main([*words, f"{least - 1e-3:.4f}"]) == 2
    assert main([*words, f"{least + 1e-3:.4f}"]) == 0
