"""A store of bytes for tests, which step through its lanes call by call."""

from __future__ import annotations

import threading

import numpy as np

from dask_gpurt.devices.host_memory.pinned import PinnedPool
from dask_gpurt.frames.flat.values import Flat
from dask_gpurt.memory.decisions.eviction_policy import POLICIES
from dask_gpurt.memory.decisions.levels import Level
from dask_gpurt.memory.decisions.residency import Residency
from dask_gpurt.memory.host_tiers import PinnedTier
from dask_gpurt.memory.store import TieredStore
from dask_gpurt.memory.tiers import Lanes, Packing
from tests.memory.stepping import FailingTier, SteppedLanes


def flatten(value):
    if isinstance(value, threading.Event):
        raise TypeError("cannot pickle an event")
    return Flat(b"bytes", (np.frombuffer(value, dtype=np.uint8),))


def restore(header, buffers):
    assert header == b"bytes"
    return buffers[0].tobytes()


def sizeof(value):
    return len(value) if isinstance(value, bytes) else 1000


class Setup(SteppedLanes):
    """A store of `capacity` bytes over one or more tiers, and its lanes."""

    def __init__(self, capacity=100, n_tiers=1, tier_nbytes=None, **options):
        super().__init__()
        self.lost = []
        self.tiers = [
            FailingTier(PinnedTier(PinnedPool((tier_nbytes or 1 << 20), block_nbytes=10)))
            for _ in range(n_tiers)
        ]
        levels = [Level("memory", capacity)]
        for number in range(n_tiers):
            # The last level has no capacity; only its tier itself limits it.
            levels.append(Level(f"tier {number}", 60 if number < n_tiers - 1 else None))
        self.residency = Residency(levels, {0: tuple(range(1, n_tiers + 1))}, POLICIES["lru"])
        self.store = TieredStore(
            self.residency,
            self.tiers,
            [Packing(sizeof, flatten, restore)],
            Lanes(self.write, self.read, self.owner, self.later),
            on_lost=self.lost.append,
            **options,
        )


def filled(setup, *keys, nbytes=40):
    for key in keys:
        setup.store[key] = key.encode() * nbytes
        setup.settle()


def step_all_but_later(setup):
    while lanes := [lane for lane in setup.lanes if lane is not setup.later]:
        lanes[0].step()
