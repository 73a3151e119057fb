"""The stand-in that a test runs on, and its faults, which end with the test."""

from __future__ import annotations

import pytest

from tests.standins.hip_build import why_no_standin
from tests.standins.hip_faults import Faults, library


@pytest.fixture
def standin():
    if (why := why_no_standin()) is not None:
        pytest.skip(why)
    found = library()
    if found is None:
        pytest.skip("not on the stand-in: run it with `make test-standins`")
    return found


@pytest.fixture
def faults(standin):
    faults = Faults(standin)
    yield faults
    faults.clear()
