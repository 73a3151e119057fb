"""Emulated devices that run work only when a test pumps them."""

from __future__ import annotations

import random

from dask_gpurt.devices.emulated.emulated_device import EmulatedDevice
from tests.conformance.device_suite import CAPACITY


def pumped(seed=0):
    return EmulatedDevice(CAPACITY, choose=random.Random(seed).randrange)
