"""Kernels compiled ahead of time for sm_80 and sm_90: no spills in forward, memory that fits."""

from __future__ import annotations

import os
import subprocess
import sys

import pandas as pd
import pytest

from lit_probattn.configs import ConfigError
from lit_probattn.kernels.runtime import Shape, default_launch, interpreted
from profiling.kernels.cases import compile_cases
from profiling.kernels.compile import SHARED_LIMIT, CompiledRow, compile_rows, faults
from tests.support.paths import ROOT


def compile_table(folder, *flags):
    """Run the command in a process of its own, where kernels are not interpreted."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "profiling", "kernels", "--compile-table", "--out", folder]
    done = subprocess.run(
        [*command, *flags], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert (folder / "rows.csv").exists(), done.stderr
    return pd.read_csv(folder / "rows.csv"), done


def check(rows):
    forward = rows[rows.kernel.str.contains("forward")]
    assert (forward.spill_bytes == 0).all()
    assert (rows.shared_bytes <= rows.capability.map(SHARED_LIMIT)).all()
    assert (rows.registers <= 255).all()
    hopper = rows[(rows.capability == 90) & ~rows.kernel.str.contains("delta")]
    assert hopper.wgmma.all()


@pytest.mark.timeout(600)
def test_forward_kernels_do_not_spill_at_the_papers_head_size(tmp_path):
    flags = ("--cases", "softmax,mgk", "--head-dims", "32", "--passes", "forward")
    rows, done = compile_table(tmp_path, *flags, "--capabilities", "90")
    assert done.returncode == 0
    assert set(rows.case) >= {"softmax", "mgk soft", "mgk hard", "smgk soft"}
    assert set(rows.capability) == {90}
    check(rows)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_kernel_compiles_at_every_head_size(tmp_path, dtype):
    rows, done = compile_table(tmp_path, "--cases", "softmax,mgk", "--dtypes", dtype)
    assert done.returncode == 0
    assert set(rows.head_dim) == {16, 32, 64, 128}
    assert set(rows.capability) == {80, 90}
    if dtype != "float32":
        check(rows)


def test_faults_name_what_must_not_be():
    good = CompiledRow(
        "mgk", "forward_kernel", 64, "bfloat16", 90, "128x64", 8, 3, 200, 0, 1000, True, 1.0
    )
    fields = dict(vars(good))
    spilling = CompiledRow(**{**fields, "spill_bytes": 8})
    large = CompiledRow(**{**fields, "shared_bytes": 228 * 1024})
    backward = CompiledRow(**{**fields, "kernel": "grad_key_kernel", "spill_bytes": 8})
    assert faults([good, backward]) == []
    found = faults([spilling, large])
    assert "spills 8 bytes" in found[0]
    assert "233472 bytes of shared memory" in found[1]


@pytest.mark.skipif(not interpreted(), reason="kernels are compiled in this process")
def test_interpreting_and_compiling_do_not_mix():
    with pytest.raises(ConfigError, match="unset TRITON_INTERPRET"):
        list(compile_rows(compile_cases(), [32], [90]))


def test_default_tiles_are_smaller_where_more_has_to_be_held():
    narrow = default_launch(Shape("softmax_forward", 64, 1, 2))
    wide = default_launch(Shape("mgk_forward", 128, 2, 2))
    exact = default_launch(Shape("mgk_forward", 64, 2, 4))
    sizes = [x.block_q * x.block_k for x in (narrow, wide, exact)]
    assert sizes == sorted(sizes, reverse=True)
