"""A fixture with a pool of private pages, and then one of shared pages."""

from __future__ import annotations

import pytest

from dask_gpurt.devices.host_memory.pages import PrivatePages, SharedPages
from dask_gpurt.devices.host_memory.pool import HostPool
from tests.devices.host_memory.pool_pages import MANY


@pytest.fixture(params=[PrivatePages, SharedPages])
def pool(request):
    """A pool that keeps all returned pages."""
    pool = HostPool(MANY, lane_pages=1, source=request.param())
    yield pool
    pool.trim()
