"""Values are added up in the order of ranks, in place, with the bits of plain NumPy."""

from __future__ import annotations

from functools import reduce

import numpy as np
import pytest

from dask_gpurt.collectives import reduction
from dask_gpurt.collectives.reduction import add_up, disagreement

PLAIN = {
    "sum": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "any": np.logical_or,
    "all": np.logical_and,
}
DTYPES = ["f4", "f8", "i2", "i8", "u1", "c16", "?"]


def values(dtype, n, length=1000):
    rng = np.random.default_rng(n)
    if dtype == "?":
        return [rng.random(length) < 0.5 for _ in range(n)]
    return [(rng.normal(size=length) * 9).astype(dtype) for _ in range(n)]


@pytest.fixture(params=["one piece", "many pieces"])
def pieces(request, monkeypatch):
    if request.param == "many pieces":
        monkeypatch.setattr(reduction, "PIECE_NBYTES", 96)


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("operation", PLAIN)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 2, 3, 7])
def test_the_sum_has_the_bits_of_plain_numpy(operation, dtype, n):
    given = values(dtype, n)
    wanted = reduce(PLAIN[operation], given).astype(dtype)
    for place in range(n):
        ours = [one.copy() for one in given]
        out = ours[place]
        add_up(operation, ours, out)
        np.testing.assert_array_equal(out, wanted)
        assert all(
            np.array_equal(one, was) for one, was in zip(ours, given, strict=True) if one is not out
        )
    fresh = np.empty(1000, dtype)
    add_up(operation, given, fresh)
    np.testing.assert_array_equal(fresh, wanted)


def test_missing_values_stay_missing():
    out = np.zeros(2)
    add_up("max", [np.array([np.nan, 1.0]), np.array([5.0, np.nan]), np.array([7.0, 2.0])], out)
    assert np.isnan(out).all()


def test_no_elements_are_no_problem():
    out = np.zeros(0)
    add_up("sum", [np.zeros(0), np.zeros(0)], out)
    assert out.shape == (0,)


def test_ranks_that_differ_are_named():
    same = ((10,), "float32")
    assert disagreement({0: same, 3: same}) is None
    found = disagreement({0: ((12,), "float64"), 1: ((12,), "float64"), 3: same})
    assert found == "rank 3 has (10,) float32, rank 0 has (12,) float64"
