"""Shuffles restricted to some workers run there, even if some of them are absent."""

from __future__ import annotations

from types import SimpleNamespace

import dask
import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from dask.delayed import delayed

import dask_gpurt
from dask_gpurt.plugins.patches.p2p import active_shuffles
from tests.conftest import stock_client
from tests.failure.gates import Gate, pass_gate, until
from tests.limits import HANG_S

N_ROWS = 200
ABSENT = "tcp://127.0.0.1:1"


async def supply(dask_worker, **resources):
    await dask_worker.set_resources(**resources)


@pytest.fixture(scope="module")
def cluster():
    """The client and worker addresses of an enabled cluster; the first worker has a GPU."""
    with (
        dask.config.set({"dataframe.shuffle.method": "p2p", "gpurt.enabled": False}),
        stock_client(3) as client,
    ):
        dask_gpurt.enable(client)
        addresses = sorted(client.scheduler_info(n_workers=-1)["workers"])
        client.run(supply, workers=addresses[:1], GPU=1)
        yield SimpleNamespace(client=client, addresses=addresses)


def rows(seed=0):
    return pd.DataFrame({"key": np.arange(N_ROWS) % 23, "n": np.arange(N_ROWS) + seed})


def shuffled(seed=0):
    """Return a shuffle with unique tasks: shared tasks would share restrictions."""
    return dd.from_pandas(rows(seed), npartitions=5).shuffle("key", npartitions=6)


def owners(cluster, lazy, **restrictions):
    """Return the workers that have the outputs, after a check that all rows are there."""
    futures = cluster.client.compute(lazy.to_delayed(), **restrictions)
    parts = [future.result(timeout=HANG_S) for future in futures]
    assert sum(map(len, parts)) == N_ROWS
    holders = cluster.client.who_has(futures).values()
    return {address for addresses in holders for address in addresses}


@pytest.fixture(autouse=True)
def later_shuffles_are_not_held_up(cluster):
    yield
    assert owners(cluster, shuffled(-1)) == set(cluster.addresses)


#: Functions from worker addresses to restrictions, and numbers of workers allowed for outputs.
RESTRICTIONS = {
    "absent, loosely": (lambda _: [ABSENT], True, {0, 1, 2}),
    "one of two, loosely": (lambda there: [ABSENT, there[1]], True, {1}),
    "one of two": (lambda there: [ABSENT, there[1]], False, {1}),
    "two": (lambda there: there[:2], False, {0, 1}),
    "absent host, loosely": (lambda _: ["nowhere.invalid"], True, {0, 1, 2}),
    "host": (lambda _: ["127.0.0.1"], False, {0, 1, 2}),
    "absent host and a worker": (lambda there: ["nowhere.invalid", there[2]], False, {2}),
}


@pytest.mark.parametrize("name", RESTRICTIONS)
def test_restricted_outputs_go_to_present_workers(cluster, name):
    choose, is_loose, expected = RESTRICTIONS[name]
    workers = choose(cluster.addresses)
    found = owners(cluster, shuffled(1), workers=workers, allow_other_workers=is_loose)
    assert found == {cluster.addresses[number] for number in expected}


def test_outputs_go_to_the_worker_with_the_resource(cluster):
    assert owners(cluster, shuffled(2), resources={"GPU": 1}) == {cluster.addresses[0]}


def test_restricted_join_ignores_absent_workers(cluster):
    left, right = (dd.from_pandas(rows(seed), npartitions=4) for seed in (3, 4))
    lazy = left.merge(right, on="key", broadcast=False)
    found = cluster.client.compute(lazy, workers=[ABSENT], allow_other_workers=True)
    expected = rows(3).merge(rows(4), on="key")
    assert len(found.result(timeout=HANG_S)) == len(expected)


def test_restricted_rechunk_ignores_absent_workers(cluster):
    with dask.annotate(workers=[ABSENT], allow_other_workers=True):
        lazy = da.ones((24, 24), chunks=(1, 24)).rechunk((24, 1), method="p2p")
    found = cluster.client.compute(lazy, optimize_graph=False)
    assert found.result(timeout=HANG_S).sum() == 24 * 24


@pytest.mark.parametrize("restriction", [{"workers": [ABSENT]}, {"resources": {"TPU": 1}}], ids=str)
def test_task_without_an_allowed_worker_delays_no_other(cluster, restriction):
    waits = cluster.client.compute(shuffled(5), **restriction)
    tasks = cluster.client.cluster.scheduler.tasks
    until(lambda: any(ts.state == "no-worker" for ts in tasks.copy().values()), "tasks that wait")
    assert owners(cluster, shuffled(6)) == set(cluster.addresses)
    assert waits.status == "pending"
    waits.cancel()


def held(frame, gate):
    if gate is not None:
        pass_gate(gate)
    return frame


def test_departed_worker_is_left_out_of_the_next_attempt():
    """The worker was there when the restriction was made and the run began."""
    with (
        dask.config.set({"dataframe.shuffle.method": "p2p", "gpurt.enabled": False}),
        stock_client(3) as client,
        Gate() as gate,
    ):
        dask_gpurt.enable(client)
        scheduler = client.cluster.scheduler
        both = sorted(scheduler.workers)[:2]
        parts = [delayed(held)(rows(n), gate.path if n == 7 else None) for n in range(7, 11)]
        lazy = dd.from_delayed(parts, meta=rows().iloc[:0]).shuffle("key", npartitions=6)
        futures = client.compute(lazy.to_delayed(), workers=both)
        gate.wait_for()
        until(lambda: active_shuffles(scheduler), "a run")
        # A worker whose thread waits at the gate cannot exit before the gate opens.
        until(lambda: len(holding(scheduler, both)) == 1, "the end of all inputs but one")
        (stays,) = holding(scheduler, both)
        (leaves,) = set(both) - {stays}
        (worker,) = (w for w in client.cluster.workers.values() if w.address == leaves)
        client.sync(worker.close, nanny=False)
        until(lambda: leaves not in scheduler.workers, "the end of the worker")
        gate.open()
        results = [future.result(timeout=HANG_S) for future in futures]
        assert sum(map(len, results)) == 4 * N_ROWS
        holders = client.who_has(futures).values()
        assert {address for addresses in holders for address in addresses} == {stays}


def holding(scheduler, addresses):
    """Return the workers that still have inputs to make."""
    found = {address: scheduler.workers[address].processing.copy() for address in addresses}
    return [one for one, tasks in found.items() if any("held" in str(t.key) for t in tasks)]
