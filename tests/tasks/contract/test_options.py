"""Every option of every task reaches its place.

A task is built with all options away from their defaults, numbers different from each other, and
each is looked for where it acts: in a module, in the optimiser, in the call that reads it.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from lit_probattn import tasks
from lit_probattn.attention import FiSHAttention, SoftmaxAttention
from lit_probattn.tasks.base import SIZES
from lit_probattn.tasks.schedules import ScheduleValues
from tests.support.helpers import refuses_other_values, types_of

# Every option is set beside all others, some of which void it.
pytestmark = pytest.mark.filterwarnings("ignore:.* has no effect with ")

TASKS = {
    name: cls
    for name in tasks.__all__
    if isinstance(cls := getattr(tasks, name), type)
    and issubclass(cls, tasks.Task)
    and cls is not tasks.Task
}


def options_of(cls: type) -> dict[str, Any]:
    """Return the options of a task with their defaults, those that it passes on included."""
    found: dict[str, Any] = {}
    for base in cls.__mro__:
        if "__init__" not in vars(base):
            continue
        if base is tasks.Task.__mro__[1]:
            break
        for parameter in list(inspect.signature(vars(base)["__init__"]).parameters.values())[1:]:
            if parameter.kind is not parameter.VAR_KEYWORD:
                found.setdefault(parameter.name, parameter.default)
    return found


@dataclass(frozen=True)
class Option:
    """A value, and where it is found in a task that was built with it.

    Args:
        value: away from the default.
        place: returns what is there; None where it was not read.
        expected: what is found for the value; None means the value.
        others: options that are set otherwise when this one is looked for, since they hide it.
        alone: whether it is set only then, as the others refuse or hide it.
    """

    value: Any
    place: Callable[[Any], Any]
    expected: Any = None
    others: Mapping[str, Any] = field(default_factory=dict)
    alone: bool = False


class Read(Exception):
    """Ends a call in which a spy has seen what it looks for."""


def seen(where: str, call: Callable[[], Any]) -> dict[str, Any]:
    """Return the arguments that a function is called with first, by name."""
    module, _, name = where.rpartition(".")
    original = getattr(importlib.import_module(module), name)
    with mock.patch(where, side_effect=Read) as spy, pytest.raises(Read):
        call()
    bound = inspect.signature(original).bind_partial(*spy.call_args.args, **spy.call_args.kwargs)
    return {**bound.arguments, **bound.arguments.get("kwargs", {})}


def made(task: Any, where: str, **more: Any) -> dict[str, Any]:
    """Return what a function is called with while such a task is made."""
    return seen(where, partial(type(task), **task.given, **more))


# ---- what all tasks have -----------------------------------------------------------------------


def in_training(task: Any, step: int = 4) -> Any:
    task.trainer = mock.MagicMock(
        max_steps=17, global_step=step, accumulate_grad_batches=1, sanity_checking=False
    )
    task.trainer.state.fn = "fit"
    return task


def group(task: Any) -> dict[str, Any]:
    """The settings of the first parameters, which are decayed."""
    return task.configure_optimizers().param_groups[0]


def schedule(task: Any, name: str) -> Any:
    call = partial(tasks.Task.scheduled, in_training(task))
    return seen("lit_probattn.tasks.base.schedule_values", call)[name]


def compiled(task: Any) -> bool:
    with mock.patch.object(task.model, "compile") as spy:
        tasks.Task.setup(in_training(task), "test")
    return spy.called


def training(**others: Any) -> dict[str, Option]:
    found = {
        "seed": Option(41, lambda task: task.random_key({"sample_ids": torch.arange(2)}).seed),
        "lr": Option(0.0625, lambda task: (group(task)["lr"], schedule(task, "peak_lr"))),
        "betas": Option((0.75, 0.875), lambda task: group(task)["betas"]),
        "eps": Option(0.03125, lambda task: group(task)["eps"]),
        "weight_decay": Option(0.015625, lambda task: group(task)["weight_decay"]),
        "schedule": Option("cosine", partial(schedule, name="name")),
        "warmup_steps": Option(13, partial(schedule, name="warmup_steps")),
        "schedule_steps": Option(29, partial(schedule, name="total_steps")),
        "cycle_momentum": Option(False, partial(schedule, name="cycle_momentum")),
        "compile": Option(True, compiled),
        "norm_annealing_steps": Option(
            31,
            lambda task: seen(
                "lit_probattn.tasks.base.NormAnnealing", partial(type(task), **task.given)
            )["norm_annealing_steps"],
        ),
    }
    found["lr"] = Option(0.0625, found["lr"].place, (0.0625, 0.0625))
    return {**found, **others}


# ---- models ------------------------------------------------------------------------------------


def attention(heads: int) -> Callable[..., Any]:
    return lambda width, head_dim, **given: SoftmaxAttention(
        width, head_dim=head_dim, num_heads=heads, **given
    )


def block(task: Any) -> Any:
    model = task.model
    return model.blocks[0] if hasattr(model, "blocks") else model.encoder.blocks[0]


def same(*values: Any) -> Any:
    """The value, if it is the same everywhere."""
    return values[0] if len(set(values)) == 1 else values


def dropouts(task: Any) -> Any:
    """The dropout of the embedding and of both branches of a block."""
    model = getattr(task.model, "embedding", task.model)
    first = block(task)
    return same(model.dropout.p, first.dropout.p, first.mlp.dropout2.p)


def rows(positions: Any) -> int:
    """Return the number of learned or fixed positions."""
    return len(getattr(positions, "table", positions))


def num_layers(encoder: Any) -> int:
    return encoder.num_rounds * len(encoder.blocks)


BODY = {
    "attention": Option(attention(3), lambda task: block(task).attention.num_heads, 3),
    "embed_dim": Option(14, lambda task: block(task).attention.embed_dim),
    "head_dim": Option(10, lambda task: block(task).attention.head_dim),
    "mlp_dim": Option(22, lambda task: block(task).mlp.fc1.out_features),
    "dropout": Option(0.11, dropouts),
    "num_layers": Option(4, lambda task: num_layers(task.model.encoder)),
}
ACTIVATION = {"relu": nn.ReLU, "gelu": nn.GELU}


def activation(name: str) -> Option:
    return Option(name, lambda task: type(block(task).mlp.activation), ACTIVATION[name])


CHECKPOINTING = Option(True, lambda task: task.model.encoder.activation_checkpointing)
SHARE = Option(True, lambda task: len(task.model.encoder.blocks) == 1)
ATTENTION_DROPOUT = Option(0.13, lambda task: block(task).attention.dropout)
NORM_FIRST = Option(True, lambda task: block(task).norm_first)


def classifier() -> dict[str, Option]:
    return {
        **training(),
        **BODY,
        "vocab_size": Option(37, lambda task: task.model.embedding.tokens.num_embeddings),
        "num_classes": Option(7, lambda task: same(task.num_classes, classes(task.model.head))),
        "max_seq_len": Option(18, lambda task: task.model.head.max_seq_len),
        "pooling": Option("mean_valid", lambda task: task.model.head.pooling),
        "positions": Option(
            "sinusoidal", lambda task: type(task.model.embedding.positions).__name__, "SineTable"
        ),
        "activation_checkpointing": CHECKPOINTING,
        "share_layers": SHARE,
    }


def classes(head: nn.Module) -> int:
    return [m.out_features for m in head.modules() if isinstance(m, nn.Linear)][-1]


def sampled(task: Any, name: str) -> Any:
    """How tokens are drawn in `predict`."""
    batch = {"inputs": torch.ones(1, 2).long(), "key_mask": torch.ones(1, 2).bool()}
    call = partial(task.predict_step, {**batch, "sample_ids": torch.arange(1)}, 0)
    found = seen("lit_probattn.tasks.language_model.generate", call)
    return found[name] if name in found else getattr(found["sampling"], name)


def language_model(**more: Option) -> dict[str, Option]:
    found = {
        **training(),
        **BODY,
        "vocab_size": Option(37, lambda task: task.model.tokens.num_embeddings),
        "max_seq_len": Option(18, lambda task: task.model.positions.max_seq_len),
        "norm_first": NORM_FIRST,
        "activation": activation("gelu"),
        "positions": Option("forward", lambda task: task.model.positions.kind),
        "output": Option("full", lambda task: type(task.model.output).__name__, "FullSoftmax"),
        "cutoffs": Option(
            (5, 19), lambda task: task.model.output.bounds, [0, 5, 19, 37], {"output": "adaptive"}
        ),
        "output_bias": Option(False, lambda task: task.model.output.bias is not None),
        "attention_bias": Option(
            True, lambda task: block(task).attention.query_proj.bias is not None
        ),
        "attention_dropout": ATTENTION_DROPOUT,
        "init": Option("xavier", lambda task: bool((block(task).norm1.weight == 1).all()), True),
        "activation_checkpointing": CHECKPOINTING,
        "max_logits": Option(151, lambda task: task.model.output.max_logits),
        "max_new_tokens": Option(9, partial(sampled, name="max_new_tokens")),
        "temperature": Option(1.7, partial(sampled, name="temperature")),
        "top_k": Option(5, partial(sampled, name="top_k")),
        "top_p": Option(0.9, partial(sampled, name="top_p")),
        "share_layers": SHARE,
    }
    key = found["seed"].place
    seed = Option(41, lambda task: same(key(task), sampled(task, "seed")))
    return {**found, "seed": seed, **more}


def text_encoder(**more: Option) -> dict[str, Option]:
    return {
        **training(),
        **BODY,
        "vocab_size": Option(37, lambda task: task.model.tokens.num_embeddings),
        "max_seq_len": Option(18, lambda task: task.model.max_seq_len),
        "norm_first": NORM_FIRST,
        "activation": activation("relu"),
        "attention_dropout": ATTENTION_DROPOUT,
        "position_period": Option(12, lambda task: task.model.positions.offsets.num_embeddings),
        "position_init": Option(
            "sinusoidal",
            lambda task: task.model.positions.offsets.weight.norm(dim=-1).std() < 1e-6,
            True,
        ),
        "num_token_types": Option(3, lambda task: task.model.token_types.num_embeddings),
        "norm_eps": Option(
            0.25,
            lambda task: same(*(m.eps for m in task.modules() if isinstance(m, nn.LayerNorm))),
        ),
        "activation_checkpointing": CHECKPOINTING,
        "share_layers": SHARE,
        "init_std": Option(0.5, lambda task: round(task.model.tokens.weight.std().item() * 2) / 2),
        "activation_dropout": Option(0.17, lambda task: block(task).mlp.dropout1.p),
        **more,
    }


# ---- translation -------------------------------------------------------------------------------

PAIR = {
    "source": torch.tensor([[4, 5, 2]]),
    "source_mask": torch.ones(1, 3).bool(),
    "inputs": torch.tensor([[2, 6]]),
    "key_mask": torch.ones(1, 2).bool(),
    "target": torch.tensor([[6, 2]]),
    "sample_ids": torch.tensor([0]),
}
TRANSLATION = "lit_probattn.tasks.translation"


def searched(task: Any, split: str) -> Any:
    """The beam of a test or of a validation."""
    with mock.patch.object(type(task), "trainer_or_none", None):
        return seen(f"{TRANSLATION}.beam_search", partial(task.evaluate, PAIR, split))["beam"]


def drawn(task: Any) -> dict[str, Any]:
    """What `predict` calls with a temperature."""
    words = (PAIR["source"], PAIR["source_mask"], PAIR["sample_ids"])
    return seen(f"{TRANSLATION}.sample", partial(task.translate, *words))


def loss_of(task: Any, name: str) -> dict[str, Any]:
    return seen(f"{TRANSLATION}.{name}", partial(task.token_losses, PAIR))


def scored_form(task: Any) -> str:
    task._lines = ["a line"]
    call = partial(in_training(task)._log_bleu, "val")
    return seen(f"{TRANSLATION}.score_lines", call)["form"]


def stack_heads(task: Any) -> tuple[int, int, int]:
    first = task.model.decoder.blocks[0]
    layers = (block(task).attention, first.attention, first.cross_attention)
    return tuple(layer.num_heads for layer in layers)


def translation() -> dict[str, Option]:
    common = training()
    key = common["seed"].place
    decoder = lambda task: task.model.decoder.blocks[0]  # noqa: E731
    own = {"encoder_attention": None, "decoder_attention": None, "cross_attention": None}
    return {
        **common,
        "seed": Option(
            41, lambda task: same(key(task), drawn(task)["sampling"].seed, drawn(task)["rng"].seed)
        ),
        "attention": Option(attention(3), stack_heads, (3, 3, 3), own),
        "encoder_attention": Option(attention(2), lambda task: stack_heads(task)[0], 2),
        "decoder_attention": Option(attention(4), lambda task: stack_heads(task)[1], 4),
        "cross_attention": Option(attention(5), lambda task: stack_heads(task)[2], 5),
        "source_vocab_size": Option(37, lambda task: task.model.source_tokens.num_embeddings),
        "vocab_size": Option(43, lambda task: task.model.tokens.num_embeddings),
        "max_seq_len": Option(18, lambda task: task.model.positions.num_embeddings),
        "embed_dim": BODY["embed_dim"],
        "head_dim": BODY["head_dim"],
        "mlp_dim": BODY["mlp_dim"],
        "num_encoder_layers": Option(2, lambda task: len(task.model.encoder.blocks)),
        "num_decoder_layers": Option(1, lambda task: len(task.model.decoder.blocks)),
        "dropout": Option(0.11, lambda task: same(dropouts(task), decoder(task).mlp.dropout2.p)),
        "activation_dropout": Option(
            0.17, lambda task: same(block(task).mlp.dropout1.p, decoder(task).mlp.dropout1.p)
        ),
        "attention_dropout": Option(
            0.13,
            lambda task: same(
                block(task).attention.dropout,
                decoder(task).attention.dropout,
                decoder(task).cross_attention.dropout,
            ),
        ),
        "norm_first": Option(
            True, lambda task: same(block(task).norm_first, decoder(task).norm_first)
        ),
        "activation": activation("gelu"),
        "positions": Option(
            "learned", lambda task: type(task.model.positions).__name__, "Embedding"
        ),
        "share": Option("none", lambda task: task.model.output is not None, True),
        "activation_checkpointing": Option(
            True,
            lambda task: same(
                *(
                    part.activation_checkpointing
                    for part in (task.model.encoder, task.model.decoder)
                )
            ),
        ),
        "max_logits": Option(172, lambda task: loss_of(task, "in_parts")["rows"], 4),
        "label_smoothing": Option(0.19, lambda task: loss_of(task, "smoothed_losses")["smoothing"]),
        "bleu": Option("tokenised", scored_form),
        "beam_size": Option(
            6, lambda task: same(searched(task, "test").size, drawn(task)["beam"].size)
        ),
        "length_penalty": Option(0.7, lambda task: searched(task, "test").length_penalty),
        "max_length_a": Option(1.4, lambda task: drawn(task)["beam"].max_length_a),
        "max_length_b": Option(8, lambda task: drawn(task)["beam"].max_length_b),
        "n_best": Option(4, lambda task: drawn(task)["beam"].n_best),
        "val_beam_size": Option(12, lambda task: searched(task, "val").size),
        "temperature": Option(1.7, lambda task: drawn(task)["sampling"].temperature),
        "top_k": Option(9, lambda task: drawn(task)["sampling"].top_k),
        "top_p": Option(0.9, lambda task: drawn(task)["sampling"].top_p),
    }


# ---- decisions ---------------------------------------------------------------------------------

DECISION = "lit_probattn.tasks.decision"


def played(task: Any) -> tuple[dict[str, Any], list[int]]:
    """How a player is made, and the seeds of its episodes."""
    task.facts = SimpleNamespace(env_name="any")
    with mock.patch(f"{DECISION}.Player") as player, mock.patch(f"{DECISION}.make_environment"):
        player.return_value.play.return_value = []
        task.play(1.0, 2)
    return player.call_args.kwargs, player.return_value.play.call_args.args[2]


def asked_returns(task: Any) -> list[float]:
    task.facts = mock.MagicMock(env_name="any", target_returns=(1.0, 2.0))
    task.facts.score.return_value = 1.0
    asked, told = [], {"environment": "any", "warning": ""}

    def play(target: float, count: int) -> list[Any]:
        asked.append(target)
        return [SimpleNamespace(total=1.0, length=2)] * count

    in_training(task)
    quiet = mock.patch.multiple(task, log=mock.DEFAULT, log_dict=mock.DEFAULT, play=play)
    with quiet, mock.patch(f"{DECISION}.describe_environment", return_value=told):
        task._log_returns("val", 2)
    return asked


def validations_until_play(task: Any) -> int:
    in_training(task)
    return next(number for number in range(1, 99) if task._episodes_now("val"))


def episodes_of_test(task: Any) -> int:
    in_training(task).trainer.state.fn = "test"
    return task._episodes_now("test")


def decision() -> dict[str, Option]:
    common = training()
    key = common["seed"].place
    return {
        **common,
        **BODY,
        "seed": Option(
            41,
            lambda task: same(
                key(task),
                played(task)[0]["seed"],
                *(n - 100 - i for i, n in enumerate(played(task)[1])),
            ),
        ),
        "activation": activation("gelu"),
        "attention_dropout": ATTENTION_DROPOUT,
        "activation_checkpointing": CHECKPOINTING,
        "obs_dim": Option(5, lambda task: task.model.observations.in_features),
        "act_dim": Option(
            2, lambda task: same(task.model.actions.in_features, task.model.head.out_features)
        ),
        "max_timestep": Option(33, lambda task: task.model.timesteps.num_embeddings),
        "context_length": Option(6, lambda task: played(task)[0]["context_length"]),
        "test_episodes": Option(8, episodes_of_test),
        "val_episodes": Option(
            9, lambda task: [in_training(task)._episodes_now("val") for _ in range(7)][-1]
        ),
        "val_every": Option(7, validations_until_play),
        "target_returns": Option((12.5, 51.0), asked_returns, [51.0, 12.5]),
    }


# ---- text --------------------------------------------------------------------------------------


def hidden_words(task: Any) -> dict[str, Any]:
    words = torch.ones(1, 4).long()
    batch = {"inputs": words, "target": words, "key_mask": words > 0}
    batch["sample_ids"] = torch.arange(1)
    return seen("lit_probattn.tasks.masked_language_model.mask_tokens", partial(task.encode, batch))


def masked_language_model() -> dict[str, Option]:
    return text_encoder(
        seed=Option(41, lambda task: hidden_words(task)["key"].seed),
        max_logits=Option(151, lambda task: task.model.output.max_logits),
        mask_probability=Option(0.35, lambda task: hidden_words(task)["probability"]),
        mask_token=Option(17, lambda task: hidden_words(task)["mask_token"]),
        next_sentence=Option(
            True, lambda task: same(task.next_sentence, task.model.next_sentence is not None)
        ),
    )


def text_classifier() -> dict[str, Option]:
    return text_encoder(
        num_classes=Option(
            7, lambda task: same(task.num_classes, task.model.classifier.out_features)
        ),
        head_dropout=Option(0.23, lambda task: task.model.head_dropout.p),
    )


ANSWERING = "lit_probattn.tasks.fine_tuning.question_answering"


def answered(task: Any, function: str) -> dict[str, Any]:
    """What a function is called with that looks for answers, or scores them."""
    rows = {"answerable": torch.ones(1, 4).bool(), "sample_ids": torch.arange(1)}
    scores = torch.zeros(1, 4)
    calls = {
        "best_spans": lambda: task._found(rows, scores, scores, "val"),
        "merge": lambda: task._merged([], "val"),
        "scores_of": partial(in_training(task).log_scores, "val"),
    }
    data = mock.Mock(version="2.0")
    with mock.patch.multiple(task, _data=lambda: data, _questions=lambda split: []):
        return seen(f"{ANSWERING}.{function}", calls[function])


def question_answering() -> dict[str, Option]:
    return text_encoder(
        n_best=Option(
            6,
            lambda task: same(
                answered(task, "best_spans")["count"], [*answered(task, "merge").values()][2]
            ),
        ),
        max_answer_length=Option(
            15, lambda task: answered(task, "best_spans")["max_answer_length"]
        ),
        null_threshold=Option(0.375, lambda task: answered(task, "scores_of")["threshold"]),
    )


# ---- series and pictures -----------------------------------------------------------------------


def starts_as_xavier(task: Any) -> bool:
    with mock.patch("lit_probattn.models.series.encoder.init_attention") as spy:
        type(task)(**task.given)
    return spy.called


def series() -> dict[str, Option]:
    return {
        **training(),
        **BODY,
        "num_layers": Option(4, lambda task: len(task.model.blocks)),
        "dropout": Option(
            0.11,
            lambda task: same(
                task.model.embedding.dropout.p,
                *(part.p for part in (block(task).dropout, block(task).mlp.dropout2)),
                task.model.head.dropout.p,
            ),
        ),
        "num_features": Option(5, lambda task: task.model.embedding.features.in_features),
        "num_classes": Option(
            7, lambda task: same(task.num_classes, task.model.head.output.out_features)
        ),
        "max_seq_len": Option(18, lambda task: rows(task.model.embedding.positions)),
        "norm": Option("layer", lambda task: type(block(task).norm1).__name__, "SeriesLayerNorm"),
        "norm_positions": Option(
            "all", lambda task: block(task).norm1.positions, others={"norm": "batch"}
        ),
        "final_norm": Option(True, lambda task: isinstance(task.model.norm, nn.LayerNorm)),
        "positions": Option(
            "fixed",
            lambda task: "model.embedding.positions" in dict(task.named_parameters()),
            False,
        ),
        "attention_init": Option("default", starts_as_xavier, False),
        "activation": Option(
            "relu",
            lambda task: (type(block(task).mlp.activation), task.model.head.activation),
            (nn.ReLU, nn.functional.relu),
        ),
        "optimizer": Option(
            "adamw", lambda task: type(task.configure_optimizers()), torch.optim.AdamW
        ),
    }


SWIN = {"patch_size": 2, "window_size": 4, "embed_dim": 8, "depths": [1, 1, 1]}
SWIN["num_heads"] = [2, 4, 8]


def fish(width: int, **given: Any) -> FiSHAttention:
    return FiSHAttention(width, mixer="mlp", noise="none", **given)


def num_replaced(task: Any) -> int:
    return sum(isinstance(module, FiSHAttention) for module in task.model.modules())


def replaced(name: str, value: Any, **more: Any) -> Option:
    where = "lit_probattn.models.images.model.replace_attention"
    return Option(value, lambda task: made(task, where)[name], **more)


def created(value: Any, place: Callable[[dict[str, Any]], Any]) -> Option:
    return Option(value, lambda task: place(made(task, "timm.create_model")))


def smoothing(task: Any) -> float:
    batch = {"inputs": torch.zeros(1, 3, 32, 32), "key_mask": torch.ones(1, 1).bool()}
    batch |= {"target": torch.zeros(1).long(), "sample_ids": torch.arange(1)}
    loss = partial(in_training(task).train().batch_loss, batch)
    return seen("torch.nn.functional.cross_entropy", loss)["label_smoothing"]


def rate(task: Any, step: int) -> float:
    return in_training(task, step).scheduled().lr


def last_rate(task: Any) -> float:
    """The rate where the cosine has come to 0."""
    with mock.patch.object(tasks.Task, "scheduled", return_value=ScheduleValues(0.0, None)):
        return rate(task, 28)


def image() -> dict[str, Option]:
    heads = {"global_heads": None, "stages": None}
    return {
        **training(),
        "attention": Option(fish, num_replaced, 2),
        "num_classes": Option(
            7, lambda task: same(task.num_classes, task.net.head.fc.out_features)
        ),
        "model_name": created("swin_small_patch4_window7_224", lambda made: made["model_name"]),
        "image_size": Option(
            32, lambda task: same(task.model.image_size, *task.net.patch_embed.img_size)
        ),
        "model_options": created(SWIN, lambda made: {name: made[name] for name in SWIN}),
        "drop_path": created(0.29, lambda made: made["drop_path_rate"]),
        "replace": Option(False, num_replaced, 0, heads, alone=True),
        "stages": replaced("stages", [1, 2]),
        "blocks": replaced("blocks", [1], others=heads, alone=True),
        "global_heads": replaced("global_heads", [2, 4]),
        "head_ratio": replaced("head_ratio", 2.0, others={"global_heads": None}, alone=True),
        "attention_weights": Option(
            "copy",
            lambda task: made(task, "lit_probattn.models.images.model.replace_attention")["init"],
        ),
        "allow_padding": replaced("allow_padding", True),
        "initial_weights": Option(
            "weights.safetensors",
            lambda task: (
                made(
                    task,
                    "lit_probattn.tasks.image_classifier.read_state_dict",
                    initial_weights="weights.safetensors",
                )["path"].name
            ),
            alone=True,
        ),
        "label_smoothing": Option(0.19, smoothing),
        "start_lr": Option(0.0078125, lambda task: rate(task, 0)),
        "final_lr": Option(0.00390625, last_rate),
        "ema_decay": Option(0.7, lambda task: task.ema.decay),
        "ema_warmup": Option(True, lambda task: task.ema.use_warmup),
        "channels_last": Option(
            True,
            lambda task: task.net.patch_embed.proj.weight.is_contiguous(
                memory_format=torch.channels_last
            ),
        ),
        "activation_checkpointing": Option(
            True, lambda task: "forward" in vars(task.net.layers[0].blocks[0])
        ),
    }


# ---- the contract ------------------------------------------------------------------------------


def released() -> dict[str, Option]:
    found = language_model(
        pre_norm=Option("residual", lambda task: type(block(task)).__name__, "NormedResidualBlock")
    )
    del found["norm_first"]  # always
    return found


OPTIONS: dict[str, dict[str, Option]] = {
    "DecisionMaking": decision(),
    "ImageClassifier": image(),
    "LanguageModeling": language_model(),
    "MaskedLanguageModeling": masked_language_model(),
    "PairClassifier": classifier(),
    "QuestionAnswering": question_answering(),
    "ReleasedLanguageModeling": released(),
    "SequenceClassifier": classifier(),
    "SeriesClassifier": series(),
    "TextClassifier": text_classifier(),
    "Translation": translation(),
}
# Options that a task does not take from the one that it is derived from.
NOT_TAKEN = {"ReleasedLanguageModeling": {"norm_first"}}


def common(name: str) -> dict[str, Any]:
    return {option: entry.value for option, entry in OPTIONS[name].items() if not entry.alone}


def build(name: str, given: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    task = TASKS[name](**given).eval()
    task.given = given
    return task


@pytest.mark.parametrize("name", TASKS)
def test_every_option_is_in_the_table_and_away_from_its_default(name):
    defaults = options_of(TASKS[name])
    assert OPTIONS[name].keys() == defaults.keys() - NOT_TAKEN.get(name, set())
    assert [n for n, entry in OPTIONS[name].items() if entry.value == defaults[n]] == []
    numbers = [v for v in common(name).values() if type(v) in (int, float)]
    assert sorted(n for n in numbers if numbers.count(n) > 1) == []


@pytest.mark.parametrize("name", TASKS)
def test_checkpoints_hold_every_option_but_callables(name):
    given = common(name)
    kept = {option: value for option, value in given.items() if not callable(value)}
    found = build(name, given).hparams
    assert {option: found[option] for option in kept} == kept


@pytest.mark.parametrize("name", TASKS)
def test_every_option_reaches_its_place(name):
    together, wrong = build(name, common(name)), {}
    for option, entry in OPTIONS[name].items():
        task = together
        if entry.others:
            task = build(name, {**common(name), **entry.others, option: entry.value})
        found = entry.place(task)
        expected = entry.value if entry.expected is None else entry.expected
        if found != expected:
            wrong[option] = (expected, found)
    assert wrong == {}


@pytest.mark.parametrize("name", TASKS)
def test_an_argument_has_a_value_of_its_type(name):
    def make(**one):
        return build(name, {**common(name), **one})

    assert refuses_other_values(make, types_of(TASKS[name])) == {"seed"}


@pytest.mark.parametrize("name", TASKS)
def test_a_task_for_other_data_is_refused(name):
    """Without the command line, which links these sizes."""
    given = common(name)
    for size, is_exact in SIZES.items():
        for more in (0, 1, -1) if size in given else ():
            task = in_training(build(name, given))
            task.trainer.datamodule = SimpleNamespace(**{size: given[size] + more})
            if more == 0 or (more < 0 and not is_exact):
                tasks.Task.setup(task, "test")
                continue
            with pytest.raises(ValueError, match=f"^{size}={given[size]} of {name} does not suit"):
                tasks.Task.setup(task, "test")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Translation", {"beam_size": 2, "n_best": 3}, "n_best must be at most"),
    ],
)
def test_values_out_of_range_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        build(name, {**common(name), **options})
