"""Shuffles of many shapes and combinations equal those of plain Dask."""

from __future__ import annotations

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest

import dask_gpurt
from tests.integration.comparing import (
    assert_same_as_stock,
    assert_same_partitions,
    collection,
    on_our_plane,
    partitions,
)
from tests.thoroughness import only_if_all


def frame(rows, seed=0, n_keys=50):
    rng = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "key": rng.integers(0, n_keys, rows),
            "value": rng.random(rows),
            "text": pd.array(rng.choice(["x", "yy", "zzz"], rows), dtype="str"),
        }
    )


def many(sizes):
    return collection([frame(size, seed) for seed, size in enumerate(sizes)])


@pytest.mark.parametrize(
    ("sizes", "npartitions"),
    [
        ([100, 0, 100, 0], 4),
        ([0, 0, 0], 3),
        ([0, 0, 0], 1),
        ([0, 5, 0], 8),
        ([200], 7),
        ([50] * 10, 1),
        ([50] * 2, 2),
        ([50, 1, 0, 1], 40),
    ],
    ids=str,
)
def test_partition_sizes_are_shuffled_as_in_dask(sides, sizes, npartitions):
    assert_same_as_stock(sides, many(sizes).shuffle("key", npartitions=npartitions), 1)


def test_all_rows_may_go_to_one_partition(sides):
    lazy = collection([frame(100, seed, n_keys=1) for seed in range(5)])
    got = assert_same_as_stock(sides, lazy.shuffle("key", npartitions=5), 1)
    assert sorted(map(len, got)) == [0, 0, 0, 0, 500]


@only_if_all
def test_thousand_columns_are_shuffled(sides):
    def wide(seed):
        rng = np.random.default_rng(seed)
        columns = {f"f{i}": rng.random(40) for i in range(400)}
        columns |= {f"i{i}": rng.integers(0, 9, 40) for i in range(400)}
        columns |= {f"s{i}": pd.array(rng.choice(["a", "b"], 40), "str") for i in range(200)}
        return pd.DataFrame({"key": rng.integers(0, 20, 40), **columns})

    lazy = collection([wide(seed) for seed in range(3)])
    assert_same_as_stock(sides, lazy.shuffle("key", npartitions=4), 1)


@only_if_all
@pytest.mark.slow
def test_five_thousand_partitions_are_shuffled(sides):
    lazy = collection([frame(20_000, seed, n_keys=1 << 40) for seed in range(4)])
    got = on_our_plane(sides, lazy.shuffle("key", npartitions=5_000), 1)
    assert len(got) == 5_000
    joined = pd.concat(got)
    source = pd.concat([frame(20_000, seed, n_keys=1 << 40) for seed in range(4)])
    by = ["key", "value"]
    pd.testing.assert_frame_equal(
        joined.sort_values(by, ignore_index=True), source.sort_values(by, ignore_index=True)
    )


@pytest.mark.parametrize("keep", [[0], [3, 1], [7, 2, 5]])
def test_shuffle_computes_only_requested_outputs(sides, keep):
    """Only some output partitions are requested; rows of the others are dropped."""
    lazy = many([100] * 4).shuffle("key", npartitions=8).partitions[keep]
    assert_same_as_stock(sides, lazy, 1)


def test_several_runs_work_at_once(each_way):
    lazy = [many([80] * n).shuffle("key", npartitions=n + 1) for n in (2, 3, 4, 5)]

    def together(client):
        with client.as_current(), dask.config.set({"dataframe.shuffle.method": "p2p"}):
            return client.gather(client.compute(lazy))

    got, expected = together(each_way.enabled), together(each_way.stock)
    assert_same_partitions(list(got), list(expected))


def test_same_shuffle_may_run_twice(sides):
    lazy = many([80] * 4).shuffle("key", npartitions=3)
    first = assert_same_as_stock(sides, lazy, 1)
    second = assert_same_as_stock(sides, lazy, 1)
    assert_same_partitions(first, second)


def test_shuffle_of_a_shuffle_equals_dask(sides):
    lazy = many([80] * 4).shuffle("key", npartitions=3).shuffle("text", npartitions=5)
    assert_same_as_stock(sides, lazy, 2)


def test_result_outlives_the_cluster_s_next_shuffle(each_way):
    """Outputs are in pool memory, which the next shuffle must not overwrite."""
    with each_way.enabled.as_current(), dask.config.set({"dataframe.shuffle.method": "p2p"}):
        kept = each_way.enabled.persist(many([500_000] * 2).shuffle("key", npartitions=4))
        before = kept.map_partitions(pd.util.hash_pandas_object).sum().compute()
        for _ in range(2):
            many([500_000] * 2).shuffle("value", npartitions=3).value.sum().compute()
        assert kept.map_partitions(pd.util.hash_pandas_object).sum().compute() == before


OPERATIONS = {
    "set_index": lambda left, right: left.set_index("key"),
    "set_index sorted values": lambda left, right: left.set_index("value", npartitions=3),
    "sort_values": lambda left, right: left.sort_values("value"),
    "sort_values descending": lambda left, right: left.sort_values("key", ascending=False),
    "sort_values missing first": lambda left, right: left.assign(
        value=left["value"].where(left["value"] > 0.3)
    ).sort_values("value", na_position="first"),
    "merge": lambda left, right: left.merge(right, on="key"),
    "merge left": lambda left, right: left.merge(right, on="key", how="left"),
    "merge outer": lambda left, right: left.merge(right, on="key", how="outer"),
    "merge two keys": lambda left, right: left.merge(right, on=["key", "text"]),
    "merge on index": lambda left, right: left.merge(
        right, left_on="key", right_index=True, how="inner"
    ),
    "merge of merge": lambda left, right: left.merge(right, on="key").merge(
        right, on="key", suffixes=("_a", "_b")
    ),
    "drop_duplicates": lambda left, right: left.drop_duplicates(
        subset=["key"], split_out=3, shuffle_method="p2p"
    ),
    "groupby sum": lambda left, right: left.groupby("key").sum(split_out=3, shuffle_method="p2p"),
    "groupby apply": lambda left, right: left.groupby("key")[["value"]].apply(
        lambda group: group.sum(), meta={"value": "f8"}
    ),
    "nunique": lambda left, right: left.groupby("key")["text"].nunique(
        split_out=2, shuffle_method="p2p"
    ),
    "groupby transform": lambda left, right: left.groupby("key")["value"].transform(
        "mean", meta=("value", "f8")
    ),
}


@pytest.mark.share(2)
@pytest.mark.parametrize("name", OPERATIONS)
def test_dataframe_operations_equal_dask(sides, name):
    left = many([120, 80, 0, 100])
    right = collection([frame(60, seed, n_keys=70) for seed in range(10, 13)])
    assert_same_as_stock(sides, OPERATIONS[name](left, right))


def test_unsupported_kind_of_frame_runs_on_dask(sides):
    """A subclass may have state that the adapter of its base would lose."""
    lazy = collection([Labelled(frame(50, seed)) for seed in range(3)])
    before = dask_gpurt.status(sides.enabled)
    got = partitions(sides.enabled, lazy.shuffle("key", npartitions=3))
    again = partitions(sides.enabled, lazy.shuffle("key", npartitions=2))
    after = dask_gpurt.status(sides.enabled)
    assert sum(map(len, got)) == sum(map(len, again)) == 150
    assert after["runs"]["gpurt"] == before["runs"]["gpurt"]
    assert after["runs"]["stock"] == before["runs"]["stock"] + 2
    (fallback,) = [f for f in after["fallbacks"] if "Labelled" in f["what"]]
    assert fallback["count"] == 2
    assert "no adapter" in fallback["why"]


class Labelled(pd.DataFrame):
    @property
    def _constructor(self):
        return Labelled


def test_wrong_columns_are_refused_as_in_dask(sides):
    good, bad = frame(20), frame(20).rename(columns={"value": "other"})
    parts = dd.from_delayed(
        [dask.delayed(lambda f: f)(f) for f in (good, bad)], meta=good.iloc[:0], verify_meta=False
    )
    for client in (sides.stock, sides.enabled):
        with pytest.raises(RuntimeError, match="failed during transfer phase") as caught:
            partitions(client, parts.shuffle("key", npartitions=2))
        assert isinstance(caught.value.__cause__, ValueError)
