"""Swin-T of table 5 of FiSH: sizes beside the published ones, steps beside timm's, the loader.

python -m profiling study swin_step sizes
python -m profiling study swin_step step --batch 8 --repeats 5
python -m profiling study swin_step loader --data_dir FOLDER --workers 2
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

import pandas as pd
import timm
import torch
from torch import nn

from datamodules import ImageNet
from lit_probattn.attention import FiSHAttention, SoftmaxAttention
from lit_probattn.models.images import replace_attention
from lit_probattn.records.tables import counted
from profiling.measure.counters import CONVENTION, fvcore_macs, torch_macs
from profiling.measure.timing import time_once
from profiling.studies.study import TIMED, Report, backend_of, command, flag, measure_sides, shown

MODEL = "swin_tiny_patch4_window7_224"
STAGES = (2, 3)
# Parameters as printed, and the printed FLOPs / 1024 (see `sizes`).
PUBLISHED = {"softmax": ("28.3M", 4.51), "Hard GFiSH 6/12": ("26.2M", 4.27)}
HARD_FISH = partial(FiSHAttention, noise="none", scale_position="before")
VARIANTS: dict[str, Callable[..., Any] | None] = {
    "timm": None,
    "softmax": SoftmaxAttention,
    # Two-layer mixing, as in the released configuration; then one linear layer without bias.
    "Hard GFiSH 6/12": partial(HARD_FISH, mixer="mlp", mixing_bias="all"),
    "one-layer form": HARD_FISH,
}


def swin(variant: str, device: torch.device | str = "cpu") -> nn.Module:
    """Return Swin-T with one of the variants in its last two stages."""
    with torch.device(device):
        model: nn.Module = timm.create_model(MODEL, pretrained=False)
        attention = VARIANTS[variant]
        if attention is not None:
            ratio = None if attention is SoftmaxAttention else 2.0
            replace_attention(model, attention, stages=STAGES, head_ratio=ratio)
    return model.eval()


def sizes(options: argparse.Namespace) -> Report:
    """Count parameters and multiply-adds of one picture of 224 x 224."""
    rows = []
    for name in VARIANTS:
        model, picture = swin(name), torch.zeros(1, 3, 224, 224)
        macs = fvcore_macs(model, picture)
        printed, flops = PUBLISHED.get(name, (None, None))
        rows.append(
            {
                "variant": name,
                "parameters": sum(p.numel() for p in model.parameters()),
                "printed": printed,
                "products": macs.products,
                "fvcore + norms": macs.products + macs.norms,
                "aten": torch_macs(model, picture).products,
                "printed / 1024": flops,
            }
        )
    table = pd.DataFrame(rows)
    return Report(
        "Swin-T, one picture of 224 x 224",
        table,
        {"Parameters and multiply-adds": table},
        [
            CONVENTION,
            "Printed FLOPs (10^9): 4618.24 = 4.51 x 1024 and 4372.48 = 4.27 x 1024, so the unit is "
            "not per picture as printed; the last column gives G multiply-adds per picture",
        ],
    )


def step(options: argparse.Namespace) -> Report:
    """Time training steps and inference, and compare logits with timm's from the same weights."""
    device = torch.device(options.device)
    models = {"timm": swin("timm").to(device)}
    models["softmax, all stages"] = copy.deepcopy(models["timm"])
    replace_attention(models["softmax, all stages"], SoftmaxAttention, init="copy")
    for name in ("Hard GFiSH 6/12", "one-layer form"):
        models[name] = swin(name).to(device)
    pictures = torch.randn(options.batch, 3, 224, 224, device=device)
    with torch.no_grad():
        apart = models["softmax, all stages"](pictures) - models["timm"](pictures)

    def call(model: nn.Module, training: bool) -> None:
        with torch.set_grad_enabled(training):
            loss = model.train(training)(pictures).logsumexp(-1).mean()
        if training:
            loss.backward()
            model.zero_grad(set_to_none=True)

    rows = []
    for mode in ("training step", "inference"):
        training = mode == "training step"
        sides = {name: partial(call, model, training) for name, model in models.items()}
        found = measure_sides(sides, options, lambda _: {"timm": "timm"})
        for name, side in sides.items():
            backend = "timm's own" if name == "timm" else backend_of(side)
            rows.append({"mode": mode, "side": name, "backend": backend, **found[name]})
    frame = pd.DataFrame(rows)
    return Report(
        "Steps of Swin-T beside timm's",
        frame,
        {
            f"{counted(options.batch, 'picture')} of 224 x 224; attention dropout 0 on all "
            "sides": shown(frame, "mode", "side", "backend")
        },
        [f"Largest difference of logits, softmax from the same weights: {apart.abs().max():.1e}"],
        ("side", "time_over_timm", "mode"),
    )


def loader(options: argparse.Namespace) -> Report:
    """Count pictures per second of the training loader, augmented as in the recipe."""
    sizes = {"batch_size": options.batch, "num_workers": options.workers}
    data = ImageNet(data_dir=options.data_dir or None, **sizes)
    data.setup()
    batches = iter(data.train_dataloader())

    def load(count: int) -> None:
        for _ in islice(batches, count):
            pass

    load(4)  # the workers start, and fill what they fetch ahead
    seconds = time_once(partial(load, options.repeats), torch.device("cpu"))
    rate = options.repeats * options.batch / seconds
    table = pd.DataFrame([{"workers": options.workers, "pictures per second": rate}])
    what = f"{options.repeats} batches of {options.batch}, decoded, augmented and mixed"
    note = f"{len(data.split('train'))} pictures in turn, 224 x 224"
    return Report("Training loader of ImageNet", table, {what: table}, [note])


main = command(
    __name__,
    __doc__,
    {"sizes": sizes, "step": step, "loader": loader},
    {
        **TIMED,
        "batch": flag(8, "pictures of a step", least=1),
        "data_dir": flag("", "folder of ImageNet; LIT_PROBATTN_DATA without it"),
        "workers": flag(2, "loader processes", least=0),
    },
)
