"""Packed shards and the pinned tier, in memory that CuPy allocates on a GPU.

The tables are Arrow's, in host memory: with cuDF, `test_frames` has both on the GPU.
"""

from __future__ import annotations

import numpy as np

from dask_gpurt.devices.cuda.driver import CupyDriver
from dask_gpurt.devices.host_memory.pinned import PinnedPool
from dask_gpurt.frames.device.device_frames import DeviceFrames
from dask_gpurt.memory.host_tiers import PinnedTier
from tests.conformance.tier_suite import TierSuite
from tests.frames.device import test_device_frames as emulated
from tests.frames.emulated_device import EmulatedMemory, EmulatedTables
from tests.gpu.requirements import NO_GPU, needs_gpu

pytestmark = needs_gpu

if NO_GPU is None:
    import cupy

    from dask_gpurt.frames.device.cupy_ import CupyArrays, CupyMemory

MIB = 1 << 20


class PackedInCupy(EmulatedTables):
    """Tables in host memory that are packed into memory of a GPU."""

    def pack(self, table, empty):
        host, columns, contents_nbytes = super().pack(table, EmulatedMemory)
        target = empty(host.nbytes)
        if isinstance(target, np.ndarray):
            target[:] = host.on_device()
        else:
            with self.to_gpu().computing():
                target.array[:] = cupy.asarray(host.on_device())
        return target, columns, contents_nbytes

    def view(self, memory, columns):
        host = EmulatedMemory(memory.nbytes)
        memory.copy_to_host(host.on_device())
        return super().view(host, columns)

    def to_device(self, buffer, memory=None):
        if memory is None:
            return self.to_gpu().to_device(buffer)
        with self.to_gpu().computing():
            memory.array.set(buffer)
        return memory

    def to_gpu(self):
        return CupyArrays(no_room)


def no_room(nbytes):
    return None


class PackedSuite(emulated.DeviceSuite):
    has_room = True

    def adapter(self, frame):
        room = CupyMemory.empty if self.has_room else no_room
        return DeviceFrames(PackedInCupy(), frame.iloc[:0], "slot", True, room)

    def test_shards_are_in_the_memory_of_the_gpu(self):
        frame = self.frame(1_000, 0)
        for body, _ in self.shards(self.adapter(frame), frame, leaves=False):
            assert isinstance(body.packed.buffer, CupyMemory) == self.has_room


class TestMixed(PackedSuite):
    pass


class TestMixedWithoutRoom(PackedSuite):
    has_room = False


class TestIndexed(PackedSuite):
    frame = emulated.TestIndexed.frame


class TestOfASeries(PackedSuite):
    frame = emulated.TestOfASeries.frame


class TestPinned(TierSuite):
    def make_tier(self, capacity_nbytes=None):
        pool = PinnedPool(capacity_nbytes or 300 * MIB, 1 << 16, CupyDriver().pin)
        return PinnedTier(pool)
