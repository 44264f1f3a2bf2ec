"""FiSH and linear kernels compiled ahead of time: spills, memory that fits."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from profiling.kernels.compile import SHARED_LIMIT
from tests.profiling.kernels.test_compile_table import (
    OLD,
    compile_table,
    spills_more_than_stored,
    verdict,
)
from tests.support.fresh import fresh_python

# Triton 3.6, which GPU machines have, spills nothing in forward on Hopper, GFiSH with heads of 128
# aside; 3.9 up to this many bytes per thread, with noise and dropout and heads of 128.
SPILL = 0 if OLD else 100
needs_36 = pytest.mark.skipif(not OLD, reason="launches were chosen with Triton 3.6")


def check(rows):
    forward = rows.kernel.str.contains("forward") & (rows.capability == 90)
    wide = rows.case.str.startswith("gfish") & (rows.head_dim == 128)
    assert (rows[forward & ~wide].spill_bytes <= SPILL).all()
    assert (rows.shared_bytes <= rows.capability.map(SHARED_LIMIT)).all()
    products = rows.kernel.str.contains("forward|gradient|chunk_sums|read")
    # These products take 64 rows: states of narrower heads have fewer.
    wide = (rows.head_dim >= 64) | ~rows.case.str.startswith("linear")
    assert rows[(rows.capability == 90) & products & wide].wgmma.all()


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
    assert done.returncode == verdict(rows)
    assert set(rows.head_dim) == {16, 32, 64, 128}
    assert set(rows.capability) == {80, 90}
    check(rows)
    if OLD:
        found = spills_more_than_stored(rows)
        assert found.empty, found.to_string()


# Bytes per thread of default launches of the linear family that do spill with Triton 3.6, by case,
# kernel, head size and capability: lit_probattn/kernels/README.md.
LINEAR_SPILLS = {
    ("linear fish, 2 of 8", "query_gradient_kernel", 128, 80): 8,
    ("linear, mixed keys", "query_gradient_kernel", 64, 80): 4,
}


def unexpected(rows):
    """Rows that spill more than is known of them."""
    places = zip(rows.case, rows.kernel, rows.head_dim, rows.capability, strict=True)
    known = [LINEAR_SPILLS.get(place, 0) for place in places]
    return rows[rows.spill_bytes > np.array(known)]


@needs_36
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_default_of_the_linear_family_spills(tmp_path):
    rows, done = compile_table(tmp_path, "--cases", "linear", "--head-dims", "16,32,64,128")
    assert done.returncode == 0
    assert set(rows.case) == {"linear", "linear, mixed keys", "linear fish, 2 of 8"}
    assert set(rows.capability) == {80, 90}
    assert unexpected(rows).empty, unexpected(rows).to_string()


def fish_rows(folder, head_dim, capability):
    """Compile FiSH with one layer in a process of its own; `--cases` would take GFiSH along."""
    code = f"""
import pandas
from profiling.kernels.cases import compile_cases
from profiling.kernels.compile import compile_rows
cases = [case for case in compile_cases() if case.name.startswith("fish")]
rows = [vars(row) for row in compile_rows(cases, [{head_dim}], [{capability}])]
pandas.DataFrame(rows).to_csv({str(folder / "rows.csv")!r})
"""
    (folder / "script.py").write_text(code)
    fresh_python(folder / "script.py", TRITON_INTERPRET=None)
    return pd.read_csv(folder / "rows.csv")


@needs_36
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_default_of_fish_with_noise_spills_on_hopper(tmp_path):
    """With 2 of 8 maps, noise and dropout, or neither; GFiSH does, for the sums of its weights.

    Without GFiSH, which takes most of the time that all names with FiSH in them take.
    """
    ours = fish_rows(tmp_path, 64, 90)
    assert len(ours.case.unique()) == 6
    found = ours[(ours.spill_bytes > 0) | ours.doubled]
    assert found.empty, found.to_string()
