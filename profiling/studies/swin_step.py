"""Swin-T of table 5 of FiSH: sizes beside the published ones, steps beside timm's, the loader.

python -m profiling.swin_step sizes
python -m profiling.swin_step step --batch 8 --repeats 5
python -m profiling.swin_step loader --data_dir FOLDER --workers 2
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from statistics import median
from typing import Any

import timm
import torch
from torch import nn

from lit_probattn.attention import FiSHAttention, SoftmaxAttention
from lit_probattn.models.images import replace_attention
from profiling.measure.counters import CONVENTION, fvcore_macs, torch_macs
from profiling.measure.timing import time_sides

MODEL = "swin_tiny_patch4_window7_224"
STAGES = (2, 3)
# Parameters as printed, and the printed FLOPs / 1024 (see `sizes`).
PUBLISHED = {"softmax": ("28.3M", 4.51), "Hard GFiSH 6/12": ("26.2M", 4.27)}


def hard_gfish(embed_dim: int, **options: Any) -> FiSHAttention:
    """Two-layer mixing, as in the released configuration."""
    preset = {"mixer": "mlp", "mixing_bias": "all", "noise": "none", "scale_position": "before"}
    return FiSHAttention(embed_dim, **{**preset, **options})


def hard_fish(embed_dim: int, **options: Any) -> FiSHAttention:
    """One linear layer without bias."""
    return FiSHAttention(embed_dim, **{"noise": "none", "scale_position": "before", **options})


VARIANTS: dict[str, Callable[..., Any] | None] = {
    "timm": None,
    "softmax": SoftmaxAttention,
    "Hard GFiSH 6/12": hard_gfish,
    "one-layer form": hard_fish,
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


def sizes() -> None:
    """Print parameters and multiply-adds of one picture of 224 x 224."""
    print(f"Swin-T, one picture of 224 x 224. {CONVENTION}.")
    print("Printed FLOPs (10^9): 4618.24 = 4.51 x 1024 and 4372.48 = 4.27 x 1024, so the unit is")
    print("not per picture as printed; the columns give G multiply-adds per picture.")
    head = ("variant", "parameters", "printed", "products", "fvcore+norms", "aten", "printed/1024")
    print("{:16} {:>12} {:>8} {:>14} {:>14} {:>14} {:>12}".format(*head))
    for name in VARIANTS:
        model, picture = swin(name), torch.zeros(1, 3, 224, 224)
        macs, aten = fvcore_macs(model, picture), torch_macs(model, picture)
        count = sum(p.numel() for p in model.parameters())
        printed, flops = PUBLISHED.get(name, ("-", None))
        with_norms = macs.products + macs.norms
        print(
            f"{name:16} {count:12,} {printed:>8} {macs.products:14,} {with_norms:14,} "
            f"{aten.products:14,} {'-' if flops is None else flops:>12}"
        )


def step(batch: int, repeats: int, device: torch.device) -> None:
    """Print logits beside timm's from the same weights, and medians of training steps."""
    torch.manual_seed(0)
    theirs = swin("timm").to(device)
    models = {"timm": theirs}
    models["softmax, all stages"] = copy.deepcopy(theirs)
    replace_attention(models["softmax, all stages"], SoftmaxAttention, init="copy")
    for name in ("Hard GFiSH 6/12", "one-layer form"):
        models[name] = swin(name).to(device)
    pictures = torch.randn(batch, 3, 224, 224, device=device)
    with torch.no_grad():
        apart = models["softmax, all stages"](pictures) - theirs(pictures)
    print(f"largest difference of logits, softmax from the same weights: {apart.abs().max():.1e}")
    threads = torch.get_num_threads()
    print(f"{batch} pictures, {device}, {threads} threads, torch {torch.__version__}")
    for mode in ("training step", "inference"):
        training = mode != "inference"

        def call(model: nn.Module, training: bool = training) -> None:
            with torch.set_grad_enabled(training):
                loss = model.train(training)(pictures).logsumexp(-1).mean()
            if training:
                loss.backward()
                model.zero_grad(set_to_none=True)

        times = time_sides(
            {name: partial(call, model) for name, model in models.items()},
            device=device,
            warmup=1,
            repeats=repeats,
        )
        for name, seconds in times.items():
            pairs = zip(seconds, times["timm"], strict=True)
            ratio = median(mine / theirs for mine, theirs in pairs)
            print(f"{mode:14} {name:20} median {median(seconds):.3f} s, ratio to timm {ratio:.3f}")


def loader(data_dir: str | None, workers: int, batch: int, repeats: int) -> None:
    """Print pictures per second of the training loader, augmented as in the recipe."""
    from datamodules import ImageNet

    data = ImageNet(data_dir=data_dir, batch_size=batch, num_workers=workers)
    data.setup()
    batches = iter(data.train_dataloader())
    for _ in islice(batches, 4):  # the workers start, and fill what they fetch ahead
        pass
    begin = time.perf_counter()
    for _ in islice(batches, repeats):
        pass
    seconds = time.perf_counter() - begin
    print(
        f"{repeats * batch / seconds:.1f} pictures per second: {workers} workers, "
        f"{len(data.split('train'))} pictures in turn, {repeats} batches of {batch}, 224 x 224, "
        "decoded, augmented and mixed"
    )


def main() -> None:
    """Run a command."""
    parser = argparse.ArgumentParser(
        prog="python -m profiling.swin_step", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("command", choices=("sizes", "step", "loader"))
    parser.add_argument("--batch", type=int, default=8, help="pictures per step")
    parser.add_argument("--repeats", type=int, default=5, help="timed steps of each side")
    parser.add_argument("--device", default="cpu", help="torch device")
    parser.add_argument("--data_dir", help="folder of ImageNet; LIT_PROBATTN_DATA without it")
    parser.add_argument("--workers", type=int, default=2, help="loader processes")
    options = parser.parse_args()
    if options.command == "sizes":
        sizes()
    elif options.command == "loader":
        loader(options.data_dir, options.workers, options.batch, options.repeats)
    else:
        step(options.batch, options.repeats, torch.device(options.device))


if __name__ == "__main__":
    main()
