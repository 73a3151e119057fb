"""The second GPU of a process passes the device suite, with threads that have to choose theirs."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from dask_gpurt.devices.cuda.driver import CupyDriver
from dask_gpurt.devices.cuda.gpu import CudaDevice
from dask_gpurt.memory.device_values import LibraryCopies
from tests.conformance.device_suite import DeviceSuite


@pytest.fixture(autouse=True)
def strict(standin, monkeypatch):
    monkeypatch.setenv("STANDIN_HIP_STRICT", "1")


class TestSecondDevice(DeviceSuite):
    def make_device(self, capacity_nbytes, seed=0):
        return CudaDevice(CupyDriver(1), capacity_nbytes)


def test_values_are_copied_by_threads_that_chose_no_device():
    copies = LibraryCopies(CupyDriver(1))
    host = np.arange(100, dtype=np.uint8)
    found = []

    def copy():
        pieces = copies.to_device([host])
        found.extend(copies.to_host(pieces))

    thread = threading.Thread(target=copy)
    thread.start()
    thread.join()
    np.testing.assert_array_equal(found[0], host)
