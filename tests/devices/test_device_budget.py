"""Device memory for shards counts while it lives and is refused beyond the limit."""

from __future__ import annotations

import threading

import pytest

from dask_gpurt.devices.device_budget import DeviceRoom


class Memory:
    def __init__(self, nbytes):
        self.nbytes = nbytes


def test_device_has_no_room_beyond_the_mark():
    room = DeviceRoom(100)
    held = room.take(Memory, 60)
    assert held.nbytes == 60
    assert room.take(Memory, 41) is None
    assert room.take(Memory, 40) is not None
    assert room.used_nbytes == 60


def test_dead_memory_makes_room_below_the_mark():
    room = DeviceRoom(100)
    held = room.take(Memory, 100)
    assert room.take(Memory, 1) is None
    del held
    assert room.take(Memory, 100) is not None
    assert room.used_nbytes == 0


def test_device_without_memory_counts_for_nothing():
    def full(nbytes):
        raise MemoryError

    room = DeviceRoom(100)
    assert room.take(full, 60) is None
    assert room.used_nbytes == 0


def test_other_allocation_errors_are_raised():
    def broken(nbytes):
        raise ValueError("no such device")

    room = DeviceRoom(100)
    with pytest.raises(ValueError, match="no such device"):
        room.take(broken, 60)
    assert room.used_nbytes == 0


def test_threads_together_stay_below_the_mark():
    room = DeviceRoom(1000)
    kept, start = [], threading.Barrier(8)

    def take():
        start.wait()
        for _ in range(100):
            memory = room.take(Memory, 7)
            if memory is not None:
                kept.append(memory)

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(kept) == 1000 // 7
    assert room.used_nbytes == 7 * len(kept)
