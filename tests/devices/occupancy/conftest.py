"""Fixtures with a fake driver that records launches, and a launch hook on it."""

from __future__ import annotations

import pytest

from dask_gpurt.devices.occupancy.shaping import (
    LaunchHook,
)
from tests.devices.occupancy.fake_driver import FakeDriver


@pytest.fixture
def driver():
    return FakeDriver()


@pytest.fixture
def hook(driver):
    return LaunchHook(driver, enabled=True)
