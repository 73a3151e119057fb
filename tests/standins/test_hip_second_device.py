"""The second GPU of a process passes the device suite, with threads that have to choose theirs."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from dask_gpurt.devices.cuda.driver import CupyDriver
from dask_gpurt.devices.cuda.gpu import CudaDevice
from dask_gpurt.devices.device import Priority
from tests.conformance.device_suite import DeviceSuite


@pytest.fixture(autouse=True)
def strict(standin, monkeypatch):
    monkeypatch.setenv("STANDIN_HIP_STRICT", "1")


class TestSecondDevice(DeviceSuite):
    def make_device(self, capacity_nbytes, seed=0):
        return CudaDevice(CupyDriver(1), capacity_nbytes)


def test_threads_that_chose_no_device_copy_and_wait():
    """A call of theirs would begin to use the first device."""
    driver = CupyDriver(1)
    host, out = np.arange(100, dtype=np.uint8), np.zeros(100, np.uint8)
    stream, other = (driver.open_stream(Priority.NORMAL) for _ in range(2))
    memory, event = driver.allocate(100, stream), driver.record(stream)
    problems = []

    def run(*calls):
        def work():
            try:
                for call in calls:
                    call()
            except RuntimeError as error:
                problems.append(str(error))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    run(lambda: driver.make_wait(other, event))
    run(lambda: driver.copy_in(other, memory, 0, host))
    run(lambda: driver.copy_out(other, out, memory, 0))
    assert problems == []
    np.testing.assert_array_equal(out, host)
