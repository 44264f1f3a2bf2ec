"""What tests of sweeps share."""

from tests.profiling.helpers import counted_by_torch_alone as counted_by_torch_alone
