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

from dask_gpurt.plugins.patches import prometheus
from dask_gpurt.plugins.patches.prometheus import FAMILIES, ShownShuffles


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """A registry for this test: workers of other tests may still be in the usual one."""
    monkeypatch.setattr(prometheus, "_workers", prometheus.WeakSet())
    monkeypatch.setattr(prometheus, "_collector", None)
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


SENT = ("dask_worker_shuffle_bytes_total", {"where": "background-comms", "activity": "send"})


def shown(registry):
    return [tuple(sample)[:3] for family in registry.collect() for sample in family.samples]


def test_metrics_of_all_workers_are_summed_until_the_last_ends(registry):
    workers = worker(100), worker(10)
    first, second = map(ShownShuffles, workers)
    assert shown(registry) == [(*SENT, 112)]
    first.uninstall()
    first.uninstall()
    assert shown(registry) == [(*SENT, 11)]
    second.uninstall()
    assert list(registry.collect()) == []
    again = ShownShuffles(workers[0])
    assert shown(registry) == [(*SENT, 101)]
    again.uninstall()


def test_without_prometheus_nothing_is_shown(monkeypatch, registry):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    one = ShownShuffles(worker(1))
    assert shown(registry) == []
    one.uninstall()


def test_names_that_are_taken_are_not_registered(registry):
    class Taken:
        def collect(self):
            yield CounterMetricFamily("dask_worker_shuffle_bytes", "", value=3)

    registry.register(Taken())
    ShownShuffles(worker(1)).uninstall()
    assert shown(registry) == [("dask_worker_shuffle_bytes_total", {}, 3)]


def test_metric_names_have_the_prefix_of_dask(registry):
    with dask.config.set({"distributed.dashboard.prometheus.namespace": "mine"}):
        stock = WorkerMetricCollector(SimpleNamespace())
        assert isinstance(stock, PrometheusCollector)
        one = ShownShuffles(worker(1))
        names = {family.name for family in registry.collect()}
    assert names == {stock.build_name(name) for name, _ in FAMILIES.values()}
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
