"""Contract tests of dask.dataframe's row numbering, and tests of the patch and its removal."""

from __future__ import annotations

import functools
import gc
import inspect
import pickle
import sys

import cloudpickle
import dask.dataframe as dd
import dask.dataframe.dask_expr._merge as merge_module
import dask.dataframe.shuffle as shuffle_module
import numpy as np
import pandas as pd
import pytest
from dask.dataframe.dask_expr._shuffle import AssignPartitioningIndex

from dask_gpurt.frames import numbering
from dask_gpurt.plugins.patches import dataframe
from dask_gpurt.plugins.patches.dataframe import RowNumbers
from dask_gpurt.process_patch import ProcessPatch
from tests.conftest import two_clusters

STOCK_OPERATION = AssignPartitioningIndex.operation
STOCK_NUMBERS = merge_module.partitioning_index

FRAME = pd.DataFrame({"a": [3, 1, 2, 3], "b": [1.5, np.nan, -0.0, 0.0], "c": list("wxyz")})


@pytest.fixture(autouse=True)
def nobody_else():
    """Install Dask's functions; workers of other tests in this process may still use the patch.

    These workers may release it at any time. The fixture holds it too, so that the last release
    does not restore Dask's functions in the middle of a test.
    """
    others = RowNumbers()
    others.install()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AssignPartitioningIndex, "operation", staticmethod(STOCK_OPERATION))
        for module in (merge_module, shuffle_module):
            patch.setattr(module, "partitioning_index", STOCK_NUMBERS)
        patch.setattr(dataframe, "_patch", ProcessPatch(dataframe._replace))
        yield
    others.uninstall()


@pytest.fixture
def numbers(nobody_else):
    numbers = RowNumbers()
    numbers.install()
    yield numbers
    numbers.uninstall()
    assert is_stock()


@pytest.fixture
def counted(monkeypatch):
    """The number of columns and rows of each call of the replacement."""
    calls = []
    partition_numbers = numbering.partition_numbers

    def counting(columns, n_partitions):
        calls.append((len(columns), len(columns[0])))
        return partition_numbers(columns, n_partitions)

    # Ignore the comparison with Dask, which runs once a process.
    numbers = RowNumbers()
    numbers.install()
    numbers.uninstall()
    monkeypatch.setattr(numbering, "partition_numbers", counting)
    return calls


def is_stock():
    return (
        AssignPartitioningIndex.operation is STOCK_OPERATION
        and merge_module.partitioning_index is STOCK_NUMBERS
        and shuffle_module.partitioning_index is STOCK_NUMBERS
    )


def test_dask_has_the_replaced_functions():
    assert isinstance(inspect.getattr_static(AssignPartitioningIndex, "operation"), staticmethod)
    parameters = list(inspect.signature(STOCK_OPERATION).parameters)
    assert parameters == ["df", "index", "name", "npartitions", "meta", "index_shuffle"]
    parameters = list(inspect.signature(STOCK_NUMBERS).parameters)
    assert parameters == ["df", "npartitions", "cast_dtype"]


def test_tasks_of_a_merge_find_their_function_by_name(numbers):
    made = merge_module.create_assign_index_merge_transfer()
    assert made.__globals__ is vars(merge_module)
    assert "partitioning_index" in made.__code__.co_names
    sent = cloudpickle.dumps(made)
    assert b"dask_gpurt" not in sent
    assert pickle.loads(sent).__globals__["partitioning_index"] is not STOCK_NUMBERS
    numbers.uninstall()
    assert pickle.loads(sent).__globals__["partitioning_index"] is STOCK_NUMBERS


@pytest.mark.parametrize("index", [["a"], ["a", "b"], ["c"], ["a", "c"], FRAME["a"]])
def test_operation_equals_stock(numbers, index):
    meta = FRAME.iloc[:0]
    found = AssignPartitioningIndex.operation(FRAME, index, "_partitions", 7, meta, False)
    expected = STOCK_OPERATION(FRAME, index, "_partitions", 7, meta, False)
    pd.testing.assert_frame_equal(found, expected)


def test_operation_on_the_index_equals_stock(numbers):
    arguments = (FRAME.rename_axis("i"), ["_index"], "_partitions", 7, FRAME.iloc[:0], True)
    found = AssignPartitioningIndex.operation(*arguments)
    pd.testing.assert_frame_equal(found, STOCK_OPERATION(*arguments))


@pytest.mark.parametrize("columns", [["a"], ["b"], ["a", "b", "c"]])
def test_partition_numbers_of_a_merge_equal_dask(numbers, columns):
    found = merge_module.partitioning_index(FRAME[columns], 7)
    expected = STOCK_NUMBERS(FRAME[columns], 7)
    assert found.dtype == expected.dtype
    assert np.array_equal(found, expected)


def test_the_last_uninstall_restores_stock():
    first, second = RowNumbers(), RowNumbers()
    first.install()
    first.install()
    second.install()
    assert not is_stock()
    first.uninstall()
    first.uninstall()
    assert not is_stock()
    second.uninstall()
    assert is_stock()


def test_collecting_the_last_worker_restores_stock():
    numbers = RowNumbers()
    numbers.install()
    assert not is_stock()
    del numbers
    gc.collect()
    assert is_stock()


def test_a_task_pickled_while_patched_is_stock_s(numbers):
    task = pickle.dumps(AssignPartitioningIndex.operation)
    assert b"dask_gpurt" not in task
    numbers.uninstall()
    assert pickle.loads(task) is STOCK_OPERATION


def test_the_patch_imports_nothing(monkeypatch):
    monkeypatch.delitem(sys.modules, dataframe._MERGE)
    numbers = RowNumbers()
    numbers.install()
    assert is_stock()
    assert dataframe._MERGE not in sys.modules
    numbers.uninstall()


def test_a_pandas_that_hashes_differently_keeps_dask_s_functions(monkeypatch, caplog):
    monkeypatch.setattr(dataframe, "_agrees", functools.cache(dataframe._agrees.__wrapped__))
    monkeypatch.setattr(numbering, "_END", 0)
    numbers = RowNumbers()
    with caplog.at_level("INFO", logger="dask_gpurt"):
        numbers.install()
        numbers.install()
    assert is_stock()
    assert caplog.messages == ["Dask numbers the rows: this version of pandas hashes differently"]


def test_shuffles_and_merges_use_the_patch(counted):
    frame = pd.DataFrame({"a": np.arange(4_000) % 97, "b": np.arange(4_000) * 1.0})

    def workload():
        left = dd.from_pandas(frame, npartitions=4)
        right = dd.from_pandas(frame.rename(columns={"b": "c"}), npartitions=3)
        return (
            left.shuffle("a", npartitions=5).map_partitions(len),
            left.merge(right, on="a", npartitions=5).b.sum(),
        )

    results = {}
    # New clusters: workers that had a shuffle a moment ago still have the patch.
    with two_clusters(3) as sides:
        for side, client in (("stock", sides.stock), ("enabled", sides.enabled)):
            with client.as_current():
                # Twice: Dask numbers the rows of the very first tasks, before a run begins.
                for _ in range(2):
                    rows, total = (client.compute(one, sync=True) for one in workload())
                results[side] = (list(rows), total)
            if side == "stock":
                assert not counted
    assert results["enabled"] == results["stock"]
    assert {n_columns for n_columns, _ in counted} == {1}
    assert sum(n_rows for _, n_rows in counted) >= 3 * 4_000
