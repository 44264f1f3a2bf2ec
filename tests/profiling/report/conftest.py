"""What tests of reports share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.profiling.helpers import count_by_torch_alone


@pytest.fixture(autouse=True, scope="package")
def _count_by_torch_alone() -> Iterator[None]:
    """Fvcore's counts are the subject of other tests."""
    with pytest.MonkeyPatch.context() as patch:
        count_by_torch_alone(patch)
        yield
