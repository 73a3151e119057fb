"""Managed memory on real workers: more data than memory, damage, disabling, a live cluster."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import pathlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import dask
import dask.array as da
import numpy as np
import pytest
from dask import delayed
from distributed import Client, Event, LocalCluster, get_client, wait, worker_client
from distributed.spill import SpillBuffer

import dask_gpurt
from dask_gpurt.memory.files.disk_tier import DiskTier
from tests.failure.gates import DEADLINE_S, Gate, pass_gate

MIB = 1 << 20

#: In one process with everything else, so that what the process takes besides is not looked at.
MANAGED_ALONE = {
    "distributed.worker.memory.target": 0.6,
    "distributed.worker.memory.spill": False,
    "distributed.worker.memory.pause": False,
    "distributed.worker.memory.terminate": False,
}


@contextlib.contextmanager
def cluster(memory_limit=32 * MIB, n_workers=2, n_threads=1, enable=True, **config):
    settings = {**MANAGED_ALONE, "gpurt.enabled": False, **config}
    with (
        dask.config.set(settings),
        LocalCluster(
            n_workers=n_workers,
            threads_per_worker=n_threads,
            processes=False,
            protocol="tcp://",
            memory_limit=memory_limit,
            dashboard_address=":0",
            silence_logs=False,
        ) as local,
        Client(local) as client,
    ):
        if enable:
            dask_gpurt.enable(client)
        yield client


def stores(client):
    return [worker.data for worker in client.cluster.workers.values()]


def until(is_so):
    give_up = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < give_up


def on_disk(client):
    return sum(len(store.disk) for store in stores(client))


@delayed(pure=False)
def block(number, nbytes=4 * MIB):
    return np.full(nbytes // 8, number, dtype=np.int64)


def test_more_data_than_memory():
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
            # Nothing was written twice.
            assert report["io"]["disk-write-bytes"] <= 1.05 * x.nbytes


def test_the_dashboards_figures_of_spilled_data():
    with cluster() as client:
        parts = [client.compute(block(n)) for n in range(24)]
        wait(parts)
        workers = list(client.cluster.workers.values())
        metrics = [client.sync(worker.get_metrics) for worker in workers]
        cold = sum(m["spilled_bytes"]["memory"] for m in metrics)
        at_home = sum(store.residency.levels[0].used_nbytes for store in stores(client))
        # A value is in memory or spilled, and not both, however many copies there are.
        assert cold + at_home == sum(m["managed_bytes"] for m in metrics)
        assert all(m["spilled_bytes"]["disk"] > 0 for m in metrics)
        assert all(worker.data.cumulative_metrics["disk-write", "bytes"] > 0 for worker in workers)


def test_a_value_on_disk_is_sent_without_coming_home():
    with cluster() as client:
        parts = [client.compute(block(n)) for n in range(24)]
        wait(parts)
        cold = next(key for store in stores(client) for key in store.disk)
        (part,) = [p for p in parts if p.key == cold]
        assert (part.result() == part.result()[0]).all()
        assert any(store.is_spilled(cold) for store in stores(client))


def test_a_value_that_leaves_while_another_is_read_for_the_same_message():
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
        # Neither of them on the event loop.
        assert len(readers) == 2
        assert all(name.startswith("gpurt read") for name in readers)
        for value, part in zip(values, (cold, at_home), strict=True):
            assert (value == parts.index(part)).all()


def files(client):
    return [
        path
        for worker in client.cluster.workers.values()
        for path in pathlib.Path(worker.local_directory).glob("dask-gpurt-values-*/*")
        if path.stat().st_size > MIB
    ]


@pytest.mark.parametrize("directory", ["values", "~/values"])
def test_the_directory_stays_where_it_was_whatever_tasks_do(directory, tmp_path, monkeypatch):
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
def test_a_value_whose_file_is_lost_is_computed_again(how):
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


def test_disabling_gives_the_stock_store_back_with_everything_in_it():
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


def test_a_task_that_was_about_to_begin_when_the_store_was_given_back():
    with cluster(n_workers=1) as client:
        (worker,) = client.cluster.workers.values()
        parts = [client.compute(block(n)) for n in range(12)]
        wait(parts)
        ours = worker.execute
        dask_gpurt.disable(client)
        # Dask had called ours already, and runs it now.
        worker.execute = ours
        try:
            assert client.submit(np.sum, parts[3]).result(timeout=60) == 3 * (4 * MIB // 8)
        finally:
            del worker.execute


def test_disabling_reads_beside_the_event_loop():
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
            # The worker does what it always does, with the store that it has.
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


def test_dasks_fine_metrics_know_what_was_written_and_read():
    with cluster(n_workers=1) as client:
        parts = [client.compute(block(n)) for n in range(12)]
        wait(parts)
        assert client.gather(client.compute([delayed(np.sum)(part) for part in parts]))
        (worker,) = client.cluster.workers.values()
        # What lanes did is told with the next look of the monitor.
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


def test_a_closed_worker_leaves_no_file_in_memory():
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


def test_a_live_cluster_with_spilled_data_is_taken_over(caplog):
    with cluster(enable=False) as client:
        # Data that nobody can compute again.
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


def test_a_task_that_waits_for_others_does_not_keep_their_room():
    def parent():
        with worker_client() as inner:
            return sum(inner.gather([inner.submit(child, n, pure=False) for n in range(4)]))

    def child(number):
        return int(np.full(20 * MIB // 8, number, dtype=np.int64).max())

    with cluster(n_workers=1) as client:
        # They are known to be large: what is learnt of one is expected of the next.
        assert client.submit(parent, pure=False).result() == 6
        assert client.submit(parent, pure=False).result() == 6


def test_a_task_that_waits_for_one_that_does_not_fit(monkeypatch):
    monkeypatch.setattr("dask_gpurt.plugins.memory.manager.PATIENCE_S", 0.5)

    def waits():
        Event("go").wait()
        return np.zeros(18 * MIB // 8)

    def sets():
        Event("go").set()
        return np.zeros(18 * MIB // 8)

    config = {"distributed.worker.memory.spill": 0.99}
    with cluster(n_workers=1, n_threads=2, **config) as client:
        # What the tasks make is known from others of their names.
        for name in ("waits", "sets"):
            client.submit(np.zeros, 18 * MIB // 8, key=f"{name}-0").result()
        first = client.submit(waits, key="waits-1", priority=10)
        second = client.submit(sets, key="sets-1")
        wait([first, second])


def test_tasks_that_another_hands_in_and_waits_for_do_not_wait_for_it(monkeypatch):
    """It did not leave its thread, and its input takes nearly all the room there is."""
    monkeypatch.setattr("dask_gpurt.plugins.memory.manager.PATIENCE_S", math.inf)

    def made():
        return np.ones(8 * MIB // 8)

    def outer(held):
        inner = get_client()
        parts = [inner.submit(made, key=f"made-{n}") for n in range(1, 4)]
        return sum(int(part.result().sum()) for part in parts) + held.nbytes

    with cluster(n_workers=1, n_threads=2) as client:
        # How large they are is learnt of the first.
        client.submit(made, key="made-0").result()
        held = client.submit(np.zeros, 18 * MIB // 8, key="held")
        found = client.submit(outer, held).result(timeout=DEADLINE_S)
        assert found == 3 * MIB + 18 * MIB


class Measured:
    """Remembers which threads asked how large it is."""

    def __init__(self):
        self.by = []

    def __sizeof__(self):
        self.by.append(threading.current_thread())
        return 1000


def test_outputs_are_measured_by_their_tasks_alone():
    with cluster(n_workers=1) as client:
        (worker,) = client.cluster.workers.values()
        future = client.submit(Measured, key="measured")
        wait(future)
        made = worker.data["measured"]
        assert worker.data.residency.values["measured"].nbytes >= 1000
        (thread,) = made.by
        assert "Dask" in thread.name
        assert not worker.data.measured


def test_what_comes_too_late_is_forgotten():
    with cluster(n_workers=1) as client:
        (worker,) = client.cluster.workers.values()
        future = client.submit(waits_for_the_word, key="late")
        Event("begun", client=client).wait()
        future.release()
        until(lambda: worker.state.tasks["late"].state == "cancelled")
        Event("go on", client=client).set()
        until(lambda: "late" not in worker.state.tasks)
        assert "late" not in worker.data
        assert not worker.data.measured


def waits_for_the_word():
    Event("begun").set()
    Event("go on").wait()
    return 1


class Understated:
    """Takes much more than it says."""

    def __init__(self, number):
        self.number = number

    def __sizeof__(self):
        return 48


#: Looks of the monitor follow one another closely, and say what the test wants them to.
MONITORED = {
    "distributed.worker.memory.spill": 0.7,
    "distributed.worker.memory.monitor-interval": "5ms",
}


def test_values_that_are_larger_than_they_say():
    with cluster(n_workers=1, **MONITORED) as client:
        (worker,) = client.cluster.workers.values()
        store = worker.data
        worker.monitor.get_process_memory = lambda: len(store.memory) * 3 * MIB
        futures = client.map(Understated, range(20))
        wait(futures)
        until(lambda: len(store.memory) * 3 * MIB <= 0.85 * 32 * MIB)
        assert len(store.memory) + len(store.disk) >= 20
        assert [future.result().number for future in futures] == list(range(20))


def test_memory_that_no_value_takes(monkeypatch):
    told = []
    monkeypatch.setattr("dask_gpurt.plugins.patches.worker_memory.warn_of_unmanaged", told.append)
    with cluster(n_workers=1, **MONITORED) as client:
        (worker,) = client.cluster.workers.values()
        worker.monitor.get_process_memory = lambda: 31 * MIB
        until(lambda: told)
        assert client.submit(sum, [1, 2]).result() == 3
    assert told == [31 * MIB]


def test_inputs_of_tasks_that_are_over_are_not_read_ahead():
    async def ahead(n_queued, dask_worker):
        while len(dask_worker.state.ready) != n_queued:
            await asyncio.sleep(0)
        return list(dask_worker.data._upcoming())

    with cluster(n_workers=1) as client, Gate() as gate:
        (worker,) = client.cluster.workers.values()
        first, second = client.scatter([1, 2])
        running = client.submit(pass_gate, gate.path, priority=9)
        gate.wait_for()
        uses = [client.submit(str, n, priority=p) for n, p in ((first, 5), (second, 4))]
        assert client.run(ahead, 2) == {worker.address: [first.key, second.key]}
        gate.open()
        wait([running, *uses])
        # Fewer have ended than would have the queue looked at again.
        assert client.run(ahead, 0) == {worker.address: []}


def test_a_worker_pauses_while_a_value_is_written(monkeypatch):
    relieved = []
    monkeypatch.setattr(
        "dask_gpurt.plugins.memory.manager.ManagedMemory._release_memory",
        lambda self, nbytes: relieved.append(1),
    )
    monkeypatch.setattr("dask_gpurt.plugins.memory.manager.RELEASE_INTERVAL_S", -1.0)

    async def look(share, dask_worker):
        dask_worker.monitor.get_process_memory = lambda: int(share * 32 * MIB)
        monitor = dask_worker.memory_manager.memory_monitor
        await asyncio.wait_for(monitor(dask_worker), DEADLINE_S)
        return dask_worker.status.name

    marks = {
        "distributed.worker.memory.spill": 0.7,
        "distributed.worker.memory.pause": 0.8,
        "distributed.worker.memory.monitor-interval": "1h",
    }
    with cluster(n_workers=1, **marks) as client:
        (worker,) = client.cluster.workers.values()
        writing, go_on, written = (threading.Event() for _ in range(3))

        def write():
            writing.set()
            assert go_on.wait(DEADLINE_S)

        worker.data._lanes.write(write)
        assert writing.wait(DEADLINE_S)
        try:
            for share, status in ((0.79, "running"), (0.9, "paused"), (0.5, "running")):
                assert client.run(look, share) == {worker.address: status}
        finally:
            go_on.set()
        worker.data._lanes.write(written.set)
        assert written.wait(DEADLINE_S)
        # Asked for twice, and the first is not done yet at the second.
        assert len(relieved) == 1


def test_without_a_limit_the_worker_keeps_what_it_has():
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


def test_a_value_can_be_asked_for_where_it_is_and_why():
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


def test_a_worker_with_dasks_own_store_explains_nothing():
    with cluster(memory_limit=0) as client:
        future = client.submit(sum, [1, 2])
        wait(future)
        assert dask_gpurt.explain(client, future)["memory"] == {}


@pytest.mark.parametrize("is_replaced", [False, True])
def test_the_store_of_dask_cuda_is_replaced_only_when_asked(is_replaced):
    # Which library a store is of is told by where its class is from.
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
def test_a_spill_buffer_with_settings_of_the_users_own_stays(own):
    """Dask makes the same class by default, and that one is replaced."""

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


def test_what_shrinks_stays_in_memory_where_a_tier_for_it_is_asked_for():
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
