"""Counters of shuffles outlive the workers that moved the bytes."""

from __future__ import annotations

import os
import signal

import dask
import pandas as pd
import pytest
from distributed import Client, LocalCluster
from distributed.utils_test import async_poll_for, gen_cluster

import dask_gpurt
from dask_gpurt.metrics import MEANING
from tests.failure.gates import until
from tests.integration.comparing import collection, runs


def shuffled():
    parts = [pd.DataFrame({"key": range(n, n + 2_000), "x": 0.5}) for n in range(4)]
    with dask.config.set({"dataframe.shuffle.method": "p2p"}):
        return collection(parts).shuffle("key", npartitions=4).to_delayed()


def told(status):
    """Return the counters and the table of shuffles."""
    return {name: status["totals"][name] for name in MEANING}, status["shuffles"]


def runs_under_way(worker):
    return worker.extensions["gpurt"]._runs


def untold(worker):
    """Return the ended runs that no heartbeat has reported yet."""
    return worker.extensions["gpurt"].run_reports._untold


async def shuffle(c):
    await c.gather(c.compute(shuffled()))


@gen_cluster(client=True, nthreads=[("", 1)] * 3)
async def test_retired_and_closed_workers_still_count(c, s, a, b, d):
    await dask_gpurt.enable(c)
    await shuffle(c)
    # A run has ended once the scheduler has forgotten its tasks.
    await async_poll_for(lambda: not s.tasks, timeout=60)
    await async_poll_for(lambda: not any(runs_under_way(w) for w in (a, b, d)), timeout=60)
    before = await dask_gpurt.status(c)
    assert before["totals"]["sent_nbytes"] > 0
    assert before["departed"]["workers"] == 0
    # Workers report counters on request, by heartbeats and when they leave. They count once.
    await async_poll_for(lambda: not any(untold(w) for w in (a, b, d)), timeout=60)
    assert told(await dask_gpurt.status(c)) == told(before)
    await c.retire_workers([a.address])
    await b.close()
    await s.retire_workers([d.address])
    await async_poll_for(lambda: not s.workers, timeout=60)
    after = await dask_gpurt.status(c)
    assert told(after) == told(before)
    assert after["departed"] == {
        "workers": 3,
        "totals": {name: before["totals"][name] for name in MEANING},
    }


@gen_cluster(client=True, nthreads=[("", 1)] * 3)
async def test_links_to_departed_workers_are_forgotten(c, s, a, b, d):
    """Shuffles may follow each other for days, and adaptive clusters come and go meanwhile."""
    await dask_gpurt.enable(c)
    await shuffle(c)
    links = a.extensions["gpurt"].links
    assert {b.address, d.address} == set(links.report())
    await d.close()
    await async_poll_for(lambda: set(links.report()) == {b.address}, timeout=60)
    await shuffle(c)
    assert set(links.report()) == {b.address}


@gen_cluster(client=True, nthreads=[("", 1)] * 2)
async def test_counters_are_kept_on_disable_and_reset_on_enable(c, s, a, b):
    await dask_gpurt.enable(c)
    await shuffle(c)
    await async_poll_for(lambda: not s.tasks, timeout=60)
    await async_poll_for(lambda: not (runs_under_way(a) or runs_under_way(b)), timeout=60)
    before = await dask_gpurt.status(c)
    await dask_gpurt.disable(c)
    assert told(await dask_gpurt.status(c)) == told(before)
    # The departure of a worker changes nothing, either.
    await b.close()
    assert told(await dask_gpurt.status(c)) == told(before)
    await dask_gpurt.enable(c)
    counters, shuffles = told(await dask_gpurt.status(c))
    assert not any(counters.values())
    assert shuffles == []
    await shuffle(c)
    # Only one worker is left, so there is one run.
    assert (await dask_gpurt.status(c))["totals"]["shuffle_runs"] == 1


@gen_cluster(client=True, nthreads=[("", 1)] * 2)
async def test_malformed_counters_of_a_worker_are_ignored(c, s, a, b):
    await dask_gpurt.enable(c)
    said = []

    def nonsense():
        said.append({"counters": {"sent_nbytes": "many"}, "runs": None})
        return said[-1]

    a.extensions["gpurt"].heartbeat_data = nonsense
    # A second heartbeat shows that the first one was answered.
    await async_poll_for(lambda: len(said) > 1, timeout=60)
    assert await c.scheduler.gpurt_counted(worker=a.id, said=[1]) is None
    assert a.address in s.workers
    assert (await dask_gpurt.status(c))["totals"]["sent_nbytes"] == 0


@pytest.mark.cluster
@pytest.mark.slow
def test_killed_restarted_and_removed_workers_still_count():
    options = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": ":0"}
    with (
        LocalCluster(silence_logs=False, **options) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        dask_gpurt.enable(client)

        def all_ready():
            found = client.run_on_scheduler(lambda dask_scheduler: _ready(dask_scheduler))
            return found == 2

        def shuffle_once():
            until(all_ready, "workers do not become ready")
            client.gather(client.compute(shuffled()))

        def heard(dask_scheduler):
            """Return the scheduler's counters without a request to workers, which adds to them."""
            return dask_scheduler.plugins["gpurt"].tally.totals()

        shuffle_once()
        sent = dask_worker_counters(client)
        until(lambda: client.run_on_scheduler(heard) == sent, "no heartbeat says it")
        for pid in client.run(os.getpid).values():
            os.kill(pid, signal.SIGKILL)
        until(lambda: departed(client) == 2, "the workers that were killed do not leave")
        after_kill = dask_gpurt.status(client)
        assert told(after_kill)[0] == sent
        assert after_kill["totals"]["sent_nbytes"] > 0

        shuffle_once()
        before = dask_gpurt.status(client)
        assert amounts(before) == (8, 8, 4)
        assert before["totals"]["sent_nbytes"] > after_kill["totals"]["sent_nbytes"]
        client.restart()
        until(lambda: told_of(client)[0] == told(before)[0], "restarting loses what was counted")

        shuffle_once()
        before = dask_gpurt.status(client)
        cluster.scale(0)
        until(lambda: departed(client) == 6, "the workers do not leave")
        until(lambda: told_of(client)[0] == told(before)[0], "the last report does not arrive")
        after = dask_gpurt.status(client)
        assert runs(client)["gpurt"] == 3
        assert after["workers"] == {}
        assert amounts(after) == (12, 12, 6)
        assert [one["rows"] for one in after["shuffles"]][-1] == 8_000


def amounts(status):
    """Return the numbers that do not depend on where partitions went."""
    names = ("partitions_in", "partitions_out", "shuffle_runs")
    return tuple(status["totals"][name] for name in names)


def _ready(dask_scheduler):
    return len(dask_scheduler.plugins["gpurt"].readiness.ready)


def told_of(client):
    return told(dask_gpurt.status(client))


def departed(client):
    return dask_gpurt.status(client)["departed"]["workers"]


def dask_worker_counters(client):
    from dask_gpurt.metrics import total

    def counters(dask_worker):
        return dask_worker.extensions["gpurt"].counted()

    return total(client.run(counters).values())
