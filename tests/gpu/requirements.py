"""Requirements of the tests in this folder, and the reasons to skip them."""

from __future__ import annotations

import pytest

from dask_gpurt.devices.cuda.driver import why_no_cuda

NO_GPU = why_no_cuda()
needs_gpu = pytest.mark.skipif(NO_GPU is not None, reason=f"needs a GPU: {NO_GPU}")


def why_not_nvidia() -> str | None:
    """Return why there is no GPU of NVIDIA's, or None."""
    if NO_GPU is not None:
        return f"needs a GPU: {NO_GPU}"
    import cupy

    return "needs NVIDIA's driver: this GPU is AMD's" if cupy.cuda.runtime.is_hip else None


NO_NVIDIA = why_not_nvidia()
needs_nvidia = pytest.mark.skipif(NO_NVIDIA is not None, reason=str(NO_NVIDIA))
