"""Managed memory works on real workers: with more data than memory, damage and switching off."""

from __future__ import annotations

import contextlib
import os
import pathlib
import threading
from concurrent.futures import ThreadPoolExecutor

import dask
import dask.array as da
import numpy as np
import pytest
from dask import delayed
from distributed import Client, LocalCluster, wait
from distributed.spill import SpillBuffer

import dask_gpurt
from dask_gpurt.memory.files.disk_tier import DiskTier
from tests.integration.memory_cluster import (
    MANAGED_ALONE,
    MIB,
    block,
    cluster,
    files,
    on_disk,
    stores,
    until,
)


def test_data_larger_than_memory_stays_correct():
    with cluster() as client:
        x = da.random.default_rng(0).random((24 * MIB // 8, 4), chunks=(MIB // 4, 4)).persist()
        wait(x)
        assert on_disk(client)
        expected = None
        for _ in range(3):
            total = x.sum().compute()
            expected = total if expected is None else expected
            assert total == expected
        for store in stores(client):
            report = store.report()
            memory = report["levels"][0]
            assert memory["used_nbytes"] <= memory["capacity_nbytes"]
            # No value was written twice.
            assert report["io"]["disk-write-bytes"] <= 1.05 * x.nbytes


def test_dashboard_shows_spilled_data():
    with cluster() as client:
        parts = [client.compute(block(n)) for n in range(24)]
        wait(parts)
        workers = list(client.cluster.workers.values())
        metrics = [client.sync(worker.get_metrics) for worker in workers]
        cold = sum(m["spilled_bytes"]["memory"] for m in metrics)
        at_home = sum(store.residency.levels[0].used_nbytes for store in stores(client))
        # Each copy of a value is either in memory or spilled, not both.
        assert cold + at_home == sum(m["managed_bytes"] for m in metrics)
        assert all(m["spilled_bytes"]["disk"] > 0 for m in metrics)
        assert all(worker.data.cumulative_metrics["disk-write", "bytes"] > 0 for worker in workers)


def test_spilled_value_is_sent_without_entering_memory():
    with cluster() as client:
        parts = [client.compute(block(n)) for n in range(24)]
        wait(parts)
        cold = next(key for store in stores(client) for key in store.disk)
        (part,) = [p for p in parts if p.key == cold]
        assert (part.result() == part.result()[0]).all()
        assert any(store.is_spilled(cold) for store in stores(client))


def test_a_process_that_starts_no_more_threads_still_spills(monkeypatch):
    """Containers limit the threads of a process. The store began with the ones that it needs."""
    start, refused = threading.Thread.start, []

    def limited(thread):
        if thread.name.startswith("gpurt"):
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    with cluster() as client:
        monkeypatch.setattr(threading.Thread, "start", limited)
        parts = [client.compute(block(n)) for n in range(24)]
        wait(parts)
        assert any(store.disk for store in stores(client))
        assert client.gather(client.map(np.max, parts)) == list(range(24))
        assert all((part.result() == part.result()[0]).all() for part in parts)
    assert refused


def test_value_evicted_during_a_read_of_its_message_is_sent():
    with cluster(n_workers=1) as client:
        parts = [client.compute(block(n)) for n in range(12)]
        wait(parts)
        (worker,) = client.cluster.workers.values()
        store = worker.data
        cold = next(part for part in parts if store.is_spilled(part.key))
        at_home = next(part for part in parts if not store.is_spilled(part.key))
        reading, go_on = threading.Event(), threading.Event()
        readers = []
        read = DiskTier.get

        def held_up(tier, place):
            readers.append(threading.current_thread().name)
            reading.set()
            assert go_on.wait(60)
            return read(tier, place)

        with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as other:
            patch.setattr(DiskTier, "get", held_up)
            try:
                gathered = other.submit(client.gather, [cold, at_home])
                assert reading.wait(60)
                for _ in parts:
                    client.cluster.loop.add_callback(store.evict)
                until(lambda: store.is_spilled(at_home.key))
            finally:
                go_on.set()
            values = gathered.result(60)
        # Neither read was on the event loop.
        assert len(readers) == 2
        assert all(name.startswith("gpurt read") for name in readers)
        for value, part in zip(values, (cold, at_home), strict=True):
            assert (value == parts.index(part)).all()


@pytest.mark.parametrize("directory", ["values", "~/values"])
def test_directory_of_values_is_fixed_at_the_start(directory, tmp_path, monkeypatch):
    """A task may change the working directory of its worker."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with cluster(**{"gpurt.memory.directory": directory}) as client:
        parts = [client.compute(block(n)) for n in range(24)]
        wait(parts)
        monkeypatch.chdir(tmp_path / "elsewhere")
        assert list((tmp_path / "values").glob("dask-gpurt-values-*/*"))
        more = [client.compute(block(n)) for n in range(24)]
        for number, value in enumerate(client.gather(parts)):
            assert (value == number).all()
        wait(more)
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("how", ["damaged", "deleted"])
def test_value_whose_file_is_lost_is_computed_again(how):
    with cluster() as client:
        parts = [client.compute(block(n)) for n in range(24)]
        wait(parts)
        found = files(client)
        assert found
        for path in found:
            if how == "deleted":
                path.unlink()
            else:
                with open(path, "r+b") as file:
                    file.seek(path.stat().st_size // 2)
                    byte = file.read(1)
                    file.seek(-1, os.SEEK_CUR)
                    file.write(bytes([byte[0] ^ 1]))
        sums = client.compute([delayed(np.sum)(part) for part in parts])
        got = client.gather(sums)
        assert got == [n * (4 * MIB // 8) for n in range(24)]


def test_value_that_a_program_deletes_is_computed_again():
    def delete(dask_worker):
        for key in list(dask_worker.data):
            del dask_worker.data[key]

    with cluster() as client:
        parts = [client.compute(block(n)) for n in range(4)]
        wait(parts)
        client.run(delete)
        sums = client.compute([delayed(np.sum)(part) for part in parts])
        assert client.gather(sums) == [n * (4 * MIB // 8) for n in range(4)]


def test_nothing_is_spilled_with_a_max_spill_of_0():
    with cluster(**{"distributed.worker.memory.max-spill": 0}) as client:
        parts = [client.compute(block(n)) for n in range(24)]
        wait(parts)
        for store in stores(client):
            levels = {level["name"]: level for level in store.report()["levels"]}
            assert levels["disk"]["capacity_nbytes"] == 0
        assert not on_disk(client) and not files(client)


def test_disabling_moves_all_values_to_the_store_of_dask():
    with cluster() as client:
        parts = [client.compute(block(n)) for n in range(24)]
        wait(parts)
        assert on_disk(client)
        paths = files(client)
        dask_gpurt.disable(client)
        for worker in client.cluster.workers.values():
            assert type(worker.data).__name__ == "SpillBuffer"
            assert worker.state.data is worker.data
            assert "execute" not in vars(worker)
        assert not any(path.exists() for path in paths)
        for number, part in enumerate(parts):
            assert (part.result() == number).all()


def test_task_may_start_while_the_store_is_handed_back():
    with cluster(n_workers=1) as client:
        (worker,) = client.cluster.workers.values()
        parts = [client.compute(block(n)) for n in range(12)]
        wait(parts)
        ours = worker.execute
        dask_gpurt.disable(client)
        # Dask may already have looked up our function, and calls it now.
        worker.execute = ours
        try:
            assert client.submit(np.sum, parts[3]).result(timeout=60) == 3 * (4 * MIB // 8)
        finally:
            del worker.execute


def test_disabling_reads_values_outside_of_the_event_loop():
    with cluster(n_workers=1) as client:
        parts = [client.compute(block(n)) for n in range(12)]
        wait(parts)
        (worker,) = client.cluster.workers.values()
        store = worker.data
        reading, go_on = threading.Event(), threading.Event()
        read = DiskTier.get

        def held_up(tier, place):
            reading.set()
            assert go_on.wait(60)
            return read(tier, place)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DiskTier, "get", held_up)
            disabling = threading.Thread(target=dask_gpurt.disable, args=(client,))
            disabling.start()
            assert reading.wait(60)
            # Meanwhile the worker works as usual, with its old store.
            new = client.submit(np.full, MIB // 8, 7, pure=False)
            assert new.result()[0] == 7
            released = parts.pop()
            released_key = released.key
            released.release()
            until(lambda: released_key not in store)
            assert worker.data is store
            go_on.set()
            disabling.join()
        assert type(worker.data).__name__ == "SpillBuffer"
        assert worker.data.slow
        assert set(worker.data) == {part.key for part in [*parts, new]}
        assert new.result()[0] == 7
        for number, part in enumerate(parts):
            assert (part.result() == number).all()


def test_fine_metrics_count_spilled_and_read_bytes():
    with cluster(n_workers=1) as client:
        parts = [client.compute(block(n)) for n in range(12)]
        wait(parts)
        assert client.gather(client.compute([delayed(np.sum)(part) for part in parts]))
        (worker,) = client.cluster.workers.values()
        # The memory monitor reports the work of lanes at its next check.
        until(
            lambda: all(
                worker.digests_total.get(("memory-monitor", way, "bytes"))
                == worker.data.cumulative_metrics[way, "bytes"]
                for way in ("disk-write", "disk-read")
            )
        )
        assert worker.digests_total["memory-monitor", "disk-read", "seconds"] > 0
        of_tasks = {
            (label, unit): value
            for (where, _, group, label, unit), value in (
                (name, value)
                for name, value in worker.digests_total.items()
                if isinstance(name, tuple) and len(name) == 5
            )
            if where == "execute" and group == "sum"
        }
        n_inputs = of_tasks["disk-read", "count"] + of_tasks["memory-read", "count"]
        assert n_inputs == 12
        assert of_tasks["disk-read", "bytes"] + of_tasks["memory-read", "bytes"] >= 12 * 4 * MIB
        assert of_tasks["disk-read", "seconds"] > 0


def test_closed_worker_leaves_no_memory_file():
    def files_in_memory():
        found = set()
        for link in pathlib.Path("/proc/self/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if os.readlink(link).startswith("/memfd:gpurt"):
                    found.add(link.stat().st_ino)
        return found

    before = files_in_memory()
    with cluster() as client:
        assert client.submit(sum, [1, 2]).result() == 3
        opened = files_in_memory() - before
        assert len(opened) == 2
    assert not opened & files_in_memory()


def test_enabling_takes_over_spilled_data_of_dask(caplog):
    with cluster(enable=False) as client:
        # Scattered data cannot be computed again.
        parts = [client.scatter(np.full(4 * MIB // 8, n), direct=True) for n in range(24)]
        wait(parts)
        assert any(worker.data.slow for worker in client.cluster.workers.values())
        dask_gpurt.enable(client)
        sums = client.gather(client.compute([delayed(np.sum)(part) for part in parts]))
        assert sums == [n * (4 * MIB // 8) for n in range(24)]
        dask_gpurt.disable(client)
        for number, part in enumerate(parts):
            assert (part.result() == number).all()
    assert not [one.message for one in caplog.records if one.levelname in ("WARNING", "ERROR")]


def test_worker_without_a_memory_limit_keeps_its_store():
    with cluster(memory_limit=0) as client:
        status = dask_gpurt.status(client)
        assert all("no memory limit" in w["unmanaged"] for w in status["workers"].values())
        assert client.submit(sum, [1, 2]).result() == 3


def test_status_shows_tiers():
    with cluster() as client:
        wait([client.compute(block(n)) for n in range(24)])
        status = dask_gpurt.status(client)
        for report in status["workers"].values():
            names = [level["name"] for level in report["memory"]["levels"]]
            assert names == ["memory", "disk", "inherited"]


def test_explain_says_where_a_value_is_and_why():
    with cluster() as client:
        parts = [client.compute(block(n)) for n in range(24)]
        wait(parts)
        key, address = next(
            (key, address)
            for address, worker in client.cluster.workers.items()
            for key in worker.data.disk
        )
        said = dask_gpurt.explain(client, key)["memory"]
        ((worker, one),) = said.items()
        assert worker == client.cluster.workers[address].address
        assert list(one["levels"]) == ["disk"]
        assert one["reason"].startswith("memory was needed for other values")
        assert one["nbytes"] >= 4 * MIB
        assert dask_gpurt.explain(client, "never-heard-of")["memory"] == {}
        dask_gpurt.disable(client)
        for worker in client.cluster.workers.values():
            assert not [name for name in worker.handlers if name.startswith("gpurt_")]


def test_worker_with_the_store_of_dask_explains_nothing():
    with cluster(memory_limit=0) as client:
        future = client.submit(sum, [1, 2])
        wait(future)
        assert dask_gpurt.explain(client, future)["memory"] == {}


@pytest.mark.parametrize("is_replaced", [False, True])
def test_store_of_dask_cuda_is_replaced_on_request_only(is_replaced):
    # The message derives the store's library from the module of its class.
    kind = type("DeviceHostFile", (dict,), {"__module__": "dask_cuda.device_host_file"})
    options = {"n_workers": 1, "processes": False, "protocol": "tcp://", "dashboard_address": ":0"}
    settings = {**MANAGED_ALONE, "gpurt.memory.replace-dask-cuda": is_replaced}
    with (
        dask.config.set(settings),
        LocalCluster(data=kind, memory_limit=32 * MIB, **options) as local,
        Client(local) as client,
    ):
        (worker,) = local.workers.values()
        before = client.submit(sum, [1, 2], key="before")
        wait(before)
        dask_gpurt.enable(client)
        (reported,) = dask_gpurt.status(client)["workers"].values()
        assert ("dask-cuda's store" in str(reported["unmanaged"])) is not is_replaced
        assert (type(worker.data) is kind) is not is_replaced
        assert before.result() == 3
        dask_gpurt.disable(client)
        assert type(worker.data) is kind
        assert worker.data["before"] == 3


@pytest.mark.parametrize(
    "own",
    [
        {"spill_directory": "own"},
        {"spill_directory": "storage", "target": 5 * MIB},
        {"spill_directory": "storage", "max_spill": 1 << 40},
    ],
    ids=["folder", "target", "limit"],
)
def test_custom_spill_buffer_is_kept(own):
    """A store of the same class that Dask makes by default is replaced."""

    def made(worker_local_directory):
        folder = os.path.join(worker_local_directory, own["spill_directory"])
        target = own.get("target", int(32 * MIB * 0.6))
        return SpillBuffer(folder, target, own.get("max_spill", False))

    options = {"n_workers": 1, "processes": False, "protocol": "tcp://", "dashboard_address": ":0"}
    with (
        dask.config.set(MANAGED_ALONE),
        LocalCluster(data=made, memory_limit=32 * MIB, **options) as local,
        Client(local) as client,
    ):
        (worker,) = local.workers.values()
        dask_gpurt.enable(client)
        (reported,) = dask_gpurt.status(client)["workers"].values()
        assert type(worker.data) is SpillBuffer
        assert "settings of its own" in str(reported["unmanaged"])


def test_compressed_tier_keeps_compressible_values_in_memory():
    with cluster(**{"gpurt.memory.compressed": "4 MiB"}) as client:
        parts = [client.compute(block(n)) for n in range(24)]
        wait(parts)
        for store in stores(client):
            levels = {level["name"]: level for level in store.report()["levels"]}
            assert list(levels) == ["memory", "compressed", "disk", "inherited"]
            assert levels["compressed"]["values"]
            assert levels["compressed"]["used_nbytes"] <= levels["compressed"]["capacity_nbytes"]
            assert not levels["disk"]["values"]
        sums = client.gather(client.compute([delayed(np.sum)(part) for part in parts]))
        assert sums == [n * (4 * MIB // 8) for n in range(24)]
