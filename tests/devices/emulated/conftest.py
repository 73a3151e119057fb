"""Fixtures with emulated devices, of which some have threads and some are pumped."""

from __future__ import annotations

import pytest

from dask_gpurt.devices.emulated.emulated_device import EmulatedDevice
from tests.conformance.device_suite import CAPACITY
from tests.devices.emulated.pumping import pumped


@pytest.fixture(params=["threaded", "pumped"])
def device(request):
    device = pumped() if request.param == "pumped" else EmulatedDevice(CAPACITY)
    yield device
    device.close()


@pytest.fixture
def streams(device):
    return device.stream("one"), device.stream("other")
