"""A store for tests, with an emulated device that fails on request."""

from __future__ import annotations

import numpy as np

from dask_gpurt.devices.array import DeviceArray
from dask_gpurt.devices.emulated.emulated_device import EmulatedDevice
from dask_gpurt.devices.host_memory.pinned import PinnedPool
from dask_gpurt.frames.flat.values import flatten, restore
from dask_gpurt.memory.decisions.eviction_policy import POLICIES
from dask_gpurt.memory.decisions.levels import Level
from dask_gpurt.memory.decisions.residency import Residency
from dask_gpurt.memory.device_values import device_packing, is_on_device
from dask_gpurt.memory.host_tiers import CompressedTier, PinnedTier
from dask_gpurt.memory.store import HOST, TieredStore
from dask_gpurt.memory.tiers import Lanes, Packing
from tests.memory.stepping import FailingTier, SteppedLanes, watched

DEVICE = 1
PATIENCE_S = 30.0


def noise(nbytes, seed=0):
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


class FailingDevice(EmulatedDevice):
    """A device whose n-th allocation, or n-th copy in one direction, fails."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.left = {}

    def _count(self, operation, error):
        # `error` is a class, because an instance would keep memory alive by its traceback.
        if operation in self.left:
            self.left[operation] -= 1
            if self.left[operation] < 0:
                del self.left[operation]
                raise error(f"{operation} fails, as it was told to")

    def allocate(self, nbytes, stream):
        self._count("allocate", MemoryError)
        return super().allocate(nbytes, stream)

    def _queue(self, stream, what, *args):
        self._count(what, RuntimeError)
        super()._queue(stream, what, *args)


class Setup(SteppedLanes):
    """A store with a device of 1000 bytes, and its lanes."""

    def __init__(
        self, choose=lambda n: 0, *, memory=400, pinned=600, disk=None, compressed=None, **options
    ):
        self.device = FailingDevice(1000, choose)
        self.compute = self.device.stream("compute")
        super().__init__()
        # Tiers have more room than levels may use, because copies begin before others have left.
        self.pool = PinnedPool(pinned * 5 // 4, block_nbytes=20)
        tiers = [PinnedTier(self.pool)]
        if compressed is not None:
            tiers.append(CompressedTier(2 * compressed))
        tiers.append(disk or PinnedTier(PinnedPool(1 << 20, block_nbytes=10)))
        self.tiers = [FailingTier(tier) for tier in tiers]
        names = ["pinned", "compressed", "disk"] if compressed is not None else ["pinned", "disk"]
        capacities = {"pinned": pinned, "compressed": compressed}
        below = tuple(range(2, 2 + len(tiers)))
        self.residency = Residency(
            [
                Level("memory", memory),
                Level("device", self.device.capacity_nbytes),
                *(Level(name, capacities.get(name)) for name in names),
            ],
            {HOST: below[1:], DEVICE: below},
            POLICIES["lru"],
        )
        self.hazards = []
        self.lost = []
        host = Packing(lambda array: array.nbytes, flatten, restore)
        packing = device_packing(self.device)
        self.packing = watched(packing, self.hazards)
        self.store = TieredStore(
            self.residency,
            self.tiers,
            [host, self.packing],
            Lanes(self.write, self.read, self.owner, self.later),
            top_level_of=lambda value: DEVICE if is_on_device(value) else HOST,
            on_lost=self.lost.append,
            **options,
        )
        self.device.on_full(lambda nbytes: self.store.make_room(DEVICE, nbytes))

    def made(self, array):
        """Return an array on the device, like the output of a task."""
        return DeviceArray.from_host(array, self.device, self.compute)

    def host_copy(self, value):
        if not is_on_device(value):
            return value
        left, self.device.left = self.device.left, {}
        host, event = value.to_host(self.compute)
        event.synchronize()
        self.device.left = left
        return host

    def levels(self, key):
        return list(self.store.explain(key)["levels"])
