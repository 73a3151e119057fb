"""Traces of clusters in this process: the store of outputs, and groups of ranks."""

from __future__ import annotations

import numpy as np
import pytest
from distributed import wait

import dask_gpurt
from dask_gpurt.collectives import Communicator
from tests.integration.memory_cluster import MIB, cluster, on_disk, until
from tests.integration.traced import assert_received, shuffled

pytestmark = [pytest.mark.cluster]


def block(number):
    return np.full(MIB, number, np.float64)


def summed(comm, _blocks):
    return float(comm.allreduce(np.ones(4 * MIB))[0])


def test_evictions_and_reads_of_the_store_are_in_the_trace(tmp_path):
    with cluster(memory_limit=64 * MIB, n_workers=1) as client:
        with dask_gpurt.trace(client, tmp_path / "x.json") as traced:
            blocks = client.map(block, range(16), pure=False)
            wait(blocks)
            # Writes go on beside tasks. What is on disk has to be read for the sums.
            until(lambda: on_disk(client))
            assert sum(client.gather(client.map(np.sum, blocks))) == MIB * sum(range(16))
    trace = traced.trace
    writes = [one for one in trace.work if one.lane == "write" and one.path == "memory > disk"]
    reads = [one for one in trace.work if one.lane == "read"]
    assert writes and {one.nbytes // MIB for one in writes} == {8}
    assert reads and all(one.path.startswith("disk > ") for one in reads)
    evictions = [one for one in trace.instants if one.name == "eviction"]
    assert len(evictions) >= len(writes)


def test_messages_of_groups_are_in_the_trace(tmp_path):
    with cluster(memory_limit=256 * MIB, n_workers=2) as client:
        addresses = {one.address for one in client.cluster.workers.values()}
        with dask_gpurt.trace(client, tmp_path / "x.json") as traced:
            with Communicator(client) as comm:
                assert client.gather(comm.run(summed)) == [2.0, 2.0]
    sent = [one for one in traced.trace.work if one.path == "group"]
    assert {one.lane for one in sent} == {"collective"}
    # Each rank sends half of the array, and half of the sum.
    assert sum(one.nbytes for one in sent) >= 2 * 8 * 4 * MIB
    assert {one.peer for one in sent} == addresses
    assert_received(traced.trace, sent)


def n_tasks(dask_scheduler):
    return len(dask_scheduler.tasks)


def test_a_shuffle_that_is_computed_twice_does_not_restart(tmp_path):
    with cluster(memory_limit=256 * MIB, n_workers=2) as client:
        with dask_gpurt.trace(client, tmp_path / "x.json") as traced:
            for _ in range(2):
                client.gather(client.compute(shuffled()))
                until(lambda: not client.run_on_scheduler(n_tasks))
    assert "shuffle restarts" not in {one.name for one in traced.trace.instants}
