"""FiSH and linear kernels compiled ahead of time: no spills in forward, memory that fits."""

from __future__ import annotations

import pytest
import triton
from packaging.version import Version

from profiling.kernels.compile import SHARED_LIMIT
from tests.profiling.kernels.test_compile_table import compile_table

# Triton 3.6, which GPU machines have, spills nothing; later ones up to this many bytes per thread.
SPILL = 0 if Version(triton.__version__) < Version("3.7") else 36


def check(rows):
    assert (rows[rows.kernel.str.contains("forward")].spill_bytes <= SPILL).all()
    assert (rows.shared_bytes <= rows.capability.map(SHARED_LIMIT)).all()
    products = rows.kernel.str.contains("forward|gradient|sums|read")
    assert rows[(rows.capability == 90) & products].wgmma.all()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_fish_does_not_spill_at_the_papers_head_size(tmp_path):
    flags = ("--cases", "fish hard", "--head-dims", "64", "--passes", "forward")
    rows, done = compile_table(tmp_path, *flags, "--capabilities", "90")
    assert done.returncode == (rows.spill_bytes > 0).any()
    forms = {"fish hard, 2 of 8", "fish hard, 4 of 8"}
    assert set(rows.case) == forms | {f"{form} with dropout" for form in forms}
    assert set(rows.capability) == {90}
    check(rows)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_kernel_compiles_at_every_head_size(tmp_path):
    rows, done = compile_table(tmp_path, "--cases", "fish,linear")
    assert done.returncode == 0
    assert set(rows.head_dim) == {16, 32, 64, 128}
    assert set(rows.capability) == {80, 90}
    check(rows)
