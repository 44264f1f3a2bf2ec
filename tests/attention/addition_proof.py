"""A variant is three files and one line: cosine attention, outside the package and inside it.

    python -m tests.attention.addition_proof
    python -m tests.attention.addition_proof --tests '-m "not slow" -n 2'
    python -m tests.attention.addition_proof --variant alibi_mgk

Outside: a file, a configuration and a test in a folder of their own; `fit`, a sweep that counts and
the contract use them. Inside: three files and one line in a copy of the repository; the contract,
the tests of configurations, export and a study find the variant by themselves. MGK with ALiBi is
added inside alone.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.attention.deletion_proof import clone, run_tests
from tests.support.paths import ROOT

VARIANT = "tests/support/cosine.py"
CONFIG = """\
model:
  init_args:
    attention:
      class_path: {path}
      init_args:
        num_heads: 4
        dropout: 0.0
"""
SWEEP = """\
name: cosine
model: {kind: attention, head_dim: 8}
baseline: softmax
variants:
  softmax: {attention: {config: configs/attention/softmax.yaml, init_args: {dropout: 0.0}}}
  cosine: {attention: {class_path: my_cosine.CosineAttention, init_args: {num_heads: 8}}}
grid: {embed_dim: [32], seq_len: [16, 32], backend: [reference, blockwise]}
measure: [cost]
"""
OUTSIDE_TEST = """\
from functools import partial

from lit_probattn.attention.own.contract import CHECKS, EMBED, HEAD
from my_cosine import CosineAttention


def test_the_contract():
    assert len(CHECKS) > 12
    for check in CHECKS.values():
        check.run(partial(CosineAttention, EMBED, 4, head_dim=HEAD))
"""
INSIDE_TEST = '''\
"""Cosine attention: by the definition, and what does not depend on lengths."""

import torch

from lit_probattn.attention import CosineAttention


def test_lengths_of_queries_do_not_matter():
    core = CosineAttention(12, 3).core
    query = torch.randn(2, 3, 7, 4)
    one, other = (core.choose_scores(q, query) for q in (query, 5 * query))
    torch.testing.assert_close(one, other)
'''.replace("core.choose_scores(q, query)", "_scores(core, q, query)").replace(
    "\n\ndef test_lengths",
    """

def _scores(core, query, key):
    from lit_probattn.attention import HeadCall
    from lit_probattn.attention.masks import make_masks

    sizes = (*query.shape[:3], key.shape[2])
    return core.scores(HeadCall(query, key, key, make_masks(*sizes)))


def test_lengths""",
)
LINE = "from lit_probattn.attention.cosine import CosineAttention as CosineAttention\n"
ALIBI = "tests/attention/own/alibi.py"
ALIBI_LINES = """\
from lit_probattn.attention.alibi_mgk import (
    ALiBiMGKAttention as ALiBiMGKAttention,
)
"""


def run(folder: Path, copy: Path, *words: str) -> None:
    """Run a command in a folder with a copy of the repository, and show how it ends.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    print("$ python -m", *words, flush=True)
    paths = os.pathsep.join([str(folder), str(copy)])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=copy, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines = [x for x in (done.stdout + done.stderr).splitlines() if x.strip()]
    print(*(lines[-3:] if done.returncode == 0 else lines[-30:]), sep="\n")
    done.check_returncode()


def fit_words(config: Path, out: Path) -> list[str]:
    """Return the words of a training of a few steps."""
    words = ["lit_probattn", "fit", "--config", "configs/tasks/tiny/lra_listops.yaml"]
    words += ["--config", str(config), "--config", "configs/trainer/cpu_debug.yaml"]
    words += ["--trainer.max_steps", "3", "--trainer.enable_progress_bar", "false"]
    words += ["--data.init_args.cache_dir", str(out / "data"), "--data.init_args.num_train", "16"]
    words += ["--data.init_args.num_val", "8", "--data.init_args.num_test", "8"]
    return [*words, "--run.root", str(out / "runs")]


def outside(folder: Path, copy: Path) -> None:
    """Use the variant from a folder of its own, beside an untouched repository."""
    mine = folder / "mine"
    mine.mkdir()
    shutil.copy(copy / VARIANT, mine / "my_cosine.py")
    config = mine / "my_cosine.yaml"
    config.write_text(CONFIG.format(path="my_cosine.CosineAttention"))
    (mine / "test_my_cosine.py").write_text(OUTSIDE_TEST)
    (mine / "sweep.yaml").write_text(SWEEP)
    print("outside:", *sorted(p.name for p in mine.iterdir()))
    allowed = ("--allow_code", "my_cosine")
    run(mine, copy, *fit_words(config, folder / "outside"), *allowed)
    sweep = ("profiling", "sweep", "--config", str(mine / "sweep.yaml"), *allowed)
    run(mine, copy, *sweep, "--out", str(mine / "counted"))
    run(mine, copy, "pytest", "-q", "-p", "no:cacheprovider", str(mine / "test_my_cosine.py"))


def add(copy: Path, variant: str = "cosine") -> None:
    """Put a variant into a copy of the repository: three files and one line."""
    name, source, test, line = "CosineAttention", VARIANT, INSIDE_TEST, LINE
    if variant == "alibi_mgk":
        name, source, line = "ALiBiMGKAttention", ALIBI, ALIBI_LINES
        test = (ROOT / "tests/attention/own/test_alibi.py").read_text(encoding="utf-8")
        test = test.replace("tests.attention.own.alibi", "lit_probattn.attention.alibi_mgk")
    shutil.copy(ROOT / source, copy / f"lit_probattn/attention/{variant}.py")
    config = CONFIG.format(path=f"lit_probattn.attention.{name}")
    (copy / f"configs/attention/{variant}.yaml").write_text(config)
    (copy / f"tests/attention/test_{variant}.py").write_text(test)
    init = copy / "lit_probattn/attention/__init__.pyi"
    text = init.read_text(encoding="utf-8")
    place = text.index("from lit_probattn.attention.fish.layer")
    init.write_text(text[:place] + line + text[place:])


def inside(folder: Path, copy: Path, tests: str, variant: str) -> int:
    """Add the variant to the repository and use it everywhere; return the status of the tests."""
    add(copy, variant)
    subprocess.run(["git", "add", "-A"], cwd=copy, check=True)
    subprocess.run(["git", "--no-pager", "diff", "--cached", "--stat"], cwd=copy, check=True)
    out = folder / "inside"
    run(copy, copy, *fit_words(Path(f"configs/attention/{variant}.yaml"), out))
    (checkpoint,) = sorted(out.rglob("*.ckpt"))[-1:]
    weights = str(out / "model.safetensors")
    run(copy, copy, "lit_probattn.convert.to_safetensors", str(checkpoint), weights)
    study = ["lit_probattn.analysis", "priors", "--checkpoint", str(checkpoint)]
    run(copy, copy, *study, "--out", str(out / "study"), "--device", "cpu")
    return run_tests(copy, tests)


def main() -> int:
    """Run the proof; the exit status is that of the tests inside."""
    parser = argparse.ArgumentParser(prog="python -m tests.attention.addition_proof")
    parser.add_argument("--variant", choices=("cosine", "alibi_mgk"), default="cosine")
    parser.add_argument("--tests", default="", help="arguments of pytest inside")
    options = parser.parse_args()
    variant = options.variant
    tests = options.tests or (
        f"tests/attention/test_{variant}.py tests/attention/test_contract.py "
        "tests/attention/engines tests/house/test_configs.py "
        f"-k '{variant} or {'Cosine' if variant == 'cosine' else 'ALiBi'}' -m 'not slow'"
    )
    with tempfile.TemporaryDirectory() as folder:
        copy = clone(Path(folder))
        print("repository:", ROOT)
        if variant == "cosine":
            outside(Path(folder), copy)
        return inside(Path(folder), copy, tests, variant)


if __name__ == "__main__":
    raise SystemExit(main())
