"""With hot keys, workers get nearly equal shares, and the rows equal those of Dask."""

from __future__ import annotations

import dask
import numpy as np
import pandas as pd
import pytest
from dask.dataframe.shuffle import partitioning_index
from distributed import Client, LocalCluster

import dask_gpurt
from tests.conftest import Sides, two_clusters
from tests.integration.comparing import assert_same_as_stock, collection, on_our_plane

N_WORKERS = 4
N_PARTITIONS = 64
ROWS = 20_000


@pytest.fixture(scope="module")
def four_workers():
    with two_clusters(N_WORKERS) as sides:
        yield sides


def keys_by_heat():
    """Return keys by heat; each of the hottest goes to its own, neighbouring output partition."""
    candidates = pd.DataFrame({"key": np.arange(100_000)})
    cast = {"key": np.float64}  # as Dask hashes numbers
    candidates["partition"] = partitioning_index(candidates, N_PARTITIONS, cast_dtype=cast)
    candidates["turn"] = candidates.groupby("partition").cumcount()
    return candidates.sort_values(["turn", "partition"])["key"].to_numpy()


def zipf(number, column="x"):
    """Return rows whose keys have a Zipf distribution with exponent 1.2."""
    rng = np.random.default_rng(number)
    heat = rng.zipf(1.2, ROWS) % 100_000 - 1
    return pd.DataFrame({"key": KEYS[heat], column: np.arange(ROWS) + number * ROWS})


KEYS = keys_by_heat()


def skewed(first=0):
    return collection([zipf(first + number) for number in range(8)])


def last_shuffle(sides):
    return dask_gpurt.status(sides.enabled)["shuffles"][-1]


def test_zipf_keys_load_workers_evenly(four_workers: Sides):
    assert_same_as_stock(four_workers, skewed().shuffle("key", npartitions=N_PARTITIONS), 1)
    assert last_shuffle(four_workers)["skew"] <= 1.5


def test_zipf_keys_load_workers_evenly_over_ucx(over_ucx: Sides):
    assert_same_as_stock(over_ucx, skewed().shuffle("key", npartitions=N_PARTITIONS), 1)


def test_data_is_skewed_without_a_sketch(four_workers: Sides, monkeypatch):
    """The data really is skewed: without the sketch, workers get unequal shares."""
    monkeypatch.setattr("dask_gpurt.plugins.sketching.SKETCHED_ROWS", ROWS + 1)
    # The data differs from that above, because the sketch of a shuffle is kept for restarts.
    on_our_plane(four_workers, skewed(100).shuffle("key", npartitions=N_PARTITIONS), 1)
    assert last_shuffle(four_workers)["skew"] > 2


def test_both_sides_of_a_join_agree_on_owners(four_workers: Sides):
    right = collection([zipf(number, "y").drop_duplicates("key") for number in range(8)])
    right = right.drop_duplicates("key", split_out=16)
    joined = skewed().merge(right, on="key", how="inner", shuffle_method="p2p")
    got = pd.concat(on_our_plane(four_workers, joined))
    left = pd.concat([zipf(number) for number in range(8)])
    whole = pd.concat([zipf(number, "y") for number in range(8)])
    assert sorted(got["x"]) == sorted(left["x"][left["key"].isin(whole["key"])])


def test_even_keys_stay_in_ranges(four_workers: Sides):
    parts = [pd.DataFrame({"key": np.arange(ROWS), "x": 1.0}) for _ in range(8)]
    on_our_plane(four_workers, collection(parts).shuffle("key", npartitions=16), 1)
    assert last_shuffle(four_workers)["skew"] < 1.2


def test_unsketchable_data_is_shuffled(four_workers: Sides):
    part = zipf(0)
    part["key"] = part["key"].astype("Int64")
    shuffled = collection([part] * 4).shuffle("key", npartitions=16)
    assert_same_as_stock(four_workers, shuffled, 1)


def test_single_worker_is_not_sketched():
    options = {"n_workers": 1, "threads_per_worker": 2, "dashboard_address": ":0"}
    local = LocalCluster(processes=False, protocol="tcp://", silence_logs=False, **options)
    with local, Client(local, set_as_default=False) as client:
        dask_gpurt.enable(client)
        with client.as_current(), dask.config.set({"dataframe.shuffle.method": "p2p"}):
            assert len(skewed().shuffle("key", npartitions=8).compute()) == 8 * ROWS
        assert dask_gpurt.status(client)["shuffles"][-1]["skew"] == 1.0
