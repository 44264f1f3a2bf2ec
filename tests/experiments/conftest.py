"""What tests of jobs share."""

from tests.compare.conftest import _poll_often as _poll_often
