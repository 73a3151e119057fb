"""Copies and waits of a rechunk's shards, counted by the stand-in."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from dask_gpurt.frames.adapter import Piece, on_host
from dask_gpurt.frames.chunks.arrays import Arrays
from dask_gpurt.frames.chunks.rechunking import Rechunking
from tests.standins.hip_faults import counted

#: Two input chunks of 64 rows, cut by columns into four outputs.
OLD, NEW = ((64, 64), (512,)), ((128,), (128,) * 4)
N_PARTS = 4


def no_room(nbytes):
    return None


@pytest.fixture
def cut(standin):
    """Cut a chunk with the device's memory for shards, or without; return calls and shard."""
    cupy = pytest.importorskip("cupy")
    from dask_gpurt.frames.device.cupy_ import CupyArrays, CupyMemory

    def cut_one(has_room, leaves):
        room = CupyMemory.empty if has_room else no_room
        arrays = Arrays(Rechunking(OLD, NEW), None, {"cupy.ndarray": partial(CupyArrays, room)})
        opened = arrays.open(cupy.arange(64 * 512.0).reshape(64, 512), (0, 0))
        opened.cut(opened.parts, leaves)  # compiles
        with counted(standin) as calls:
            made = opened.cut(opened.parts, leaves)
        return calls, made

    return cut_one


@pytest.mark.parametrize("leaves", [False, True])
def test_shards_are_cut_by_one_copy_without_the_default_stream(cut, leaves):
    calls, made = cut(True, leaves)
    assert calls == {"launches": N_PARTS}
    shard = on_host(made if leaves else made.packed).buffer.view(np.float64)
    whole = np.arange(64 * 512.0).reshape(64, 512)
    parts = [whole[:, 128 * n : 128 * (n + 1)].ravel() for n in range(N_PARTS)]
    np.testing.assert_array_equal(shard, np.concatenate(parts))


def test_shards_without_room_are_copied_to_the_host_once(cut):
    calls, _ = cut(False, True)
    assert calls == {"launches": N_PARTS, "copies to the host": 1}


def test_one_wait_serves_all_memory_of_a_message(standin, monkeypatch):
    pytest.importorskip("cupy")
    from dask_gpurt.frames.device import cupy_

    waits = []
    recorded = cupy_.recorded
    monkeypatch.setattr(cupy_, "recorded", lambda stream: waits.append(stream) or recorded(stream))
    found = cupy_.CupyArrays(cupy_.CupyMemory.empty).arriving([4096] * 5)
    assert [memory.nbytes for memory in found] == [4096] * 5
    assert len(waits) == 1
    sizes = iter([cupy_.CupyMemory.empty(1), None])
    assert len(cupy_.CupyArrays(lambda nbytes: next(sizes)).arriving([1, 1, 1])) == 1
    assert cupy_.CupyArrays(no_room).arriving([4096]) == []
    assert len(waits) == 2, "none without memory"


def test_arriving_shards_are_joined_without_a_wait(standin, cut):
    cupy = pytest.importorskip("cupy")
    from dask_gpurt.frames.device.cupy_ import CupyArrays, CupyMemory

    devices = {"cupy.ndarray": partial(CupyArrays, CupyMemory.empty)}
    arrays = Arrays(Rechunking(OLD, NEW), None, devices)
    whole, pieces = np.arange(128 * 512.0).reshape(128, 512), []
    for number in range(2):
        chunk = cupy.asarray(whole[64 * number : 64 * (number + 1)])
        opened = arrays.open(chunk, (number, 0))
        pieces.append(Piece(opened.cut(opened.parts[:1], False), 0, 64 * 128))
    arrays.concatenate((0, 0), pieces)
    with counted(standin) as calls:
        got = arrays.concatenate((0, 0), pieces)
    assert calls == {"copies on the device": 2, "copies on the default stream": 2}
    np.testing.assert_array_equal(cupy.asnumpy(got), whole[:, :128])
