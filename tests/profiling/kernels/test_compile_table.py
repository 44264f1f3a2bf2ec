"""Kernels compiled ahead of time for sm_80 and sm_90: no spills in forward, memory that fits."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from itertools import product

import pandas as pd
import pytest
import torch
import triton
from packaging.version import Version

from lit_probattn.base.errors import ConfigError
from lit_probattn.kernels.fish.plan import Heads, make_plan
from lit_probattn.kernels.runtime import Shape, default_launch, interpreted, recording
from profiling.kernels import compile as compiling
from profiling.kernels.cases import compile_cases
from profiling.kernels.compile import (
    HEAD_DIMS,
    SHARED_LIMIT,
    CompiledRow,
    compile_rows,
    faults,
    recorded_launches,
)
from tests.support.fresh import fresh_python
from tests.support.paths import ROOT
from tests.support.slow import SHARES, some_of


def compile_table(folder, *flags):
    """Run the command in a process of its own, where kernels are not interpreted."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "profiling", "kernels", "--compile-table", "--out", folder]
    done = subprocess.run(
        [*command, *flags], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert (folder / "rows.csv").exists(), done.stderr
    return pd.read_csv(folder / "rows.csv"), done


STORED = ROOT / "reports/kernels_aot/rows.csv"
# Bytes per thread of the worst launch: none with the Triton of GPU machines, a few with later ones.
OLD = Version(triton.__version__) < Version("3.7")
MOST_SPILLED = 0 if OLD else 16
# The same of the backward tiles that are the fastest on an H200 (reports/kernels_aot).
MOST_SPILLED_BACKWARD = 148 if OLD else 200


def verdict(rows):
    """What the command ends with for these rows: 1 where they have faults."""
    return int(bool(faults([CompiledRow(**row) for row in rows.to_dict("records")])))


def spills_more_than_stored(rows):
    """Rows that spill more than the stored table has for their launch, or compute rows twice."""
    place = ["case", "head_dim", "capability", "kernel"]
    keyed = [x.assign(nth=x.groupby(place).cumcount()) for x in (rows, pd.read_csv(STORED))]
    both = keyed[0].merge(keyed[1], on=[*place, "nth"], how="left", suffixes=("", "_stored"))
    more = ~(both.spill_bytes <= both.spill_bytes_stored)
    return both[more | (both.doubled & ~both.doubled_stored.eq(True))]


def check(rows):
    forward = rows[rows.kernel.str.contains("forward") & (rows.capability == 90)]
    assert (forward.spill_bytes <= MOST_SPILLED).all()
    assert (rows.shared_bytes <= rows.capability.map(SHARED_LIMIT)).all()
    assert (rows.registers <= 255).all()
    products = rows.kernel.str.contains("forward|grad")  # the others add and scale
    assert rows[(rows.capability == 90) & products].wgmma.all()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_forward_kernels_do_not_spill_at_the_papers_head_size(tmp_path):
    flags = ("--cases", "smgk hard with dropout", "--head-dims", "32", "--passes", "forward")
    rows, done = compile_table(tmp_path, *flags, "--capabilities", "90")
    assert done.returncode == 0
    assert set(rows.case) == {"smgk hard with dropout"}
    assert set(rows.capability) == {90}
    check(rows)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_worst_cases_do_not_spill_at_the_papers_head_size(tmp_path):
    """Two components, with dropout; the 3 launches of a call, δ aside, or 4 with keys apart."""
    flags = ("--cases", "mgk soft with dropout", "--head-dims", "64", "--capabilities", "90")
    rows, done = compile_table(tmp_path, *flags)
    assert done.returncode == 0
    assert set(rows.case) == {"mgk soft with dropout", "smgk soft with dropout"}
    check(rows)
    assert rows.spill_bytes.max() <= MOST_SPILLED


DENSE = ("--cases", "softmax,mgk soft,mgk hard,smgk", "--head-dims", "32,64,128")


def unexpected(rows, more=0):
    """Rows that spill more, or compute rows twice."""
    return rows[(rows.spill_bytes > more) | rows.doubled]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_defaults_of_the_dense_kernels_spill_only_where_that_was_faster(tmp_path):
    """In backward passes without dropout, on an H200; none computes rows twice."""
    rows, _ = compile_table(tmp_path, *DENSE, "--capabilities", "90")
    assert len(rows.case.unique()) == 12
    measured = ~rows.case.str.contains("dropout") & rows.kernel.str.contains("grad")
    parts = ((~measured, MOST_SPILLED), (measured, MOST_SPILLED_BACKWARD))
    found = pd.concat([unexpected(rows[place], most) for place, most in parts])
    assert found.empty, found.to_string()


KEY_PASSES = ("grad_key", "grad_value", "grad_key_value")
DEFAULTS = [
    Shape(f"{family}_{kernel}", head_dim, 1 if family == "softmax" else 2, 2, draws)
    for family, kernel, head_dim, draws in product(
        ("softmax", "mgk", "mgk_hard", "smgk", "smgk_hard"),
        ("forward", "grad_query", *KEY_PASSES, "grad_bias"),
        (16, 32, 64, 128),
        ("", "dropout"),
    )
]


def stays(kernel, launch):
    """Rows of the tile that stays in a program."""
    return launch.block_q if kernel.endswith(("forward", "query", "bias")) else launch.block_k


def test_tiles_have_sixteen_rows_for_every_warp():
    """With fewer, two warps compute the same scores, exponentials and sums."""
    for shape in DEFAULTS:
        launch = default_launch(shape)
        assert stays(shape.kernel, launch) >= 16 * launch.num_warps, (shape, launch)
    for num_global, head_dim, units, noise, dropout, capability in product(
        (1, 2, 4, 16), (16, 64, 128), (0, 8), (0, 1, 2), (False, True), (80, 90)
    ):
        heads = Heads(num_global, 8, head_dim, units, noise, 2, dropout)
        for kernel in ("forward", "grad_query", *KEY_PASSES, "grad_bias"):
            with recording(capability):
                launch = make_plan(kernel, heads, torch.device("cpu")).launch
            assert stays(kernel, launch) >= 16 * launch.num_warps, (kernel, heads, launch)


def test_programs_of_keys_fit_into_shared_memory():
    """With 4 maps, heads of 128 and dropout, 32 x 128 took 176,256 bytes of sm_80's 166,912."""
    for num_global, head_dim, noise, dropout, capability in product(
        (1, 2, 4), (16, 64, 128), (0, 1, 2), (False, True), (80, 90)
    ):
        heads = Heads(num_global, 8, head_dim, 0, noise, 2, dropout)
        with recording(capability):
            for kernel in ("grad_key", "grad_value"):
                launch = make_plan(kernel, heads, torch.device("cpu")).launch
                taken = heads.shared_bytes_of_keys(launch)
                assert taken <= SHARED_LIMIT[capability], (kernel, heads, launch)


def test_two_maps_take_eight_warps_on_either_gpu():
    """Four spilled up to 6660 bytes on sm_80 and computed rows twice with heads of 128."""
    for units, noise, head_dim, dropout, capability in product(
        (0, 8), (0, 1, 2), (32, 64, 128), (False, True), (80, 90)
    ):
        heads = Heads(2, 8, head_dim, units, noise, 2, dropout)
        with recording(capability):
            for kernel in ("forward", "grad_query", *KEY_PASSES):
                launch = make_plan(kernel, heads, torch.device("cpu")).launch
                assert launch.num_warps == 8, (kernel, heads, launch)


@pytest.mark.slow
def test_functions_that_old_compilers_confuse_are_refused(tmp_path):
    code = """
import triton
import triton.language as tl
from lit_probattn.kernels.runtime import Launched
from profiling.kernels.compile import compile_launch

@triton.jit
def count(first, second):
    return len(first)

@triton.jit
def kernel(OUT):
    x = tl.load(OUT)
    tl.store(OUT, x * count((x,), (x, x)) + x * count((x, x), (x,)))

import torch
try:
    compile_launch(Launched(kernel, (torch.zeros(1),), {}), 90)
except triton.CompilationError as error:
    while error.__cause__ is not None:
        error = error.__cause__
    print(error)
"""
    script = tmp_path / "script.py"
    script.write_text(code)
    done = fresh_python(script, TRITON_INTERPRET=None, TRITON_CACHE_DIR=str(tmp_path))
    assert "count is called with tuples of [[1], [1, 1]] and of [[1, 1], [1]]" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("dtype", "sizes"), [("bfloat16", "16,32,64,128"), ("float16", "64"), ("float32", "64")]
)
def test_every_kernel_compiles(tmp_path, dtype, sizes):
    flags = ("--cases", "softmax,mgk", "--dtypes", dtype, "--head-dims", sizes)
    rows, done = compile_table(tmp_path, *flags)
    assert done.returncode == verdict(rows)
    assert set(rows.head_dim) == set(map(int, sizes.split(",")))
    assert set(rows.capability) == {80, 90}
    if dtype != "float32":
        check(rows)
    if dtype == "bfloat16" and OLD:
        found = spills_more_than_stored(rows)
        assert found.empty, found.to_string()


@pytest.mark.parametrize("share", SHARES)
def test_the_stored_table_has_the_launches_of_today(share, monkeypatch):
    """`reports/kernels_aot`: what a plan or a default changes is compiled again."""
    monkeypatch.setattr(compiling, "_LENGTH", 64)  # on which no launch depends
    stored = pd.read_csv(STORED)
    what = ["kernel", "tiles", "num_warps", "num_stages"]
    places = list(product(compile_cases(), HEAD_DIMS, SHARED_LIMIT))
    assert len(stored.groupby(["case", "head_dim", "capability"])) == len(places)
    for case, head_dim, capability in some_of(places, share, "the stored table"):
        same_call = (stored.case == case.name) & (stored.head_dim == head_dim)
        found = []
        for launched in recorded_launches(case, head_dim, torch.bfloat16, capability):
            given = {"num_warps": 4, "num_stages": 1, **launched.options}
            tiles = f"{given.get('BLOCK_Q', '–')}x{given.get('BLOCK_K', '–')}"
            sizes = tiles, given["num_warps"], given["num_stages"]
            found.append([launched.kernel.__name__, *sizes])
        rows = stored[same_call & (stored.capability == capability)][what]
        assert found == rows.values.tolist(), (case.name, head_dim, capability)


def test_faults_name_what_must_not_be():
    good = CompiledRow(
        *("mgk", "forward_kernel", 64, "bfloat16", 90, "128x64", 8, 3, 200, 0, 1000),
        *(2, True, 64, False, 1.0),
    )
    fields = dict(vars(good))
    spilling = CompiledRow(**{**fields, "spill_bytes": 8})
    large = CompiledRow(**{**fields, "shared_bytes": 228 * 1024})
    backward = CompiledRow(**{**fields, "kernel": "grad_key_kernel", "spill_bytes": 8})
    doubled = CompiledRow(**{**fields, "doubled": True})
    assert faults([good, backward, replace(doubled, case="linear")]) == []
    found = faults([spilling, large, doubled])
    assert "spills 8 bytes" in found[0]
    assert "233472 bytes of shared memory" in found[1]
    assert "warps compute the same rows" in found[2]


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
