"""Our manifests start a cluster with the runtime on, which pods join and leave in mid-shuffle.

The manifests are those of the overlay `autoscaled`, without the autoscaler: the test says how many
pods there are.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import os
from collections.abc import Iterator
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import Client, Future
from distributed.diagnostics.plugin import SchedulerPlugin

import dask_gpurt
from tests.deploy.kubernetes.lab import Node, addresses, cluster
from tests.deploy.kubernetes.patching import Object
from tests.deploy.manifests import cluster as specification
from tests.deploy.manifests import rendered
from tests.failure.gates import Gate, hold
from tests.failure.stage import N_INPUTS, N_OUTPUTS, expected, frame
from tests.integration.comparing import assert_same_partitions, collection, partitions, runs
from tests.limits import HANG_S

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def flag() -> str | None:
    return os.environ.get("DASK_GPURT__ENABLED")


@pytest.fixture(scope="module")
def client(node: Node) -> Iterator[Client]:
    resources = {"DaskCluster": copy.deepcopy(rendered("autoscaled")["DaskCluster"])}
    specification(resources)["worker"]["replicas"] = 2
    with cluster(node, resources, n_workers=2) as client:
        yield client


def scale(node: Node, n_pods: int) -> None:
    node.kubectl("scale", "daskcluster/gpurt", f"--replicas={n_pods}")


def handled_replicas(groups: list[Object]) -> list[int]:
    """Return for how many pods of each group the operator has done what it does."""
    annotation = "kopf.zalando.org/last-handled-configuration"
    handled = [json.loads(group["metadata"]["annotations"][annotation]) for group in groups]
    return [one["spec"]["worker"]["replicas"] for one in handled]


@pytest.fixture
def two_pods(node: Node, client: Client) -> None:
    """Have two workers, whatever another test has left."""
    scale(node, 2)
    client.wait_for_workers(2, timeout=HANG_S)
    node.until("pods", lambda pods: len(pods) == 2, "dask.org/component=worker")


def until_gone(client: Client, address: str) -> None:
    """Wait until the scheduler has removed a worker."""

    async def inside(dask_scheduler: Any) -> None:
        left = asyncio.Event()

        class Departure(SchedulerPlugin):
            name = f"departure of {address}"

            def remove_worker(self, scheduler: Any, worker: str, **kwargs: Any) -> None:
                if worker == address:
                    left.set()

        dask_scheduler.add_plugin(Departure())
        if address in dask_scheduler.workers:
            await asyncio.wait_for(left.wait(), HANG_S)

    client.run_on_scheduler(inside)


@contextlib.contextmanager
def held_shuffle(client: Client) -> Iterator[list[Future]]:
    """Have a shuffle whose shards are all sent, and whose outputs wait until the block ends."""
    with Gate() as gate:
        path = gate.path
        client.run(lambda dask_worker: hold(dask_worker, "unpack", path))
        lazy = collection([frame(number) for number in range(N_INPUTS)])
        with client.as_current(), dask.config.set({"dataframe.shuffle.method": "p2p"}):
            lazy = lazy.shuffle("key", npartitions=N_OUTPUTS)
            futures: list[Future] = client.compute(lazy.to_delayed())
        gate.wait_for(2)
        yield futures


def test_the_flag_of_the_scheduler_is_enough(client: Client) -> None:
    assert client.run_on_scheduler(flag) == "true"
    assert set(client.run(flag).values()) == {None}
    assert not dask.config.get("gpurt.enabled")
    status = dask_gpurt.status(client)
    assert status["active"]
    assert not status["not_ready"]
    assert all(status["workers"].values())


@pytest.mark.usefixtures("two_pods")
def test_answers_equal_those_of_stock_dask(client: Client) -> None:
    frames = collection([frame(number) for number in range(N_INPUTS)])
    shuffled = frames.shuffle("key", npartitions=N_OUTPUTS)
    merged = frames.merge(frames[["key"]].drop_duplicates(), on="key")
    array = da.from_array(np.arange(10_000.0).reshape(100, 100), chunks=(10, 100))

    def answers() -> tuple[list[Any], list[Any], np.ndarray]:
        with client.as_current(), dask.config.set({"array.rechunk.method": "p2p"}):
            rechunked = client.compute(array.rechunk((100, 10))).result()
        return partitions(client, shuffled), partitions(client, merged), rechunked

    before = runs(client)
    got = answers()
    assert runs(client) == {**before, "gpurt": before["gpurt"] + 4}
    dask_gpurt.disable(client)
    try:
        assert not dask_gpurt.status(client)["active"]
        stock = answers()
    finally:
        dask_gpurt.enable(client)
    assert_same_partitions(got[0] + got[1], stock[0] + stock[1])
    np.testing.assert_array_equal(got[2], stock[2])


@pytest.mark.usefixtures("two_pods")
def test_pods_come_and_go_in_mid_shuffle(node: Node, client: Client) -> None:
    before = addresses(client)
    with held_shuffle(client) as futures:
        scale(node, 3)
        client.wait_for_workers(3, timeout=HANG_S)
        (joined,) = set(addresses(client)) - set(before)
        scale(node, 2)
        until_gone(client, joined)
        assert addresses(client) == before
        # Dask gives back no worker that takes part in a shuffle.
        scale(node, 1)
        node.until("daskworkergroups", lambda groups: handled_replicas(groups) == [1])
        assert addresses(client) == before
    assert_same_partitions(client.gather(futures), expected())


@pytest.mark.usefixtures("two_pods")
def test_a_pod_that_joined_takes_part_in_the_next(node: Node, client: Client) -> None:
    with held_shuffle(client) as futures:
        scale(node, 3)
        client.wait_for_workers(3, timeout=HANG_S)
    assert_same_partitions(client.gather(futures), expected())
    before = runs(client)
    lazy = collection([frame(number) for number in range(N_INPUTS)])
    got = partitions(client, lazy.shuffle("key", npartitions=N_OUTPUTS))
    assert_same_partitions(got, expected())
    assert runs(client) == {**before, "gpurt": before["gpurt"] + 1}
    status = dask_gpurt.status(client)
    assert len(status["workers"]) == 3
    assert not status["not_ready"]


@pytest.mark.usefixtures("two_pods")
@pytest.mark.parametrize(
    "options", [("--wait=false",), ("--force", "--grace-period=0")], ids=["ends", "is killed"]
)
def test_a_pod_is_lost_in_mid_shuffle(node: Node, client: Client, options: tuple[str, ...]) -> None:
    before = addresses(client)
    (address, pod), *_ = before.items()
    with held_shuffle(client) as futures:
        node.kubectl("delete", f"pod/{pod}", *options)
        until_gone(client, address)
    assert_same_partitions(client.gather(futures), expected())
    # Its Deployment has made another.
    client.wait_for_workers(2, timeout=HANG_S)
    assert pod not in addresses(client).values()
    assert not dask_gpurt.status(client)["not_ready"]
