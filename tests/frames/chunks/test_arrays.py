"""Chunks of arrays are cut, packed and joined to the same arrays as in Dask."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from dask.array.core import concatenate3
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_gpurt.frames.adapter import Packed, Piece
from dask_gpurt.frames.chunks.arrays import Arrays
from dask_gpurt.frames.chunks.chunk_layout import ChunkLayout
from dask_gpurt.frames.chunks.open_chunk import PickledBody, PlainBody
from dask_gpurt.frames.chunks.rechunking import Rechunking
from tests.frames.chunks.test_rechunking import blocks, rechunkings

DTYPES = [
    "f8",
    ">f4",
    "i1",
    "?",
    "c16",
    "M8[ns]",
    "m8[D]",
    "S3",
    "U5",
    "V7",
    np.dtype([("a", "i4"), ("b", ">f8", (2,)), ("c", "U2")]),
    np.dtype([("a", "i1"), ("b", "f8")]),
]
#: Types that do not survive their NumPy description, or that are not plain memory.
PICKLED = [
    "O",
    "V0",
    np.dtype([("a", "O")]),
    np.dtype([("a", "i1"), ("b", "f8")], align=True),
    np.dtype("f8", metadata={"unit": "m"}),
    np.dtype((np.record, [("a", "i1"), ("b", "f8")])),
    np.dtype([("a", np.dtype((np.record, [("b", "f8")])))]),
    np.dtype([("é中", "f8")]),
]


def values(dtype, shape, seed=0):
    dtype = np.dtype(dtype)
    n = int(np.prod(shape))
    if dtype.hasobject:
        made = np.array([(f"x{i}",) for i in range(n)], dtype=dtype)
        return made.reshape(-1)[:n].reshape(shape) if dtype.names else made[:, 0].reshape(shape)
    if not dtype.itemsize:
        return np.zeros(shape, dtype)
    if dtype.kind in "SU":
        return np.array([str(i) for i in range(n)]).astype(dtype).reshape(shape)
    raw = np.random.default_rng(seed).integers(0, 2, n * dtype.itemsize, dtype=np.uint8)
    return raw.view(dtype).reshape(shape)


def exchanged(old, new, inputs, *, sent):
    """Return the output chunks, through shards of about a third of the pieces each."""
    arrays = Arrays(Rechunking(old, new), concatenate3)
    pieces = {}
    for index in sorted(inputs, key=arrays.rechunking.number):
        opened = arrays.open(inputs[index], index)
        step = max(1, len(opened.parts) // 3)
        for first in range(0, len(opened.parts), step):
            parts = opened.parts[first : first + step]
            made = opened.cut(parts, sent)
            assert isinstance(made, Packed) == sent
            packed = made if sent else arrays.pack(made)
            assert packed.n_rows == sum(part.n_rows for part in parts)
            body = arrays.unpack(opened.layout_key, packed) if sent else made
            before = 0
            for part in parts:
                piece = Piece(body, before, before + part.n_rows)
                pieces.setdefault(part.output, []).append(piece)
                before += part.n_rows
    return {index: arrays.concatenate(index, found) for index, found in pieces.items()}


def assert_same_chunks(got, expected):
    assert got.keys() == expected.keys()
    for index, want in expected.items():
        one = got[index]
        assert type(one) is type(want)
        assert one.dtype == want.dtype
        assert one.dtype.type is want.dtype.type
        assert one.shape == want.shape
        assert one.flags.c_contiguous
        assert one.flags.writeable
        np.testing.assert_array_equal(one, want)


@settings(derandomize=True)
@given(plan=rechunkings(smallest=0), dtype=st.sampled_from(DTYPES), sent=st.booleans())
def test_chunks_are_rechunked(plan, dtype, sent):
    old, new = plan
    array = values(dtype, [sum(axis) for axis in old])
    assert ChunkLayout.of(array, {}) is not None
    got = exchanged(old, new, blocks(array, old), sent=sent)
    assert_same_chunks(got, blocks(array, new))


@pytest.mark.parametrize("sent", [False, True])
@pytest.mark.parametrize("dtype", PICKLED, ids=str)
def test_pickled_values_survive_a_round_trip(dtype, sent):
    old, new = ((3, 3), (4,)), ((6,), (1, 3))
    array = values(dtype, (6, 4))
    assert ChunkLayout.of(array, {}) is None
    got = exchanged(old, new, blocks(array, old), sent=sent)
    assert_same_chunks(got, blocks(array, new))
    assert all(chunk.dtype.metadata == array.dtype.metadata for chunk in got.values())


@pytest.mark.parametrize("sent", [False, True])
@pytest.mark.parametrize("order", ["C", "F", "reversed", "strided", "broadcast", "read-only"])
def test_elements_are_restored_in_c_order(order, sent):
    """The output is a new array in C order, for any memory order of the input chunks."""
    made = {
        "C": lambda chunk: np.ascontiguousarray(chunk),
        "F": lambda chunk: np.asfortranarray(chunk),
        "reversed": lambda chunk: chunk[::-1, ::-1],
        "strided": lambda chunk: np.repeat(chunk, 2, axis=1)[:, ::2],
        "broadcast": lambda chunk: np.broadcast_to(np.float64(7), chunk.shape),
        "read-only": lambda chunk: np.frombuffer(chunk.tobytes()).reshape(chunk.shape),
    }[order]
    old, new = ((4, 4), (9,)), ((8,), (2, 2, 5))
    array = np.random.default_rng(1).random((8, 9))
    inputs = {index: made(chunk) for index, chunk in blocks(array, old).items()}
    whole = np.concatenate([inputs[0, 0], inputs[1, 0]])
    assert_same_chunks(exchanged(old, new, inputs, sent=sent), blocks(whole, new))


@pytest.mark.parametrize("sent", [False, True])
def test_masks_of_chunks_are_kept(sent):
    old, new = ((4, 4), (6,)), ((8,), (3, 3))
    array = np.ma.masked_greater(np.arange(48.0).reshape(8, 6), 20)
    got = exchanged(old, new, blocks(array, old), sent=sent)
    for index, want in blocks(array, new).items():
        assert isinstance(got[index], np.ma.MaskedArray)
        np.testing.assert_array_equal(got[index].mask, want.mask)
        np.testing.assert_array_equal(got[index].filled(-1), want.filled(-1))


def test_chunks_of_mixed_types_get_the_first_type_as_in_dask():
    old, new = ((4, 4), (6,)), ((8,), (3, 3))
    array = np.arange(48.0).reshape(8, 6)
    inputs = blocks(array, old)
    inputs[1, 0] = inputs[1, 0].astype("i2")
    got = exchanged(old, new, inputs, sent=True)
    assert_same_chunks(got, blocks(array, new))
    inputs[1, 0] = inputs[1, 0].astype(object)
    assert_same_chunks(exchanged(old, new, inputs, sent=True), blocks(array, new))


def test_chunk_of_an_unannounced_shape_is_joined_as_in_dask():
    """Slices end with the chunk, and the remaining parts are joined, as in stock Dask."""
    old, new = ((4, 4), (6,)), ((8,), (6,))
    inputs = {(0, 0): np.ones((4, 1)), (1, 0): np.zeros((4, 1))}
    (got,) = exchanged(old, new, inputs, sent=True).values()
    np.testing.assert_array_equal(got, np.concatenate([inputs[0, 0], inputs[1, 0]]))


def test_shards_do_not_keep_their_chunk_alive():
    chunk = np.arange(20.0).astype(object)
    arrays = Arrays(Rechunking(((20,),), ((5, 15),)), concatenate3)
    opened = arrays.open(chunk, (0,))
    body = opened.cut(opened.parts, leaves=False)
    assert isinstance(body, PickledBody)
    assert all(array.base is None for array in body.arrays)


@pytest.mark.parametrize("dtype", [object, [("a", "i8"), ("b", object)]])
def test_objects_count_with_their_measured_size(dtype):
    values = [bytes(5000 + n) for n in range(400)]
    chunk = np.array(
        [(n, v) for n, v in enumerate(values)] if dtype is not object else values, dtype
    )
    arrays = Arrays(Rechunking(((400,),), ((100, 300),)), concatenate3, sizeof=deep_nbytes)
    opened = arrays.open(chunk, (0,))
    assert opened.row_nbytes == pytest.approx(1_040_000, rel=0.02)
    here = opened.cut(opened.parts, leaves=False)
    away = opened.cut(opened.parts, leaves=True)
    assert here.nbytes == pytest.approx(away.buffer.nbytes, rel=0.02)
    assert arrays.unpack(opened.layout_key, away).nbytes == away.buffer.nbytes


def deep_nbytes(value):
    return sum(map(deep_nbytes, value)) if isinstance(value, tuple) else sys.getsizeof(value)


def test_packing_a_chunk_for_spilling_copies_nothing():
    arrays = Arrays(Rechunking(((20,),), ((5, 15),)), concatenate3)
    opened = arrays.open(np.arange(20.0), (0,))
    body = opened.cut(opened.parts, leaves=False)
    assert isinstance(body, PlainBody)
    assert arrays.pack(body).buffer is body.packed.buffer


def body_of(arrays, chunk, index=(0,)):
    opened = arrays.open(chunk, index)
    return opened.cut(opened.parts, leaves=False)


def test_pieces_that_do_not_fit_are_refused():
    arrays = Arrays(Rechunking(((20,),), ((5, 15),)), concatenate3)
    body = body_of(arrays, np.arange(20.0))
    with pytest.raises(ValueError, match="2 pieces came instead of 1"):
        arrays.concatenate((0,), [Piece(body, 0, 5), Piece(body, 5, 20)])
    with pytest.raises(ValueError, match="4 elements came"):
        arrays.concatenate((0,), [Piece(body, 0, 4)])


def test_damaged_shards_are_refused():
    arrays = Arrays(Rechunking(((20,),), ((5, 15),)), concatenate3)
    key = ChunkLayout.of(np.arange(20.0), {}).key
    buffer = np.zeros(160, dtype=np.uint8)
    arrays.unpack(key, Packed(buffer, 20))
    with pytest.raises(ValueError, match="do not fit"):
        arrays.unpack(key, Packed(buffer, 19))
    with pytest.raises(ValueError, match="axes"):
        arrays.unpack(ChunkLayout.of(np.zeros((4, 5)), {}).key, Packed(buffer, 20))
    with pytest.raises(ValueError, match="has the layout"):
        arrays.unpack(key.replace(b"'<f8'", b"'|O8'"), Packed(buffer, 20))
    for end in range(len(key)):
        with pytest.raises(ValueError):
            arrays.unpack(key[:end], Packed(buffer, 20))
    with pytest.raises(ValueError, match="beside the pickle"):
        arrays.unpack(b"pickle", Packed(buffer, 20, pickle_nbytes=8))


def test_parsing_a_layout_is_retried_after_a_system_error(monkeypatch):
    """The error may happen if two threads parse at the same time."""
    layout = ChunkLayout(np.dtype("f4"), (3, 5, 7), False)
    read = np.lib.format.read_array_header_1_0
    failures = [SystemError("AST constructor recursion depth mismatch")] * 2

    def read_in_the_end(*args):
        if failures:
            raise failures.pop()
        return read(*args)

    monkeypatch.setattr(np.lib.format, "read_array_header_1_0", read_in_the_end)
    assert ChunkLayout.from_key(layout.key) == layout
    assert not failures
