"""A gate for streams, which holds what is queued on them until a test opens it.

What tests need is in `requirements`. On a machine without Dask, `--confcutdir tests/gpu` leaves the
fixtures of the other tests out.
"""

from __future__ import annotations

import pytest


@pytest.fixture
def gate():
    """Holds streams back until it is opened; opens by itself after ten seconds."""
    return Gate()


class Gate:
    """A kernel that waits for the host, so that what comes after it is queued for certain."""

    def __init__(self):
        import numpy as np

        from benchmarks.gpu.kernels import kernel
        from dask_gpurt.devices.cuda.driver import CupyDriver

        self._kernel = kernel("gate")
        self._is_open = CupyDriver().pin(4).view(np.int32)
        self._is_open[0] = 0
        # Loaded and compiled now: loading a module later may wait for all that runs.
        self._kernel.compile()

    def close(self, stream):
        """Queue a kernel on this stream that waits for `open`."""
        import numpy as np

        arguments = (np.uint64(self._is_open.ctypes.data), np.int64(10_000_000_000))
        with stream.handle:
            self._kernel((1,), (1,), arguments)

    def open(self):
        self._is_open[0] = 1
