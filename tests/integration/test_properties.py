"""Shuffles of random frames and partitionings equal Dask's, including dtypes."""

from __future__ import annotations

import dask
import numpy as np
import pandas as pd
import pyarrow as pa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.integration.comparing import assert_same_as_stock, collection


def numbers(dtype):
    return lambda rng, n: rng.integers(-100, 100, n).astype(dtype)


def words(dtype):
    def draw(rng, n):
        values = rng.choice(np.array(["", "a", "bcd", "äöü€", "x" * 40, None], dtype=object), n)
        return pd.array(values, dtype=dtype)

    return draw


def masked(dtype):
    return lambda rng, n: pd.array(
        np.where(rng.random(n) < 0.3, None, rng.integers(0, 2, n).astype(object)), dtype=dtype
    )


COLUMNS = {
    "i1": numbers("i1"),
    "i8": numbers("i8"),
    "u4": lambda rng, n: rng.integers(0, 9, n).astype("u4"),
    "f4": numbers("f4"),
    "f8": lambda rng, n: np.where(rng.random(n) < 0.2, np.nan, rng.random(n)),
    "bool": lambda rng, n: rng.random(n) < 0.5,
    "ns": lambda rng, n: rng.integers(0, 1 << 60, n).astype("M8[ns]"),
    "ms": lambda rng, n: rng.integers(0, 1 << 40, n).astype("M8[ms]"),
    "NaT": lambda rng, n: np.where(
        rng.random(n) < 0.3, np.datetime64("NaT", "s"), np.datetime64("2020-01-01", "s")
    ),
    "zone": lambda rng, n: pd.DatetimeIndex(rng.integers(0, 1 << 60, n).astype("M8[ns]"), tz="UTC"),
    "delta": lambda rng, n: rng.integers(0, 1 << 40, n).astype("m8[us]"),
    "str": words("str"),
    "string": words("string[pyarrow]"),
    "Int64": masked("Int64"),
    "Float64": masked("Float64"),
    "boolean": masked("boolean"),
    "category": lambda rng, n: pd.Categorical(
        rng.choice(np.array(["p", "q", None], dtype=object), n), categories=["q", "p", "r"]
    ),
    "arrow": lambda rng, n: pd.Series(rng.integers(0, 9, n), dtype=pd.ArrowDtype(pa.int16())).array,
    "period": lambda rng, n: pd.arrays.PeriodArray(rng.integers(0, 500, n), dtype="period[D]"),
}

INDEXES = ["range", "int", "str", "datetime"]


def index(kind, rng, n):
    if kind == "int":
        return pd.Index(rng.integers(0, 5, n), name="n")
    if kind == "str":
        return pd.Index(pd.array(rng.choice(["k", "l"], n), dtype="str"))
    if kind == "datetime":
        return pd.DatetimeIndex(rng.integers(0, 1 << 60, n).astype("M8[ns]"), name="when")
    return pd.RangeIndex(n)


@st.composite
def plans(draw):
    columns = draw(st.lists(st.sampled_from(sorted(COLUMNS)), max_size=6))
    kind = draw(st.sampled_from(INDEXES))
    sizes = draw(st.lists(st.integers(0, 70), min_size=1, max_size=5))
    seed = draw(st.integers(0, 2**32 - 1))
    n_keys = draw(st.sampled_from([1, 3, 1000]))
    frames = []
    for number, size in enumerate(sizes):
        rng = np.random.default_rng([seed, number])
        made = {"key": rng.integers(0, n_keys, size)}
        made |= {f"{i}_{name}": COLUMNS[name](rng, size) for i, name in enumerate(columns)}
        frames.append(pd.DataFrame(made).set_index(index(kind, rng, size)))
    return frames, draw(st.integers(1, 9))


def assert_any_shuffle_equals_stock(sides, n_examples):
    @settings(
        max_examples=n_examples,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(plan=plans())
    def check(plan):
        frames, npartitions = plan
        with dask.config.set({"dataframe.convert-string": False}):
            lazy = collection(frames).shuffle("key", npartitions=npartitions)
            assert_same_as_stock(sides, lazy, 1)

    check()


def test_shuffle_equals_dask(sides):
    assert_any_shuffle_equals_stock(sides, 40)


def test_shuffle_over_ucx_equals_dask(over_ucx):
    assert_any_shuffle_equals_stock(over_ucx, 10)
