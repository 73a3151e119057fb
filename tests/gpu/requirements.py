"""Requirements of the tests in this folder, and the reasons to skip them."""

from __future__ import annotations

import pytest

from dask_gpurt.devices.cuda.driver import why_no_cuda

NO_GPU = why_no_cuda()
needs_gpu = pytest.mark.skipif(NO_GPU is not None, reason=f"needs a GPU: {NO_GPU}")
