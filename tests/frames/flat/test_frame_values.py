"""Series, frames and indexes are restored equal from their flat form."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from dask_gpurt.frames import joining
from dask_gpurt.frames.flat import flat_pandas, values
from dask_gpurt.frames.flat.values import flatten, restore
from tests.allocations import peak_nbytes
from tests.frames.flat.value_cases import (
    COLUMNS,
    FRAMES,
    INDEXES,
    MAKES_BLOCKS,
    N,
    all_columns,
    assert_same,
    copies_of,
    there_and_back,
)

# ------------------------------------------------------------------ columns and indexes


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("rows", [slice(None), slice(0), slice(1, -1), slice(None, None, 2)])
def test_series_is_restored_equal(name, rows):
    series = COLUMNS[name].iloc[rows].rename(name)
    assert_same(there_and_back(series), series)


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("rows", [slice(None), slice(0), slice(1, -1), slice(None, None, 2)])
def test_frame_of_each_type_is_restored_equal(name, rows):
    frame = pd.DataFrame({"a": COLUMNS[name], "b": 1.5, "c": COLUMNS[name]}).iloc[rows]
    assert_same(there_and_back(frame), frame)


@pytest.mark.parametrize("name", INDEXES)
def test_index_is_restored_equal(name):
    index = INDEXES[name]
    assert_same(there_and_back(index), index)
    series = pd.Series(np.arange(len(index)), index=index)
    assert_same(there_and_back(series), series)
    frame = pd.DataFrame(np.ones((2, len(index))), columns=index)
    assert_same(there_and_back(frame), frame)


@pytest.mark.parametrize("name", FRAMES)
def test_frame_is_restored_equal(name):
    assert_same(there_and_back(FRAMES[name]), FRAMES[name])


def test_restored_frame_is_writable():
    frame = all_columns()
    got = there_and_back(frame)
    for column in frame.columns.drop("sparse"):
        for one in (frame, got):
            one.iloc[0, one.columns.get_loc(column)] = frame[column].iloc[1]
    assert_same(got, frame)
    got["numbers"].array[0] = 9
    got = there_and_back(FRAMES["read-only"])
    got.iloc[0, 0] = 5.0
    assert got.iloc[0, 0] == 5.0


needs_blocks = pytest.mark.skipif(not MAKES_BLOCKS, reason="pandas before 3 copies more")

PLAIN = [
    *("numbers", "bool", "dates", "zone", "months", "category", "Int64"),
    *("text", "arrow integers", "arrow text", "arrow dictionary"),
]


#: msgpack allocates 256 KiB at the start, independent of its output.
SLACK_NBYTES = 300_000


@needs_blocks
@pytest.mark.parametrize("name", PLAIN)
def test_columns_and_frames_need_no_pickle_and_no_copy(name, monkeypatch):
    monkeypatch.setattr(values._Flattening, "pickled", forbidden)
    monkeypatch.setattr(values._Restoring, "unpickled", forbidden)
    series = COLUMNS[name].take(np.arange(600_000) % N).reset_index(drop=True)
    for value in (series, series.to_frame("a"), pd.Index(series)):
        assert peak_nbytes(flatten, value) < SLACK_NBYTES
        flat = flatten(value)
        assert len(flat.header) < 1_000
        buffers = copies_of(flat)
        assert peak_nbytes(restore, flat.header, buffers) < SLACK_NBYTES
        assert_same(restore(flat.header, buffers), value)


def forbidden(*args):
    raise AssertionError("pickled")


def blocks_of(frame):
    return [np.asarray(block.values) for block in frame._mgr.blocks]


@needs_blocks
def test_frames_are_not_copied_for_any_block_order():
    rng = np.random.default_rng(0)
    rows_first = pd.DataFrame(rng.random((1000, 8)), copy=False)
    columns_first = pd.DataFrame({str(i): rng.random(1000) for i in range(8)})
    for frame in (rows_first, columns_first, rows_first.iloc[100:200]):
        flat = flatten(frame)
        (block,) = blocks_of(frame)
        assert any(np.shares_memory(buffer, block) for buffer in flat.buffers)
        buffers = copies_of(flat)
        got = restore(flat.header, buffers)
        (again,) = blocks_of(got)
        assert any(np.shares_memory(buffer, again) for buffer in buffers)
        assert again.flags.c_contiguous == block.flags.c_contiguous
        assert_same(got, frame)


def test_the_cost_of_a_wide_frame_does_not_grow_with_its_columns():
    def counts(n_columns):
        frame = pd.DataFrame(np.ones((10, n_columns)), columns=pd.RangeIndex(n_columns))
        frame = pd.concat([frame, frame.astype("i4")], axis=1, ignore_index=True)
        flat = flatten(frame)
        return len(flat.buffers), len(flat.header)

    few, many = counts(10), counts(2_000)
    assert many[0] == few[0] == 2
    assert many[1] < few[1] + 40


def test_frames_are_restored_without_access_to_blocks():
    """Other versions of pandas may store their memory differently. Then columns are separate."""
    frame = pd.DataFrame({"a": [1.0, 2.0], "b": ["x", "y"], "c": [3.0, 4.0]})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joining, "create_dataframe_from_blocks", None)
        pd.testing.assert_frame_equal(there_and_back(frame), frame)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flat_pandas, "_manager_of", lambda value: None)
        pd.testing.assert_frame_equal(there_and_back(frame), frame)
        for name in COLUMNS:
            assert_same(there_and_back(COLUMNS[name]), COLUMNS[name])


def test_freq_is_kept_without_the_private_setter(monkeypatch):
    def public(index, freq):
        index.freq = freq

    monkeypatch.setattr(flat_pandas, "_set_freq", public)
    assert_same(there_and_back(INDEXES["days"]), INDEXES["days"])
