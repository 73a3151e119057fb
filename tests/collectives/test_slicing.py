"""Slices of values keep their memory order, and pieces are combined into what the whole gives."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.collectives import slicing
from dask_gpurt.collectives.slicing import ALIGNMENT, Cut, Piecewise, bounds


@given(st.integers(0, 100_000), st.integers(1, 300))
def test_slices_are_aligned_wide_and_about_equal(width, n_slices):
    starts = bounds(width, n_slices)
    assert starts[0] == 0 and len(starts) == max(1, min(n_slices, width // ALIGNMENT))
    assert all(start % ALIGNMENT == 0 for start in starts)
    widths = np.diff([*starts, width])
    if len(starts) > 1:
        assert widths.min() >= ALIGNMENT
        assert widths.max() - widths.min() < 3 * ALIGNMENT


def test_a_slice_of_adjacent_elements_is_not_copied():
    value = np.ones((1, 300))
    part = Cut(1, 64, 128)(value)
    assert np.shares_memory(part, value) and part.shape == (1, 64)
    assert Cut(1, 256, None)(value).shape == (1, 44)


def test_other_slices_are_copied_in_their_memory_order():
    value = np.asfortranarray(np.random.default_rng(1).random((300, 5)))
    part = Cut(0, 64, 128)(value)
    assert part.flags.f_contiguous and not np.shares_memory(part, value)
    np.testing.assert_array_equal(part, value[64:128])


def test_a_repeated_number_stays_one_number():
    value = {"n": np.broadcast_to(np.float64(3), (1, 300)), "total": np.ones((1, 300))}
    part = Cut(1, 64, 128)(value)
    assert part["n"].strides == (0, 0) and part["total"].shape == (1, 64)


def total(values):
    total.shapes.append(values[0].shape)
    return np.concatenate(values).sum(axis=0)


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(slicing, "PIECE_NBYTES", 1 << 10)
    total.shapes = []


@pytest.mark.parametrize("order", "CF")
def test_pieces_give_the_whole(small_pieces, order):
    values = [np.asarray(np.random.default_rng(k).random((1, 300, 4)), order=order) for k in (1, 2)]
    found = Piecewise(total, 1, 0)(values)
    assert len(total.shapes) == 4 and max(total.shapes) == (1, 108, 4)
    expected = total(values)
    assert found.tobytes() == expected.tobytes() and found.strides == expected.strides


@pytest.mark.parametrize(
    "values",
    [
        [np.ones((1, 70)), np.ones((1, 70))],
        [np.ma.ones((1, 300)), np.ones((1, 300))],
        [np.ones((1, 300)), np.ones((1, 300)).view(np.matrix)],
    ],
)
def test_small_and_other_values_are_combined_at_once(small_pieces, values):
    Piecewise(total, 1, 0)(values)
    assert total.shapes == [values[0].shape]


def test_wrong_shapes_have_stock_errors(small_pieces):
    with pytest.raises(ValueError, match="dimension"):
        Piecewise(total, 1, 0)([np.ones((1, 300)), np.ones(300)])
    assert total.shapes == [(1, 300)]


def test_results_of_other_shapes_are_made_at_once(small_pieces):
    found = Piecewise(lambda values: total(values)[:5], 1, 0)([np.ones((1, 300))])
    assert found.shape == (5,)
    assert total.shapes[-1] == (1, 300)


def counts(values):
    n = np.concatenate([one["n"] for one in values]).sum(axis=0, keepdims=True)
    return {"n": n, "total": np.concatenate([one["total"] for one in values]).sum(0, keepdims=True)}


@pytest.mark.parametrize("repeated", [True, False])
def test_repeated_counts_stay_repeated(small_pieces, repeated):
    n = np.broadcast_to(np.float64(3), (1, 300)) if repeated else np.full((1, 300), 3.0)
    values = [{"n": n, "total": np.full((1, 300), k)} for k in (1.0, 2.0, 4.0)]
    found = Piecewise(counts, 1, 1)(values)
    assert (found["n"].strides == (0, 0)) == repeated
    assert found["n"].shape == (1, 300) and (found["n"] == 9).all()
    assert (found["total"] == 7).all()


def test_a_value_without_the_axis_is_left_as_it_is():
    """Stock Dask's function then gets what it would get without slices."""
    value = np.ones(0)
    assert Cut(1, 64, None)(value) is value
