"""Decision transformers: another library's model under the same weights, causality, caches."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_probattn.attention import LinearAttention, MGKAttention, SoftmaxAttention
from lit_probattn.configs import attention_entry, attention_factory
from lit_probattn.models.decision_transformer import DecisionTransformer
from lit_probattn.randomness import RandomKey
from tests.attention.variants import shipped_variants
from tests.support.paths import CONFIGS, shipped
from tests.support.slow import mostly_slow

OBS, ACT, STEPS, LAYERS, WIDTH, HEADS = 5, 3, 7, 2, 12, 2
VARIANTS = sorted(p.stem for p in shipped("attention") if p.parent.name == "attention")
# One of each class; causal attention and caches of every file: tests/attention.
QUICK = {cls: name for name, (cls, _) in reversed(shipped_variants().items())}.values()


softmax = partial(SoftmaxAttention, num_heads=HEADS)


def small(attention=softmax, **options: Any) -> DecisionTransformer:
    torch.manual_seed(2)
    sizes = {"obs_dim": OBS, "act_dim": ACT, "max_timestep": 41, "embed_dim": WIDTH}
    sizes |= {"head_dim": WIDTH // HEADS, "num_layers": LAYERS, "mlp_dim": 19}
    model = DecisionTransformer(
        attention, **{**sizes, "dropout": 0.0, "attention_dropout": 0.0, **options}
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Larger than at the start, so that everything matters; a mixture's own stay.
            if "attention" not in name or "_proj." in name:
                parameter.normal_(std=0.3)
    return model.double().eval()


def batch(rows=3, steps=STEPS, seed=0) -> dict[str, Tensor]:
    """Segments that begin at different steps; the last rows are shorter."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    lengths = torch.arange(steps, steps - rows, -1)
    return {
        "observations": numbers(rows, steps, OBS),
        "actions": numbers(rows, steps, ACT).tanh(),
        "returns_to_go": numbers(rows, steps, 1),
        "timesteps": torch.arange(steps) + torch.arange(rows)[:, None],
        "mask": torch.arange(steps) < lengths[:, None],
    }


def loss(predicted: Tensor, data: dict[str, Tensor]) -> Tensor:
    return (predicted - data["actions"])[data["mask"]].square().mean()


# ---- another library's model -------------------------------------------------------------------


def theirs(ours: DecisionTransformer) -> Any:
    """Return the class of transformers with our weights; it has no position table of its own."""
    library = pytest.importorskip("transformers")
    config = library.DecisionTransformerConfig(
        state_dim=OBS,
        act_dim=ACT,
        hidden_size=WIDTH,
        max_ep_len=41,
        n_layer=LAYERS,
        n_head=HEADS,
        n_inner=19,
        activation_function="relu",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        attn_implementation="eager",
    )
    model = library.DecisionTransformerModel(config).double().eval()
    with torch.no_grad():
        model.encoder.wpe.weight.zero_()
        for target, source in pairs(model, ours):
            target.copy_(source)
    return model


def pairs(model: Any, ours: DecisionTransformer, of=lambda p: p) -> list[tuple[Tensor, Tensor]]:
    """Return `of` their parameters, each beside ours in their shape; `Conv1D` is transposed."""
    found = [(of(model.embed_timestep.weight), of(ours.timesteps.weight))]
    for name in ("weight", "bias"):

        def both(theirs, *own, name=name):
            joint = torch.cat([of(getattr(module, name)) for module in own])
            is_conv = type(theirs).__name__ == "Conv1D" and name == "weight"
            found.append((of(getattr(theirs, name)), joint.T if is_conv else joint))

        for block, mine in zip(model.encoder.h, ours.encoder.blocks, strict=True):
            layer = mine.attention
            both(block.attn.c_attn, layer.query_proj, layer.key_proj, layer.value_proj)
            both(block.attn.c_proj, layer.out_proj)
            both(block.mlp.c_fc, mine.mlp.fc1)
            both(block.mlp.c_proj, mine.mlp.fc2)
            both(block.ln_1, mine.norm1)
            both(block.ln_2, mine.norm2)
        both(model.embed_return, ours.returns)
        both(model.embed_state, ours.observations)
        both(model.embed_action, ours.actions)
        both(model.embed_ln, ours.norm)
        both(model.predict_action[0], ours.head)
        both(model.encoder.ln_f, ours.encoder.norm)
    return found


def test_it_equals_the_model_of_transformers():
    """Actions of real steps and the gradient of every parameter, in float64."""
    ours, data = small(), batch()
    model = theirs(ours)
    predicted = model(
        states=data["observations"],
        actions=data["actions"],
        rewards=torch.zeros_like(data["returns_to_go"]),
        returns_to_go=data["returns_to_go"],
        timesteps=data["timesteps"],
        attention_mask=data["mask"].long(),
    ).action_preds
    mine = ours(**data)
    real = data["mask"]
    torch.testing.assert_close(mine[real], predicted[real], rtol=0.0, atol=1e-10)
    expected, found = loss(predicted, data), loss(mine, data)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-12)
    expected.backward()
    found.backward()
    gradients = pairs(model, ours, lambda p: p.grad)
    assert sum(grad.numel() for _, grad in gradients) == sum(p.numel() for p in ours.parameters())
    for target, source in gradients:
        torch.testing.assert_close(source, target, rtol=0.0, atol=1e-10)


# ---- what a prediction depends on --------------------------------------------------------------


@pytest.mark.parametrize("name", ["softmax", "mgk", "gfish", "linear"])
def test_a_prediction_reads_nothing_later(name):
    """Neither its own action nor any later step changes it; its state and return-to-go do."""
    entry = attention_entry(CONFIGS / "attention" / f"{name}.yaml")
    factory = attention_factory(entry["class_path"], {**entry["init_args"], "num_heads": 4})
    model, data, step = small(factory), batch(), 3
    before = model(**data)
    for key in ("observations", "actions", "returns_to_go"):
        first = step if key == "actions" else step + 1
        changed = data[key].clone()
        changed[:, first:] += 1.0
        after = model(**{**data, key: changed})
        torch.testing.assert_close(
            after[:, : step + 1], before[:, : step + 1], rtol=0.0, atol=1e-13
        )
        assert (after[:, step + 1] - before[:, step + 1]).abs().max() > 1e-4
    for key in ("observations", "returns_to_go"):
        changed = data[key].clone()
        changed[:, step] += 1.0
        after = model(**{**data, key: changed})
        assert (after[:, step] - before[:, step]).abs().max() > 1e-4


def test_steps_that_only_pad_change_nothing():
    model, data = small(), batch()
    noise = {
        k: torch.where(data["mask"][..., None], v, 9.0) for k, v in data.items() if v.dim() > 2
    }
    real = data["mask"]
    torch.testing.assert_close(model(**{**data, **noise})[real], model(**data)[real])


def test_padding_on_the_left_changes_nothing_either():
    """As evaluation in other programs pads; the mask alone says what is real."""
    model, data = small(), {k: v[:1] for k, v in batch().items()}
    padded = {}
    for key, value in data.items():
        shape = (1, 2, *value.shape[2:])
        padded[key] = torch.cat([torch.zeros(shape, dtype=value.dtype), value], 1)
    torch.testing.assert_close(model(**padded)[:, 2:], model(**data), rtol=0.0, atol=1e-12)


def test_the_last_action_may_be_left_out():
    model, data = small(), batch()
    shorter = {**data, "actions": data["actions"][:, :-1]}
    torch.testing.assert_close(model(**shorter), model(**data), rtol=0.0, atol=1e-12)


@pytest.mark.parametrize("name", mostly_slow(VARIANTS, QUICK))
def test_every_variant_runs_and_its_cache_continues(name):
    """Step by step from the caches equals the whole segment, noise and dropout off or by place."""
    entry = attention_entry(CONFIGS / "attention" / f"{name}.yaml")
    if name == "ast":
        pytest.importorskip("entmax")
    torch.manual_seed(0)
    factory = attention_factory(entry["class_path"], entry["init_args"])
    model, data = small(factory), batch(rows=2)
    key = RandomKey(5, 0, torch.tensor([4, 8]))
    trained = loss(model.train()(**data, rng=key), data)
    trained.backward()
    assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in model.parameters())
    model.eval()
    data["timesteps"] = torch.arange(STEPS).expand(2, STEPS)
    with torch.no_grad():
        whole = model(**{**data, "mask": None}, rng=key)
        caches, found, action = model.new_caches(), [], None
        for step in range(STEPS):
            returns = data["returns_to_go"][:, step]
            observation = data["observations"][:, step]
            found.append(
                model.next_action(observation, action, returns, step, caches=caches, rng=key)
            )
            action = data["actions"][:, step]
    torch.testing.assert_close(torch.stack(found, 1), whole, rtol=0.0, atol=1e-9)


# ---- what it refuses ---------------------------------------------------------------------------


def test_a_step_and_the_one_before_it_belong_together():
    """The embedding of time step -1 is that of the last one; a missing action shifts all tokens."""
    model = small()
    kind = {"dtype": model.returns.weight.dtype}
    observation, action = torch.ones(2, model.obs_dim, **kind), torch.ones(2, model.act_dim, **kind)
    returns, caches = torch.ones(2, 1, **kind), model.new_caches()
    with pytest.raises(ValueError, match="received an action with 0 tokens"):
        model.next_action(observation, action, returns, 0, caches=caches)
    model.next_action(observation, None, returns, 0, caches=caches)
    with pytest.raises(ValueError, match="received None with 2 tokens"):
        model.next_action(observation, None, returns, 1, caches=caches)


@pytest.mark.parametrize("name", ["obs_dim", "act_dim", "max_timestep"])
def test_a_size_below_one_is_refused(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, received 0"):
        small(**{name: 0})


def test_one_observation_one_action_and_one_step_are_enough():
    model = small(obs_dim=1, act_dim=1, max_timestep=1)
    one = torch.ones(2, 1, 1, dtype=model.returns.weight.dtype)
    times = torch.zeros(2, 1, dtype=torch.int64)
    found = model(observations=one, actions=one, returns_to_go=one, timesteps=times)
    assert found.shape == (2, 1, 1)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("observations", r"observations must have shape \(3, 7, 5\), received \(3, 7, 4\)"),
        ("returns_to_go", r"returns_to_go must have shape \(3, 7, 1\), received \(3, 7, 0\)"),
        (
            "actions",
            r"actions must have shape \(3, 7, 3\), or one step fewer, received \(3, 7, 2\)",
        ),
    ],
)
def test_tensors_of_other_sizes_are_refused(name, message):
    data = batch()
    with pytest.raises(ValueError, match=message):
        small()(**{**data, name: data[name][..., :-1]})


def test_the_layers_start_as_documented():
    model = DecisionTransformer(
        partial(MGKAttention, num_heads=2), obs_dim=11, act_dim=3, max_timestep=1020
    )
    std = model.encoder.blocks[0].mlp.fc1.weight.std()
    assert float(std.detach()) == pytest.approx(0.02, rel=0.02)
    assert float(model.timesteps.weight.detach().std()) == pytest.approx(1.0, rel=0.02)
    assert not bool(model.encoder.blocks[1].attention.query_proj.bias.any())


def test_options_reach_the_layers():
    linear = partial(LinearAttention, num_heads=2)
    assert small(attention_dropout=0.3).encoder.blocks[0].attention.dropout == 0.3
    assert small(linear, attention_dropout=None).encoder.blocks[0].attention.dropout == 0.0
