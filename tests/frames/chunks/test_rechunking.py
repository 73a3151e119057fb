"""The geometry of rechunks agrees with stock Dask and with NumPy's slicing."""

from __future__ import annotations

from itertools import pairwise, product
from math import nan

import numpy as np
import pytest
from distributed.shuffle._rechunk import split_axes
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_gpurt.frames.chunks.rechunking import Axis, Rechunking, filled


@st.composite
def cuttings(draw, length, smallest=1):
    """Draw chunk lengths of an axis. With `smallest=0`, some chunks may be empty."""
    if smallest:
        inner = st.integers(1, length - 1)
        cuts = draw(st.lists(inner, unique=True, max_size=5)) if length > 1 else []
    else:
        cuts = draw(st.lists(st.integers(0, length), max_size=5))
    bounds = [0, *sorted(cuts), length]
    return tuple(b - a for a, b in pairwise(bounds))


@st.composite
def rechunkings(draw, smallest=1):
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    old = tuple(draw(cuttings(length, smallest)) for length in shape)
    new = tuple(draw(cuttings(length, smallest)) for length in shape)
    return old, new


def grid(chunks):
    return product(*(range(len(axis)) for axis in chunks))


def blocks(array, chunks):
    """Return the chunks of an array by index, from plain slicing."""
    starts = [np.cumsum([0, *axis]) for axis in chunks]
    return {
        index: array[tuple(slice(s[i], s[i + 1]) for s, i in zip(starts, index, strict=True))]
        for index in grid(chunks)
    }


@settings(derandomize=True)
@given(rechunkings())
def test_spans_equal_stock_splits(plan):
    old, new = plan
    for axis, (one, other) in zip(split_axes(old, new), zip(old, new, strict=True), strict=True):
        ours = [
            [(span.output, span.source) for span in spans] for spans in Axis(one, other).of_input
        ]
        assert ours == [[(split.chunk_index, split.slice) for split in splits] for splits in axis]


@settings(derandomize=True)
@given(rechunkings(smallest=0))
def test_pieces_reassemble_the_array(plan):
    """This includes empty chunks, for which stock Dask makes more splits than elements."""
    old, new = plan
    shape = [sum(axis) for axis in old]
    array = np.arange(np.prod(shape)).reshape(shape)
    rechunking = Rechunking(old, new)
    inputs, outputs = blocks(array, old), blocks(array, new)
    pieces = {index: [] for index in outputs}
    for index in sorted(inputs, key=rechunking.number):
        for output, box, lengths in rechunking.of_input(index):
            assert inputs[index][box].shape == lengths
            pieces[output].append(inputs[index][box])
    for index, expected in outputs.items():
        n, places = rechunking.of_output(index)
        assert np.prod(n) == len(pieces[index]) > 0
        assert rechunking.shape_of_output(index) == expected.shape
        out = np.full(expected.shape, -1)
        for (place, lengths), piece in zip(places, pieces[index], strict=True):
            assert piece.shape == lengths
            out[place] = piece
        np.testing.assert_array_equal(out, expected)


def test_source_numbers_ascend_with_the_grid():
    rechunking = Rechunking(((1,) * 3, (1,) * 4, (1,) * 2), ((3,), (4,), (2,)))
    numbers = [rechunking.number(index) for index in grid(((1,) * 3, (1,) * 4, (1,) * 2))]
    assert numbers == list(range(24))


def test_unknown_chunk_lengths_are_kept():
    rechunking = Rechunking(((nan, nan), (4, 4)), ((nan, nan), (2, 6)))
    assert rechunking.has_shape((1, 0), (17, 4))
    assert not rechunking.has_shape((1, 0), (17, 5))
    assert not rechunking.has_shape((1, 0), (17,))
    pieces = list(rechunking.of_input((1, 0)))
    assert [output for output, _, _ in pieces] == [(1, 0), (1, 1)]
    assert [filled(lengths, (17, 4)) for _, _, lengths in pieces] == [(17, 2), (17, 2)]
    assert rechunking.shape_of_output((1, 1)) == (None, 6)
    n, _ = rechunking.of_output((1, 1))
    assert n == (1, 2)


def test_chunks_of_different_arrays_are_refused():
    with pytest.raises(ValueError, match="cannot become"):
        list(Rechunking(((4, 4),), ((4, 5),)).of_input((0,)))
    with pytest.raises(ValueError):
        Rechunking(((4,), (4,)), ((4,),))
