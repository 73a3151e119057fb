"""The store evicts GPU values to pinned memory, and restores them."""

from __future__ import annotations

from benchmarks.gpu.tiers import measure
from dask_gpurt.devices.cuda.driver import CupyDriver
from dask_gpurt.devices.cuda.gpu import CudaDevice
from dask_gpurt.devices.host_memory.pinned import PinnedPool
from tests.gpu.requirements import needs_gpu

pytestmark = needs_gpu

MIB = 1 << 20


def test_working_set_of_four_times_the_budget_is_right():
    device = CudaDevice(CupyDriver(), 16 * MIB)
    pool = PinnedPool(128 * MIB, MIB, device.driver.pin)
    found = measure(device, pool, 64, device.driver.pin(MIB), passes=3)
    device.close()
    assert found["wrong"] == []
    assert found["most_used_nbytes"] <= 16 * MIB
    assert found["cold_at_the_end"] >= 48
    assert len(set(found["pinned_allocations"])) == 1, "nothing is pinned after the first pass"
