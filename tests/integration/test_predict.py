"""The trace of a real cluster becomes a program that the simulator runs to its end."""

from __future__ import annotations

import asyncio
import dataclasses
from functools import partial

import dask
import dask.array as da
from distributed.utils_test import gen_cluster

import dask_gpurt
from dask_gpurt.plugins.simulation.placed_run import simulate_placed
from dask_gpurt.predict.catalogue import Catalogue
from dask_gpurt.predict.prediction import predict
from dask_gpurt.predict.recorded_program import recorded_program
from dask_gpurt.tracing import files
from dask_gpurt.tracing.report.event_columns import prefix_of
from tests.integration.traced import N_PARTS, shuffled

TWO = [("127.0.0.1", 1)] * 2
LIMITED = {"memory_limit": "2GB"}
#: The process has the memory of all tests before, which may be more than the limit.
CONFIG = {"gpurt.enabled": True, "distributed.worker.memory.pause": False}


@gen_cluster(client=True, nthreads=TWO, worker_kwargs=LIMITED, config=CONFIG)
async def test_a_shuffle_and_a_later_graph_are_found_and_run(c, s, a, b):
    with dask.config.set({"dataframe.shuffle.method": "p2p"}):
        lengths = shuffled().map_partitions(len)
    path = f"{a.local_directory}/trace.json.gz"
    async with dask_gpurt.trace(c, path) as traced:
        first = await c.compute(lengths.sum().optimize())
        x = da.ones((400, 400), chunks=(100, 100))
        await c.compute((x + x.T).sum())
    assert first == N_PARTS * 20_000
    recorded = recorded_program(files.read(path), "trace")

    (exchange,) = recorded.program.exchanges
    assert len(exchange.transfers) <= N_PARTS  # one task may hand over several inputs
    assert len(exchange.outputs) == N_PARTS
    sent = sum(one.counters["sent_nbytes"] for one in traced.trace.processes if one.counters)
    assert exchange.nbytes == 2 * sent > 0
    first, *_, last = recorded.program.submissions
    assert exchange.barrier in first.tasks
    assert len(recorded.program.submissions) >= 2 and 0 in last.after
    assert recorded.cluster.memory_nbytes == 2_000_000_000
    assert recorded.cluster.n_workers == 2
    assert recorded.policy == "auto"

    # A thread has no event loop around that of the simulation.
    run = partial(simulate_placed, recorded.policy)
    wanted, catalogue = ["recorded", "2xrecorded"], Catalogue(recorded.cluster)
    found = await asyncio.to_thread(predict, recorded, wanted, catalogue, run)
    assert {row.group.name for row in found.rows} == {"1xrecorded", "2xrecorded"}
    assert all(row.fits and row.time_s > 0 for row in found.rows)


@gen_cluster(client=True, nthreads=TWO, config={"gpurt.enabled": True})
async def test_whole_keys_in_a_trace_make_the_same_groups(c, s, a, b):
    path = f"{a.local_directory}/trace.json.gz"
    async with dask_gpurt.trace(c, path, keys="full"):
        x = da.ones((400, 400), chunks=(100, 100))
        await c.compute((x + 1).sum())
    trace = files.read(path)
    prefixed = [one._replace(key=prefix_of(one.key)) for one in trace.tasks]
    assert not {one.key for one in trace.tasks} & {one.key for one in prefixed}
    programs = [
        recorded_program(one, "trace").program
        for one in (trace, dataclasses.replace(trace, tasks=prefixed))
    ]
    assert programs[0] == programs[1]
