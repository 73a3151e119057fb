"""Chunks of device arrays are cut and joined correctly, on a device emulated in host memory."""

from __future__ import annotations

import numpy as np
import pytest
from dask.array.core import concatenate3
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_gpurt.frames.adapter import Packed, Piece, on_host
from dask_gpurt.frames.chunks.arrays import Arrays
from dask_gpurt.frames.chunks.chunk_layout import ChunkLayout
from dask_gpurt.frames.chunks.open_chunk import PickledBody
from dask_gpurt.frames.chunks.rechunking import Rechunking
from tests.frames.chunks.test_rechunking import blocks, rechunkings
from tests.frames.emulated_device import ARRAY, EmulatedArray, EmulatedArrays, EmulatedMemory


def no_room(nbytes):
    return None


def devices(room):
    return {ARRAY: lambda: EmulatedArrays(room)}


def exchanged(old, new, inputs, *, leaves, room):
    arrays = Arrays(Rechunking(old, new), concatenate3, devices(room))
    pieces = {}
    for index in sorted(inputs, key=arrays.rechunking.number):
        opened = arrays.open(inputs[index], index)
        if not opened.parts:
            continue
        made = opened.cut(opened.parts, leaves)
        assert (made.is_on_device if leaves else made.packed.is_on_device) == (room is not no_room)
        body = arrays.unpack(opened.layout_key, made) if leaves else made
        before = 0
        for part in opened.parts:
            piece = Piece(body, before, before + part.n_rows)
            pieces.setdefault(part.output, []).append(piece)
            before += part.n_rows
    return {index: arrays.concatenate(index, found) for index, found in pieces.items()}


@settings(derandomize=True, max_examples=60)
@given(
    plan=rechunkings(smallest=0),
    leaves=st.booleans(),
    room=st.sampled_from([EmulatedMemory, no_room]),
    fortran=st.booleans(),
)
def test_device_chunks_are_rechunked_like_host_chunks(plan, leaves, room, fortran):
    old, new = plan
    shape = [sum(axis) for axis in old]
    array = np.arange(float(np.prod(shape))).reshape(shape).view(EmulatedArray)
    inputs = blocks(array, old)
    if fortran:
        inputs = {
            index: np.asfortranarray(chunk).view(EmulatedArray) for index, chunk in inputs.items()
        }
    got = exchanged(old, new, inputs, leaves=leaves, room=room)
    for index, want in blocks(array, new).items():
        assert type(got[index]) is EmulatedArray
        assert got[index].flags.c_contiguous
        np.testing.assert_array_equal(got[index], want)


OLD, NEW = ((40, 40),), ((80,),)


def cut(room, leaves=True):
    arrays = Arrays(Rechunking(OLD, NEW), concatenate3, devices(room))
    opened = arrays.open(np.arange(40.0).view(EmulatedArray), (0,))
    return arrays, opened, opened.cut(opened.parts, leaves)


def test_without_room_shards_leave_the_device():
    before = EmulatedMemory.used_nbytes
    _, _, body = cut(no_room, leaves=False)
    assert EmulatedMemory.used_nbytes == before
    elements = body.elements(10, 20)
    assert elements.tolist() == list(range(10, 20))
    assert EmulatedMemory.used_nbytes <= before + 80
    del elements
    assert EmulatedMemory.used_nbytes == before
    assert not body.packed.is_on_device


def test_data_from_a_peers_device_lands_on_the_device():
    arrays, _, _ = cut(EmulatedMemory)
    found = arrays.allocate_device([320, 64])
    assert [memory.nbytes for memory in found] == [320, 64]
    assert Arrays(Rechunking(OLD, NEW), concatenate3).allocate_device is None


def test_layouts_name_the_library():
    arrays, opened, packed = cut(no_room)
    assert ChunkLayout.from_key(opened.layout_key).library == ARRAY
    host = Arrays(Rechunking(OLD, NEW), concatenate3)
    with pytest.raises(ValueError, match="does not know arrays"):
        host.unpack(opened.layout_key, packed)
    key = ChunkLayout(np.dtype("f8"), (40,), False).key
    with pytest.raises(ValueError, match="host array arrived in device memory"):
        arrays.unpack(key, Packed(EmulatedMemory(320), 40))


@settings(derandomize=True, max_examples=200)
@given(st.data())
def test_damaged_layouts_are_refused_or_describe_the_buffer(data):
    arrays, opened, packed = cut(no_room)
    key = bytearray(opened.layout_key)
    position = data.draw(st.integers(0, len(key) - 1))
    key[position] = data.draw(st.integers(0, 255))
    try:
        body = arrays.unpack(bytes(key), packed)
    except ValueError:
        return
    assert body.elements(0, packed.n_rows).nbytes == packed.buffer.nbytes


def test_device_objects_are_pickled_like_host_objects():
    arrays = Arrays(Rechunking(((2,),), ((1, 1),)), concatenate3, devices(EmulatedMemory))
    opened = arrays.open(np.array(["a", "b"], dtype=object).view(EmulatedArray), (0,))
    body = arrays.unpack(opened.layout_key, on_host(opened.cut(opened.parts, True)))
    assert isinstance(body, PickledBody)
