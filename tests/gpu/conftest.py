"""A gate for streams that delays queued work until a test opens it.

`requirements` lists what tests need. On a machine without Dask, `--confcutdir tests/gpu` excludes
the fixtures of the other tests.
"""

from __future__ import annotations

import pytest


@pytest.fixture
def gate():
    """A gate for streams. It opens by itself after ten seconds."""
    return Gate()


class Gate:
    """A kernel that waits for the host, so that work after it stays queued."""

    def __init__(self):
        import numpy as np

        from benchmarks.gpu.kernels import kernel
        from dask_gpurt.devices.cuda.driver import CupyDriver

        self._kernel = kernel("gate")
        self._is_open = CupyDriver().pin(4).view(np.int32)
        self._is_open[0] = 0
        # Load and compile the kernel now: loading a module later may wait for running work.
        self._kernel.compile()

    def close(self, stream):
        """Delay work that is queued on this stream from now on until `open`."""
        import numpy as np

        arguments = (np.uint64(self._is_open.ctypes.data), np.int64(10_000_000_000))
        with stream.handle:
            self._kernel((1,), (1,), arguments)

    def open(self):
        self._is_open[0] = 1
