"""Dask's fine performance metrics of a shuffle have Dask's labels and right amounts."""

from __future__ import annotations

import contextlib
import urllib.request

import dask
import dask.array as da
import numpy as np
import pandas as pd
import pytest
from distributed import Client, LocalCluster
from prometheus_client.parser import text_string_to_metric_families

import dask_gpurt
from tests.integration.comparing import collection, runs

IDLE = {("background-comms", "idle", "seconds"), ("background-disk", "idle", "seconds")}
#: Metrics of messages between hosts, before and after encoding.
ENCODED = {
    ("background-comms", label, unit)
    for label in ("compress", "send")
    for unit in ("bytes", "count")
}


@contextlib.contextmanager
def cluster(n_workers=2, **settings):
    options = {"n_workers": n_workers, "threads_per_worker": 1, "dashboard_address": ":0"}
    with (
        dask.config.set(settings),
        LocalCluster(processes=False, protocol="tcp://", silence_logs=False, **options) as local,
        Client(local, set_as_default=False) as client,
    ):
        yield client


def shuffle(client):
    rng = np.random.default_rng(0)
    parts = [pd.DataFrame({"key": rng.integers(0, 99, 9_000)}) for _ in range(4)]
    lazy = collection(parts)
    with client.as_current(), dask.config.set({"dataframe.shuffle.method": "p2p"}):
        client.gather(client.compute(lazy.shuffle("key", npartitions=3).to_delayed()))


def told(client, context):
    """Sum the metrics of a context over workers, without spans."""
    totals = {}
    for worker in client.cluster.workers.values():
        for name, value in worker.digests_total.items():
            if isinstance(name, tuple) and name[0] == context:
                totals[name[2:]] = totals.get(name[2:], 0) + value
    return totals


@pytest.fixture(scope="module")
def spilling():
    """Return metrics and counters of a shuffle that spilled all of its shards."""
    with cluster(**{"gpurt.shuffle.memory": "16 KiB", "gpurt.shuffle.transport": "comm"}) as client:
        dask_gpurt.enable(client)
        shuffle(client)
        assert runs(client) == {"gpurt": 1, "stock": 0}
        return told(client, "p2p"), told(client, "execute"), dask_gpurt.status(client)


def test_metric_labels_equal_those_of_dask(spilling):
    with cluster(**{"gpurt.enabled": False}) as client:
        shuffle(client)
        stock = told(client, "p2p")
    ours, _, _ = spilling
    # The runtime has no task that waits idly for a message or a write. It reports the seconds of
    # back-pressure even if there were none. Stock Dask reports only seconds for compress and send.
    assert stock.keys() - ours.keys() == IDLE
    more = ours.keys() - stock.keys()
    assert more - {("foreground", "comms-limiter", "seconds")} == ENCODED


def test_metric_amounts_equal_the_counters(spilling):
    ours, _, status = spilling
    totals = status["totals"]
    (run,) = status["shuffles"]
    assert totals["sent_nbytes"] > 0
    assert totals["spilled_nbytes"] > 0
    assert totals["unspilled_nbytes"] > 0
    assert ours["background-comms", "process", "bytes"] == totals["sent_nbytes"]
    assert ours["background-comms", "process", "count"] == totals["messages"]
    # Messages over Dask's connections count as leaving the host, even within one.
    assert run["raw_nbytes"] == run["sent_nbytes"] == totals["sent_nbytes"]
    assert ours["background-comms", "compress", "bytes"] == run["raw_nbytes"]
    assert ours["background-comms", "send", "bytes"] == run["wire_nbytes"] > 0
    assert ours["background-comms", "send", "count"] == totals["messages"]
    assert ours["background-disk", "disk-write", "bytes"] == totals["spilled_nbytes"]
    assert ours["foreground", "disk-read", "bytes"] == totals["unspilled_nbytes"]
    shards_nbytes = totals["sent_nbytes"] + totals["local_nbytes"]
    assert ours["foreground", "shards", "bytes"] == shards_nbytes


def test_tasks_count_only_their_own_phases(spilling):
    ours, execute, _ = spilling
    of_shuffle = {key: value for key, value in ours.items() if key[0] == "foreground"}
    of_tasks = {}
    for (_, label, *rest), value in execute.items():
        if label.startswith("p2p-"):
            key = ("foreground", label.removeprefix("p2p-"), *rest)
            of_tasks[key] = of_tasks.get(key, 0) + value
    assert of_tasks == pytest.approx(of_shuffle)
    transfers = {label for prefix, label, *_ in execute if prefix.endswith("shuffle-transfer")}
    assert transfers and not transfers & {"send", "process", "disk-write"}


def test_no_disk_or_wire_metrics_without_spilling_on_one_host():
    with cluster(**{"gpurt.shuffle.transport": "auto"}) as client:
        dask_gpurt.enable(client)
        shuffle(client)
        ours = told(client, "p2p")
        (run,) = dask_gpurt.status(client)["shuffles"]
    assert {where for where, *_ in ours} == {"foreground", "background-comms"}
    assert ours["background-comms", "process", "bytes"] == run["sent_nbytes"] > 0
    assert not ENCODED & ours.keys()
    assert run["raw_nbytes"] == run["wire_nbytes"] == 0


def scraped(client):
    """Sum the workers' Prometheus metrics about shuffles."""
    units = {"bytes": "bytes", "count": "count", "time_seconds": "seconds"}
    families = {f"dask_worker_shuffle_{name}": unit for name, unit in units.items()}
    totals = {}
    for worker in client.scheduler_info(n_workers=-1)["workers"].values():
        url = f"http://{worker['host']}:{worker['services']['dashboard']}/metrics"
        with urllib.request.urlopen(url) as answer:
            for family in text_string_to_metric_families(answer.read().decode()):
                for _, labels, value, *_ in family.samples if family.name in families else ():
                    key = (labels["where"], labels["activity"], families[family.name])
                    totals[key] = totals.get(key, 0) + value
    return totals


def at_the_scheduler(client, expected):
    """Return the scheduler's shuffle metrics once they are as expected, or after some heartbeats.

    A worker's own heartbeat may still be in flight when the test requests another one.
    """

    async def say(dask_worker):
        await dask_worker.heartbeat()

    def sums(dask_scheduler):
        found = dask_scheduler.cumulative_worker_metrics.items()
        return {name[1:]: value for name, value in found if name[0] == "p2p"}

    for _ in range(50):
        client.run(say)
        if (found := client.run_on_scheduler(sums)) == expected:
            break
    return found


@pytest.mark.cluster
def test_codec_ratio_agrees_in_prometheus_and_status():
    settings = {"gpurt.shuffle.transport": "comm", "gpurt.shuffle.compression": "lz4"}
    options = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": ":0"}
    with (
        dask.config.set(settings),
        LocalCluster(worker_dashboard_address=":0", silence_logs=False, **options) as local,
        Client(local, set_as_default=False) as client,
    ):
        assert scraped(client) == {}
        dask_gpurt.enable(client)
        shuffle(client)
        (run,) = dask_gpurt.status(client)["shuffles"]
        shown = scraped(client)
        known = at_the_scheduler(client, pytest.approx(shown))
        dask_gpurt.disable(client)
        assert scraped(client) == {}
    assert known == pytest.approx(shown)
    assert shown["background-comms", "compress", "bytes"] == run["raw_nbytes"]
    assert shown["background-comms", "send", "bytes"] == run["wire_nbytes"]
    assert run["raw_nbytes"] > 2 * run["wire_nbytes"] > 0
    assert shown["background-comms", "send", "count"] == run["messages"] > 0
    assert shown["foreground", "shards", "bytes"] == run["nbytes"]
    for phase in ("shard-partition-noncpu", "get-output-noncpu"):
        assert shown["foreground", phase, "seconds"] > 0
    assert shown["background-comms", "send", "seconds"] > 0


def test_objects_are_counted_with_their_contents():
    parts = [
        pd.DataFrame({"key": range(40), "value": [[[number] * 5000] for number in range(40)]})
        for _ in range(4)
    ]
    chunks = da.from_array(parts[0]["value"].to_numpy().reshape(8, 5), chunks=(1, 5))
    settings = {
        "gpurt.shuffle.memory": "1 MiB",
        "array.chunk-size": "1B",
        "dataframe.convert-string": False,
    }
    with cluster(n_workers=1, **settings) as client, client.as_current():
        dask_gpurt.enable(client)
        spilled = []
        for lazy in (
            collection(parts).shuffle("key", npartitions=3),
            chunks.rechunk((8, 1), method="p2p"),
        ):
            with dask.config.set({"dataframe.shuffle.method": "p2p"}):
                client.gather(client.compute(list(np.ravel(lazy.to_delayed()))))
            spilled.append(dask_gpurt.status(client)["totals"]["spilled_nbytes"])
        assert runs(client) == {"gpurt": 2, "stock": 0}
    assert 0 < spilled[0] < spilled[1]
