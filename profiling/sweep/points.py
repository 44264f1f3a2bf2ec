"""Measure one point: build the model, count or run it, and return the rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lit_probattn.attention import Attention, AttentionFactory
from lit_probattn.base.errors import UnsupportedError
from lit_probattn.base.memory import (
    Resident,
    StepFunction,
    predicted_bytes,
    resident_bytes,
)
from lit_probattn.base.provenance import command_line, device_name, git_revision, versions
from lit_probattn.configs import attention_factory
from lit_probattn.measure.memory import (
    cuda_peak_bytes,
    measured_cpu_bytes,
    nvml_energy_j,
    nvml_used_bytes,
)
from lit_probattn.measure.timing import captured, quantile, time_columns, time_sides
from profiling.cost.count import Setting, count_costs
from profiling.cost.exact import ModelShape
from profiling.cost.models import (
    AttentionOnly,
    LanguageModel,
    PairModel,
    SequenceModel,
    TranslationModel,
)
from profiling.measure.rows import ProfileRow, Source
from profiling.sweep.plan import Point

MODELS: dict[str, Callable[..., nn.Module]] = {
    "attention": AttentionOnly.build,
    "language_model": LanguageModel,
    "classifier": SequenceModel,
    "pair_classifier": PairModel,
    "encoder_decoder": TranslationModel,
}
_FACTORIES: dict[str, AttentionFactory] = {}
# Models with an output layer over the vocabulary and a causal mask.
_WRITERS = ("language_model", "encoder_decoder")


def _factory(class_path: str, arguments: Mapping[str, Any]) -> AttentionFactory:
    """Return the factory of an attention; parsing its arguments takes longer than a small model."""
    key = f"{class_path} {json.dumps(arguments, sort_keys=True, default=str)}"
    if key not in _FACTORIES:
        _FACTORIES[key] = attention_factory(class_path, arguments)
    return _FACTORIES[key]


def build_model(point: Point) -> nn.Module:
    """Return the point's model on the current default device, in the point's mode.

    Raises:
        ConfigError, ValueError: the attention layer rejects its arguments or sizes.
    """
    arguments = {**point.init_args, "backend": point.backend}
    attention = _factory(point.class_path, arguments)
    sizes = dict(point.sizes, embed_dim=point.embed_dim, max_seq_len=point.seq_len)
    causal, output = sizes.pop("is_causal"), sizes.pop("include_output_layer")
    if point.model == "attention":
        sizes = {k: sizes[k] for k in ("embed_dim", "head_dim")}
    if point.model in ("attention", *_WRITERS):
        sizes["is_causal"] = causal
    if point.model in _WRITERS:
        sizes.pop("num_classes", None)
        sizes["include_output_layer"] = output
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, point.dtype))
    try:
        model = MODELS[point.model](attention, **sizes)
    finally:
        torch.set_default_dtype(before)
    return model.train(point.mode == "train")


def make_inputs(point: Point, device: torch.device | str) -> Tensor:
    """Return random inputs: features (B, N, C), tokens (B, N), or pairs of texts (B, 2, N).

    A pair is the two inputs of a pair classifier, or source and target.
    """
    shape: tuple[int, ...] = (point.batch_size, point.seq_len)
    if point.model == "attention":
        dtype = getattr(torch, point.dtype)
        return torch.randn(*shape, point.embed_dim, dtype=dtype, device=device)
    if point.model in ("pair_classifier", "encoder_decoder"):
        shape = (point.batch_size, 2, point.seq_len)
    return torch.randint(point.sizes["vocab_size"], shape, device=device)


def model_shape(point: Point) -> ModelShape | None:
    """Return the sizes for the closed forms of the model; None for a single attention layer."""
    if point.model == "attention":
        return None
    sizes, c = point.sizes, point.embed_dim
    vocab, hidden = sizes["vocab_size"], sizes["mlp_dim"]
    num_sequences, norm_first, has_decoder = 1, True, point.model == "encoder_decoder"
    if has_decoder:  # the output layer is tied to the target embedding
        embedding, head_parameters, norm_first = 2 * vocab * c, 0, False
        head_macs = point.seq_len * c * vocab if sizes["include_output_layer"] else 0
    elif point.model == "language_model":
        clusters = sum(c < vocab for c in (20000, 40000, 200000))
        embedding = vocab * c + vocab + clusters * (c + 1)
        head_parameters, norm_first = 0, False
        head_macs = point.seq_len * c * (vocab + clusters) if sizes["include_output_layer"] else 0
    else:
        num_sequences = 2 if point.model == "pair_classifier" else 1
        width = 4 * c if point.model == "pair_classifier" else c
        classes = sizes["num_classes"]
        embedding = (vocab + point.seq_len) * c
        head_parameters = width * hidden + hidden + hidden * classes + classes
        head_macs = width * hidden + hidden * classes
    return ModelShape(
        num_layers=sizes["num_layers"],
        embed_dim=c,
        mlp_dim=hidden,
        seq_len=point.seq_len,
        num_sequences=num_sequences,
        batch_size=point.batch_size,
        norm_first=norm_first,
        embedding_parameters=embedding,
        head_parameters=head_parameters,
        head_macs=head_macs,
        has_decoder=has_decoder,
    )


def point_rows(
    point: Point, entries: list[dict[str, Any]], layer: Attention | None
) -> list[ProfileRow]:
    """Complete the entries of a point with the columns that all its rows share.

    Settings and sizes of the point are the columns of the same names.
    """
    settings = {**point.sizes, **vars(point)}
    shared: dict[str, Any] = {
        **{name: settings[name] for name in ProfileRow.model_fields if name in settings},
        "point_id": point.point_id,
        "rows_in_point": len(entries),
        "attention_class": point.class_path.rsplit(".", 1)[-1],
        "attention_args": json.dumps(dict(point.init_args), sort_keys=True),
        "num_heads": point.init_args.get("num_heads") if layer is None else layer.num_heads,
        "source": "measured",
        "scope": "attention" if point.model == "attention" else "model",
        "status": "ok",
        "device": point.device if point.quantity != "cost" else "meta",
        "versions": versions(),
        "git_revision": git_revision(),
        "command": command_line(),
    }
    name = device_name("meta") if point.quantity == "cost" else _safe_device_name(point.device)
    return [
        ProfileRow.of({**shared, "device_name": name, **entry, "row_index": index})
        for index, entry in enumerate(entries)
    ]


def _safe_device_name(device: str) -> str:
    try:
        return device_name(device)
    except (RuntimeError, AssertionError):
        return f"{device} (not available)"


def failed_rows(point: Point, reason: str, status: str = "failed") -> list[ProfileRow]:
    """Return the single row of a point that could not be measured, with the reason."""
    return point_rows(point, [_without_numbers(reason, status)], None)


def skipped_rows(point: Point, reason: str, peak: int, resident: int) -> list[ProfileRow]:
    """Return the rows of a point that was skipped because of its predicted memory."""
    entries = [_without_numbers(reason, "skipped")]
    if point.quantity == "memory":
        entries.append(_memory("predicted", peak, resident))
    return point_rows(point, entries, None)


def _without_numbers(reason: str, status: str) -> dict[str, Any]:
    return {"status": status, "reason": " ".join(reason.split())[:500]}


def _memory(source: Source, peak: int, resident: int, **more: Any) -> dict[str, Any]:
    sizes = {"peak_memory_bytes": peak, "resident_memory_bytes": resident}
    return {"source": source, **sizes, **more}


# ---------------------------------------------------------------------- quantities
def measure_cost(point: Point) -> list[ProfileRow]:
    """Count multiply-adds and parameters on the meta device; add the closed forms."""
    setting = Setting(
        build=partial(build_model, point),
        make_inputs=partial(make_inputs, point),
        shape=model_shape(point),
        batch_size=point.batch_size,
        seq_len=point.seq_len,
        backend=point.backend,
        train=point.mode == "train",
        dtype=getattr(torch, point.dtype),
    )
    layer, entries = count_costs(setting)
    return point_rows(point, entries, layer)


def make_step(point: Point, device: torch.device) -> tuple[StepFunction, Resident]:
    """Return a function that runs one step, in training with backward, and the resident memory."""
    with torch.device(device):
        model = build_model(point)
        inputs = make_inputs(point, device)

    def step() -> None:
        if point.mode == "eval":
            with torch.no_grad():
                model(inputs)
            return
        out = model(inputs)
        out.backward(torch.ones_like(out))  # dense, like the gradient of a loss
        model.zero_grad(set_to_none=True)

    return step, (model, inputs)


def measure_memory(point: Point, predicted: tuple[int, int] | None = None) -> list[ProfileRow]:
    """Measure the peak memory of one step; add the prediction by fake tensors.

    Args:
        predicted: peak above resident memory, and resident memory, if known. Otherwise they are
            predicted now, except on a GPU, which would be idle meanwhile.
    """
    device = torch.device(point.device)
    build_on_cpu = partial(make_step, point, torch.device("cpu"))
    torch.manual_seed(point.seed)
    if predicted is None and device.type == "cpu":
        predicted = predicted_bytes(build_on_cpu)
    if device.type == "cpu":
        measured = _memory("measured", *measured_cpu_bytes(build_on_cpu))
    else:
        step, resident = make_step(point, device)
        for _ in range(3):
            step()
        allocated, reserved = cuda_peak_bytes(step, device)
        measured = _memory(
            "measured",
            allocated,
            resident_bytes(resident),
            peak_reserved_bytes=reserved,
            nvml_memory_bytes=nvml_used_bytes(device),
        )
    entries = [measured] if predicted is None else [measured, _memory("predicted", *predicted)]
    return point_rows(point, entries, None)


def measure_time(point: Point) -> list[ProfileRow]:
    """Time one step: warm-up, repeats, median, quantiles, and energy if the device reports it.

    On a GPU also the replayed CUDA graph of a step.
    """
    device, timing = torch.device(point.device), point.timing
    torch.manual_seed(point.seed)
    step, _ = make_step(point, device)
    for _ in range(timing["warmup"]):
        step()
    limits: dict[str, Any] = {"repeats": timing["repeats"], "max_seconds": timing["max_seconds"]}

    def seconds_of(function: Callable[[], object]) -> list[float]:
        return time_sides({"step": function}, device=device, warmup=0, **limits)["step"]

    before = nvml_energy_j(device)
    seconds = seconds_of(step)
    after = nvml_energy_j(device)
    energy = None if before is None or after is None else (after - before) / len(seconds)
    entry: dict[str, Any] = {**time_columns(seconds), "energy_j": energy}
    if device.type == "cuda":
        try:
            entry["graph_median_s"] = quantile(seconds_of(captured(step, device)), 0.5)
        except UnsupportedError as error:
            entry["reason"] = f"no CUDA graph: {error}"
    return point_rows(point, [entry], None)


MEASURES: dict[str, Callable[[Point], list[ProfileRow]]] = {
    "cost": measure_cost,
    "time": measure_time,
}


def measure_point(point: Point, predicted: tuple[int, int] | None = None) -> list[ProfileRow]:
    """Return the rows of a point; an error becomes a failed row with the reason.

    Args:
        predicted: its memory, see `measure_memory`.
    """
    if point.problem is not None:
        return failed_rows(point, point.problem)
    try:
        if point.quantity == "memory":
            return measure_memory(point, predicted)
        return MEASURES[point.quantity](point)
    except Exception as error:
        kind = type(error).__name__
        return failed_rows(point, f"{kind}: {error}" if str(error) else kind)
