"""The main job, small: train softmax and sMGK with half the heads on ListOps, compare, report.

    python -m lit_probattn.quickstart

Each variant is an ordinary run of the command line (`fit`, then `test` of the best checkpoint), so
an interrupted quickstart goes on where it stopped. The report says how the two compare in accuracy,
parameters, operations, step time and peak memory.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
import torch

from lit_probattn.attention import recorded_choices
from lit_probattn.configs import attention_entry, attention_factory, read_yaml
from lit_probattn.models.classifiers import Classifier
from lit_probattn.randomness import RandomKey
from lit_probattn.records.provenance import device_name, git_revision, versions
from profiling.cost.count import attention_layers
from profiling.measure.counters import torch_flops
from profiling.measure.memory import peak_bytes
from profiling.measure.timing import quantile, summarise, time_sides

# Not kept by git: the committed report is an example.
OUT = Path("runs/quickstart-report")
TASK = "configs/tasks/lra_listops_quickstart.yaml"
VARIANTS = {"softmax, 8 heads": "softmax", "sMGK, 4 heads": "smgk"}
BASELINE = "softmax, 8 heads"
FULL_LENGTH, FULL_BATCH = 2048, 2  # the length of the Long Range Arena's ListOps
SEED = 0


def run_name(config: str) -> str:
    """Name of a variant's run below `runs/`."""
    return f"quickstart-{config}"


def _attention_file(config: str) -> str:
    return f"configs/attention/{config}.yaml"


def train_and_test(config: str, root: Path, device: str) -> tuple[dict[str, Any], pd.DataFrame]:
    """Run `fit` and `test` in processes of their own; return test results and learning curves."""
    common = ["--run.root", str(root), "--run.name", run_name(config)]
    fit = [
        *(sys.executable, "-m", "lit_probattn", "fit", "--config", TASK),
        *("--config", _attention_file(config), "--ckpt_path", "auto", *common),
        *("--trainer.accelerator", device, "--trainer.devices", "1"),
    ]
    print(f"\n$ {' '.join(['python', *fit[1:]])}", flush=True)
    subprocess.run(fit, check=True)
    folder = max((root / run_name(config)).iterdir(), key=lambda p: p.stat().st_mtime)
    test = [sys.executable, "-m", "lit_probattn", "test", "--config", str(folder / "config.yaml")]
    print(f"\n$ {' '.join(['python', *test[1:]])} --ckpt_path best", flush=True)
    subprocess.run([*test, "--ckpt_path", "best"], check=True)
    results = max(folder.glob("test-*.json"), key=lambda p: p.stat().st_mtime)
    return json.loads(results.read_text()), pd.read_csv(folder / "metrics.csv")


def build(config: str, seq_len: int, device: torch.device) -> Classifier:
    """Build a variant's model with the sizes of the task file."""
    sizes = read_yaml(TASK)["model"]["init_args"]
    entry = attention_entry(_attention_file(config))
    torch.manual_seed(SEED)
    return Classifier(
        attention_factory(entry["class_path"], entry["init_args"]),
        vocab_size=32,
        num_classes=10,
        max_seq_len=seq_len,
        **{k: sizes[k] for k in ("embed_dim", "head_dim", "num_layers", "mlp_dim", "dropout")},
    ).to(device)


def reference_macs(config: str) -> int:
    """Count the multiply-adds of one sequence of full length, by the variant's equation."""
    with torch.device("meta"):
        model = build(config, FULL_LENGTH, torch.device("meta")).eval()
        inputs = torch.zeros(1, FULL_LENGTH, dtype=torch.int64)
    for layer in attention_layers(model):
        layer.backend = "reference"

    def forward() -> None:
        with torch.no_grad():
            model(inputs)

    return torch_flops(forward) // 2


def measure(device: torch.device) -> dict[str, dict[str, Any]]:
    """Measure parameters, operations, and one training step of both variants at full length."""
    inputs = torch.randint(1, 17, (FULL_BATCH, FULL_LENGTH), device=device)
    key = RandomKey(SEED)
    rows: dict[str, dict[str, Any]] = {}
    steps = {}
    for name, config in VARIANTS.items():
        model = build(config, FULL_LENGTH, device)

        def step(model: Classifier = model) -> None:
            model.zero_grad()
            model(inputs, rng=key).logsumexp(-1).sum().backward()

        steps[name] = step
        rows[name] = {
            "num_parameters": sum(p.numel() for p in model.parameters()),
            "macs_per_sequence": reference_macs(config),
            "peak_memory_bytes": peak_bytes(step, device),
        }
    seconds = time_sides(steps, device=device, warmup=1, repeats=9, max_seconds=45.0)
    for name, times in seconds.items():
        ratios = [a / b for a, b in zip(times, seconds[BASELINE], strict=True)]
        rows[name] |= {
            "step_time_ratio": quantile(ratios, 0.5),
            "step_time_ratio_p20": quantile(ratios, 0.2),
            "step_time_ratio_p80": quantile(ratios, 0.8),
            "num_timed_steps": summarise(times).repeats,
        }
    return rows


def draw_curves(curves: dict[str, pd.DataFrame], path: Path) -> None:
    """Draw training loss and validation accuracy over optimiser steps."""
    sns.set_theme(style="whitegrid")
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for name, data in curves.items():
        loss = data.dropna(subset=["train/loss"])
        smooth = loss["train/loss"].rolling(5, min_periods=1).mean()
        sns.lineplot(x=loss["step"], y=smooth, ax=axes[0], label=name)
        accuracy = data.dropna(subset=["val/accuracy"])
        sns.lineplot(x=accuracy["step"], y=100 * accuracy["val/accuracy"], ax=axes[1], marker="o")
    axes[0].set(xlabel="optimiser step", ylabel="training loss, nats")
    axes[1].set(xlabel="optimiser step", ylabel="validation accuracy, %")
    axes[1].axhline(10, color="grey", linestyle="--", linewidth=1)
    axes[1].text(
        0.02, 10.6, "chance", color="grey", fontsize=9, transform=axes[1].get_yaxis_transform()
    )
    figure.suptitle("ListOps, 5 to 63 tokens (quickstart, one seed; loss: mean of 5 logged values)")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def write_report(
    table: pd.DataFrame, folder: Path, device: torch.device, seconds: float, backends: str
) -> str:
    """Write `rows.csv`, `ratios.csv` and `report.md`; return the table as text."""
    table.to_csv(folder / "rows.csv")
    columns = ["num_parameters", "macs_per_sequence", "peak_memory_bytes"]
    ratios = table[columns] / table.loc[BASELINE, columns]
    ratios.columns = pd.Index(["parameters", "multiply-adds", "peak memory"])
    ratios["step time"] = table["step_time_ratio"]
    ratios.to_csv(folder / "ratios.csv", float_format="%.4f")
    lines = [
        "| variant | test accuracy, % | parameters | multiply-adds per sequence, M | "
        "step time, ratio [p20, p80] | peak memory of a step, MiB (ratio) |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in table.iterrows():
        memory = row["peak_memory_bytes"] / 2**20
        lines.append(
            f"| {name} | {100 * row['test_accuracy']:.1f} | {int(row['num_parameters']):,} | "
            f"{row['macs_per_sequence'] / 1e6:.0f} ({ratios.loc[name, 'multiply-adds']:.3f}) | "
            f"{row['step_time_ratio']:.2f} [{row['step_time_ratio_p20']:.2f}, "
            f"{row['step_time_ratio_p80']:.2f}] | {memory:.0f} "
            f"({ratios.loc[name, 'peak memory']:.2f}) |"
        )
    text = "\n".join(lines)
    task = read_yaml(TASK)
    (folder / "report.md").write_text(
        f"""# Quickstart: softmax with 8 heads and sMGK with 4 heads on ListOps

Command: `python -m lit_probattn.quickstart` (or `make quickstart`).
Data: generated ListOps, expressions of 5 to 63 tokens, {task["data"]["init_args"]["num_train"]:,} \
for training. Recipe: `{TASK}`, {task["trainer"]["max_steps"]} steps, seed \
{task["seed_everything"]}, one run each. The test set is scored by the checkpoint with the best \
validation accuracy. This shows that the machinery works: one seed on short expressions compares \
no methods.
Machine: {device_name(str(device))}; {versions()}; revision {git_revision()}; {seconds:.0f} s.

{text}

Accuracy is from the training above. The other columns are of the same model at the Long Range \
Arena's full length, N = {FULL_LENGTH}: multiply-adds in matrix products of one forward pass by \
the equations (1 multiply-add = 2 FLOP; the reduction of a mixture to fused attention spends 2K \
products per pair and head where the equation has K + 1); time and peak memory of one training \
step (forward and backward, batch {FULL_BATCH}, float32, attention dropout 0.1), both variants in \
turns in one process, median over {int(table["num_timed_steps"].iloc[0])} rounds of the ratio to \
the baseline. Peak memory is the allocator's, above what was resident. Attention backends: \
{backends}.

![learning curves](figures/learning_curves.png)
""",
        encoding="utf-8",
    )
    return text


def main() -> None:
    """Run the quickstart."""
    parser = argparse.ArgumentParser(
        prog="python -m lit_probattn.quickstart",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=OUT, help="report folder")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the runs")
    options = parser.parse_args()
    if not Path(TASK).is_file():
        parser.error(f"{TASK} not found: run the quickstart in the root of the repository")
    begin = time.perf_counter()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    trained, curves = {}, {}
    for name, config in VARIANTS.items():
        trained[name], curves[name] = train_and_test(
            config, options.runs, "gpu" if kind == "cuda" else "cpu"
        )
    print("\nmeasuring one training step at full length …", flush=True)
    rows = measure(torch.device(kind))
    for name, results in trained.items():
        rows[name]["test_accuracy"] = results["test/accuracy"]
    table = pd.DataFrame.from_dict(rows, orient="index").rename_axis("variant")
    (options.out / "figures").mkdir(parents=True, exist_ok=True)
    draw_curves(curves, options.out / "figures" / "learning_curves.png")
    backends = "; ".join(f"{call}: {chosen}" for call, chosen in recorded_choices().items())
    seconds = time.perf_counter() - begin
    text = write_report(table, options.out, torch.device(kind), seconds, backends)
    print(f"\n{text}\n\nreport: {options.out / 'report.md'} ({seconds:.0f} s)")


if __name__ == "__main__":
    main()
