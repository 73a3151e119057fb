"""CUPTI sees the copies and kernels of this process, with their bytes and their kind."""

from __future__ import annotations

import time

import pytest

from dask_gpurt.devices.cuda.driver import CupyDriver
from dask_gpurt.plugins.tracing.cupti_recorder import CuptiRecorder
from tests.gpu.requirements import needs_nvidia

pytestmark = needs_nvidia

NBYTES = 64 << 20


def test_copies_are_recorded_with_bytes_and_way():
    pytest.importorskip("cupti")
    import cupy
    import numpy as np

    pinned = CupyDriver().pin(NBYTES).view(np.uint8)
    pageable = np.ones(NBYTES // 2, np.uint8)
    on_device = cupy.zeros(NBYTES, cupy.uint8)
    cupy.cuda.runtime.deviceSynchronize()
    entries = []
    recorder = CuptiRecorder(entries.append, time.perf_counter)
    began_s = time.perf_counter()
    assert recorder.start()
    on_device.set(pinned)
    on_device[: NBYTES // 2].set(pageable)
    on_device += 1
    cupy.cuda.runtime.deviceSynchronize()
    recorder.stop()
    ended_s = time.perf_counter()

    into = [(entry.way, entry.nbytes) for entry in entries if entry.path == "host to device"]
    assert sum(nbytes for way, nbytes in into if way == "pinned") == NBYTES
    assert sum(nbytes for way, nbytes in into if way == "pageable") == NBYTES // 2
    assert any("add" in entry.path for entry in entries)
    # Clocks are compared to within some microseconds.
    assert all(began_s - 1e-3 < entry.start_s <= entry.end_s < ended_s + 1e-3 for entry in entries)
