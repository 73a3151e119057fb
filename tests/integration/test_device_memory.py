"""A live worker's store spills and restores values of a GPU; only the GPU is emulated."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import types

import pytest
from dask.sizeof import sizeof
from distributed import wait

import dask_gpurt
from dask_gpurt.command.connect import ask
from dask_gpurt.command.doctor import cluster_findings
from dask_gpurt.command.status import as_text
from dask_gpurt.devices.vendors import NVIDIA
from dask_gpurt.plugins.memory import gpu_level
from dask_gpurt.plugins.memory.gpu_level import GpuFacts
from tests.integration.memory_cluster import cluster, stores, until
from tests.memory.emulated_gpu import Gpu, GpuArray

MIB = 1 << 20
TOTAL = 32 * MIB

_gpu: Gpu


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of 32 MiB that all workers of this process see."""
    global _gpu
    _gpu = gpu = Gpu(TOTAL)
    monkeypatch.setitem(sys.modules, "cupy", gpu.cupy)
    monkeypatch.setitem(sys.modules, "rmm", None)
    monkeypatch.setattr(gpu_level, "open_driver", lambda: gpu)
    monkeypatch.setattr(gpu_level, "local_facts", lambda: GpuFacts(True, (NVIDIA,)))
    yield gpu
    gpu.host.close()


def made(number, nbytes):
    return _gpu.full(number, nbytes)


def is_right(array, number):
    assert type(array) is GpuArray
    return bool((array.to_host() == number % 251).all())


def both_right(one, other, numbers):
    return is_right(one, numbers[0]) and is_right(other, numbers[1])


def make(client, n_values, nbytes=2 * MIB):
    values = client.map(made, range(n_values), nbytes=nbytes, pure=False)
    wait(values)
    return values


def levels(store):
    return {level["name"]: level for level in store.report()["levels"]}


def is_within(level):
    return level["capacity_nbytes"] is None or level["used_nbytes"] <= level["capacity_nbytes"]


def test_data_larger_than_the_device_stays_correct(gpu):
    with cluster(n_workers=1, n_threads=2, memory_limit=40 * MIB) as client:
        values = make(client, 24)
        assert len(values) * 2 * MIB > TOTAL
        (store,) = stores(client)
        assert all(client.gather(client.map(is_right, values, range(24), pure=False)))
        pairs = client.map(
            both_right,
            values,
            values[::-1],
            list(zip(range(24), range(24)[::-1], strict=True)),
            pure=False,
        )
        assert all(client.gather(pairs))
        assert gpu.most_nbytes <= TOTAL
        found = levels(store)
        assert list(found) == ["memory", "device", "pinned", "disk", "inherited"]
        assert found["device"]["capacity_nbytes"] == int(0.6 * TOTAL)
        assert found["pinned"]["used_nbytes"] > 0
        assert found["disk"]["used_nbytes"] > 0
        until(lambda: all(is_within(level) for level in levels(store).values()))


def test_status_and_explain_show_the_device(gpu):
    with cluster(n_workers=1, memory_limit=40 * MIB) as client:
        values = make(client, 24)
        assert sum(store.is_spilled(value.key) for store in stores(client) for value in values)
        found = ask(client, versions=True)
        (report,) = found["workers"].values()
        assert report["memory"]["device"]["evicts_for"] == ("cupy",)
        assert report["memory"]["device"]["total_nbytes"] == TOTAL
        (head,) = [line.split() for line in as_text(found).splitlines() if "pinned" in line]
        assert head[:4] == ["worker", "memory", "device", "pinned"]
        where = [next(iter(dask_gpurt.explain(client, v)["memory"].values())) for v in values]
        assert {one["home"] for one in where} == {"device"}
        assert {"device", "pinned"} <= {level for one in where for level in one["levels"]}
        cold = next(one for one in where if "device" not in one["levels"])
        assert "device was needed for other values" in cold["reason"]


def test_disabling_keeps_values_and_restores_the_allocator(gpu):
    before = gpu.allocator
    with cluster(n_workers=1, memory_limit=40 * MIB) as client:
        values = make(client, 12)
        until(lambda: gpu.allocator != before)
        dask_gpurt.disable(client)
        assert gpu.allocator == before
        (worker,) = client.cluster.workers.values()
        assert type(worker.data).__name__ == "SpillBuffer"
        # Dask does not spill from a GPU, so only one value at a time fits for certain.
        assert all(client.submit(is_right, v, n).result() for n, v in enumerate(values))
        dask_gpurt.enable(client)
        assert all(client.submit(is_right, v, n).result() for n, v in enumerate(values))


def test_host_values_do_not_open_the_device(gpu, monkeypatch):
    monkeypatch.setattr(gpu_level, "open_driver", lambda: pytest.fail("opened"))
    with cluster(n_workers=1) as client:
        assert sum(client.gather(client.map(abs, range(10)))) == 45
        found = ask(client, versions=True)
        (report,) = found["workers"].values()
        assert report["memory"]["device"]["name"] is None
        assert levels(stores(client)[0])["device"]["values"] == 0


def test_store_without_a_gpu_has_no_device_level(gpu, monkeypatch):
    monkeypatch.setattr(gpu_level, "local_facts", lambda: GpuFacts(True, ()))
    with cluster(n_workers=1) as client:
        assert list(levels(stores(client)[0])) == ["memory", "disk", "inherited"]
        (report,) = ask(client)["workers"].values()
        assert report["memory"]["device"] is None


def test_unusable_gpu_is_left_to_dask(gpu, monkeypatch, caplog):
    is_stored = threading.Event()

    def fail():
        # The first value opens the driver, and counts as on the device meanwhile.
        assert is_stored.wait(60)
        raise RuntimeError("CUDA finds no device")

    monkeypatch.setattr(gpu_level, "open_driver", fail)
    with cluster(n_workers=1, memory_limit=40 * MIB) as client:
        (first,) = make(client, 1)
        (store,) = stores(client)
        is_stored.set()
        until(lambda: ask(client)["workers"].popitem()[1]["memory"]["device"]["problem"])
        (second,) = make(client, 1)
        assert store.explain(first.key)["home"] == "device"
        assert store.explain(second.key)["home"] == "memory"
        assert client.submit(is_right, first, 0).result()
    assert caplog.text.count("values of the GPU are not managed: CUDA finds no device") == 1


class Column(GpuArray):
    """A stand-in with the type name of a cuDF value."""


Column.__module__ = "cudf.core"


@sizeof.register(Column)
def _sizeof(column):
    return column.nbytes


def column(number, nbytes):
    array = _gpu.full(number, nbytes)
    return Column(_gpu, array.memory, nbytes)


def test_cudf_that_spills_by_itself_keeps_its_values(gpu, monkeypatch, caplog):
    # Dask asks cudf to register its types. The type of this test is registered already.
    for name in ("cudf", "cudf.comm", "cudf.comm.serialize"):
        monkeypatch.setitem(sys.modules, name, module := types.ModuleType(name))
        module.__path__ = []
    sys.modules["cudf"].get_option = {"spill": True}.__getitem__
    with cluster(n_workers=1, memory_limit=80 * MIB) as client:
        columns = client.map(column, range(4), nbytes=4 * MIB, pure=False)
        wait(columns)
        make(client, 1)  # this one opens the device
        (store,) = stores(client)
        until(lambda: levels(store)["device"]["capacity_nbytes"])
        values = make(client, 8)
        until(lambda: any(store.is_spilled(value.key) for value in values))
        until(lambda: store.residency.values[columns[0].key].refused)
        assert not any(store.is_spilled(one.key) for one in columns)
        found = ask(client, versions=True)
        assert "cuDF spills its own values" in as_text(found)
        (finding,) = [one for one in cluster_findings(found) if "cuDF" in one.text]
        assert finding.level == "note"
        assert all(client.gather(client.map(is_right, values, range(8), pure=False)))
    assert "cannot spill" not in caplog.text


def test_room_for_an_output_is_reserved_on_its_level(gpu):
    """None of the outputs would fit into the host's memory for outputs."""
    with cluster(n_workers=1, n_threads=2, memory_limit=3 * MIB) as client:
        for _ in range(2):
            values = make(client, 4)
        assert client.submit(is_right, values[-1], 3).result()
        (store,) = stores(client)
        assert store.admission.overcommitted == 0


def test_event_loop_allocates_while_a_copy_is_in_flight(gpu, monkeypatch):
    """A message that is received into GPU memory does the same."""
    settings = {"gpurt.memory.device": "15 MiB"}
    with cluster(n_workers=1, memory_limit=80 * MIB, **settings) as client:
        values = make(client, 4, nbytes=3 * MIB)
        (store,) = stores(client)
        until(lambda: levels(store)["device"]["capacity_nbytes"])
        copying, go = threading.Event(), threading.Event()
        carrier = store._carrier
        copy, wait_for = carrier._copy, carrier._ended.wait_for

        def stands_still(*args):
            if not copying.is_set():  # the first one, which is made in a lane
                copying.set()
                assert go.wait(60)
            copy(*args)

        def waits(predicate):
            go.set()
            return wait_for(predicate)

        monkeypatch.setattr(carrier, "_copy", stands_still)
        monkeypatch.setattr(carrier._ended, "wait_for", waits)
        values += make(client, 2, nbytes=3 * MIB)
        assert copying.wait(60)

        async def allocate():
            memory = gpu.allocate(15 * MIB, gpu.default_stream)
            return memory.buffer.nbytes

        loop = client.cluster.loop.asyncio_loop
        assert asyncio.run_coroutine_threadsafe(allocate(), loop).result(60) == 15 * MIB
        numbers = [0, 1, 2, 3, 0, 1]
        assert all(client.gather(client.map(is_right, values, numbers, pure=False)))


def test_two_workers_share_a_gpu_and_exchange_values(gpu):
    # Both workers unpack and read messages on the same small device. With Dask's default limit, one
    # message would fill it.
    one_value = {"distributed.worker.transfer.message-bytes-limit": 2 * MIB}
    settings = {"gpurt.memory.device": 0.3, **one_value}
    with cluster(memory_limit=80 * MIB, **settings) as client:
        values = make(client, 32)
        assert all(store.has_spilled for store in stores(client))
        assert all(client.gather(client.map(is_right, values, range(32), pure=False)))
        assert gpu.most_nbytes <= TOTAL
        totals = client.map(
            both_right, values, values[1:], list(zip(range(31), range(1, 32), strict=True))
        )
        assert all(client.gather(totals))
    gc.collect()
    assert gpu.host.used_nbytes == 0
