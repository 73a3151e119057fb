"""Our metrics are registered with Prometheus beside distributed's own."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import dask
import prometheus_client
import pytest
from distributed.http.prometheus import PrometheusCollector
from distributed.http.worker.prometheus.core import WorkerMetricCollector
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily

from dask_gpurt.plugins.patches.shown import prometheus
from dask_gpurt.plugins.patches.shown.prometheus import FAMILIES, ShownShuffles
from dask_gpurt.process_patch import ProcessPatch
from dask_gpurt.shuffle.traffic import MESSAGE_NBYTES, SentTotals


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """A registry for this test: workers of other tests may still be in the usual one."""
    monkeypatch.setattr(prometheus, "_workers", prometheus.WeakKeyDictionary())
    monkeypatch.setattr(prometheus, "_patch", ProcessPatch(prometheus._register))
    registry = CollectorRegistry(auto_describe=True)
    monkeypatch.setattr(prometheus_client, "REGISTRY", registry)
    return registry


class Worker(SimpleNamespace):
    __hash__ = object.__hash__


def worker(nbytes):
    ours = ("p2p", "a span", "background-comms", "send", "bytes")
    other_span = ("p2p", None, "background-comms", "send", "bytes")
    others = {"latency": 1.0, ("execute", None, "sum", "send", "bytes"): 7, (*ours[:-1], "own"): 9}
    return Worker(digests_total={ours: nbytes, other_span: 1, **others})


def exported(worker, *messages):
    """Export a worker that sent these messages."""
    sent = SentTotals()
    for message in messages:
        sent.add(**message)
    return ShownShuffles(worker, sent)


SENT = ("dask_worker_shuffle_bytes_total", {"where": "background-comms", "activity": "send"})


def shown(registry):
    return [tuple(sample)[:3] for family in registry.collect() for sample in family.samples]


def test_metrics_of_all_workers_are_summed_until_the_last_ends(registry):
    workers = worker(100), worker(10)
    first, second = map(exported, workers)
    assert shown(registry) == [(*SENT, 112)]
    first.uninstall()
    first.uninstall()
    assert shown(registry) == [(*SENT, 11)]
    second.uninstall()
    assert list(registry.collect()) == []
    again = exported(workers[0])
    assert shown(registry) == [(*SENT, 101)]
    again.uninstall()


def test_messages_are_counted_by_path_peer_and_size(registry):
    near = {"path": "shared", "is_same_host": True}
    far = {"path": "comm", "is_same_host": False, "nbytes": 2**40, "seconds": 3.0}
    both = (
        exported(worker(1), {**near, "nbytes": 4096, "seconds": 0.5}, far),
        exported(worker(1), {**near, "nbytes": 4097, "seconds": 0.25}),
    )
    samples = {
        (name, *labels.values()): value
        for name, labels, value in shown(registry)
        if "gpurt" in name
    }
    for one in both:
        one.uninstall()
    prefix = "dask_worker_gpurt"
    for name, value in (("sent_bytes", 8193), ("send_seconds", 0.75)):
        assert samples[f"{prefix}_{name}_total", "shared", "same-host"] == value
    assert samples[f"{prefix}_sent_bytes_total", "comm", "other-host"] == 2**40
    sizes = f"{prefix}_message_bytes"
    assert samples[f"{sizes}_sum", "shared", "same-host"] == 8193
    assert samples[f"{sizes}_count", "shared", "same-host"] == 2
    # The upper end belongs to its class.
    counts = [
        samples[f"{sizes}_bucket", "shared", "same-host", str(float(end))] for end in MESSAGE_NBYTES
    ]
    assert counts == [1, *[2] * (len(MESSAGE_NBYTES) - 1)]
    assert samples[f"{sizes}_bucket", "comm", "other-host", str(float(MESSAGE_NBYTES[-1]))] == 0
    assert samples[f"{sizes}_bucket", "comm", "other-host", "+Inf"] == 1


def test_without_prometheus_nothing_is_shown(monkeypatch, registry):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    one = exported(worker(1))
    assert shown(registry) == []
    one.uninstall()


def test_names_that_are_taken_are_not_registered(registry):
    class Taken:
        def collect(self):
            yield CounterMetricFamily("dask_worker_shuffle_bytes", "", value=3)

    registry.register(Taken())
    exported(worker(1)).uninstall()
    assert shown(registry) == [("dask_worker_shuffle_bytes_total", {}, 3)]


def test_metric_names_have_the_prefix_of_dask(registry):
    with dask.config.set({"distributed.dashboard.prometheus.namespace": "mine"}):
        stock = WorkerMetricCollector(SimpleNamespace())
        assert isinstance(stock, PrometheusCollector)
        one = exported(worker(1))
        names = {family.name for family in registry.collect()}
    ours = [name for name, _ in FAMILIES.values()] + [*prometheus.SENT]
    assert names == {stock.build_name(name) for name in ours}
    one.uninstall()


def test_dask_shows_no_shuffle_metrics(client):
    """Once stock exports them, this package's metrics must go."""
    server = next(iter(client.cluster.workers.values()))
    told = ("p2p", None, "background-comms", "send", "bytes")
    server.digest_metric(told, 5)
    assert server.digests_total[told] == 5
    names = {family.name for family in WorkerMetricCollector(server).collect()}
    assert "dask_worker_spill_bytes" in names
    assert not any("shuffle" in name or "p2p" in name for name in names)
