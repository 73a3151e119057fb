"""A value that does not fit on the receiver is requested again, and finally causes an error."""

from __future__ import annotations

import asyncio
import inspect
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from distributed import Client, Worker, wait
from distributed.core import ConnectionPool
from distributed.worker import get_data_from_worker
from distributed.worker_state_machine import GatherDepBusyEvent, GatherDepFailureEvent, TaskErredMsg

import dask_gpurt
from dask_gpurt.plugins.patches import gather_dep
from tests.failure.gates import DEADLINE_S, Gate, pass_gate
from tests.integration.memory_cluster import cluster

#: Number of times that memory for a value will still be missing.
_times_short = 0
_was_short = threading.Semaphore(0)


def be_short(times: int) -> None:
    global _times_short
    _times_short = times


def _unpack(size: int) -> Bulky:
    if _times_short:
        be_short(_times_short - 1)
        _was_short.release()
        raise MemoryError(f"no room for {size}")
    return Bulky(size)


class Bulky:
    """A value that takes memory when it is deserialized."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __reduce__(self) -> Any:
        return _unpack, (self.size,)

    def __sizeof__(self) -> int:
        return self.size


def size(bulky: Bulky) -> int:
    return bulky.size


async def _has_sent_all(dask_worker: Worker) -> None:
    while dask_worker.transfer_outgoing_count:
        await asyncio.sleep(0)


async def _knows_nothing_of(key: str, dask_worker: Worker) -> None:
    while key in dask_worker.state.tasks:
        await asyncio.sleep(0)


@pytest.fixture
def client() -> Iterator[Client]:
    be_short(0)
    with cluster(n_workers=2, n_threads=2) as client:
        yield client


def peers(client: Client) -> tuple[Worker, Worker]:
    holder, asking = client.cluster.workers.values()
    return holder, asking


def test_distributed_has_the_replaced_functions() -> None:
    assert list(inspect.signature(Worker.gather_dep).parameters) == [
        "self",
        "worker",
        "to_gather",
        "total_nbytes",
        "stimulus_id",
    ]
    assert list(inspect.signature(ConnectionPool.reuse).parameters) == ["self", "addr", "comm"]
    # Stock reuses the connection while the error propagates.
    source = inspect.getsource(get_data_from_worker)
    assert re.search(r"finally:\s+rpc\.reuse\(worker, comm\)", source)
    assert "return GatherDepFailureEvent.from_exception(" in inspect.getsource(Worker.gather_dep)
    told = {"key", "run_id", "exception", "traceback", "exception_text", "traceback_text"}
    assert set(TaskErredMsg.__slots__) == told | {"thread", "startstops"}
    assert issubclass(GatherDepBusyEvent, GatherDepFailureEvent.__mro__[1])


@pytest.mark.cluster
def test_gather_is_retried_when_a_task_has_ended(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    holder, asking = peers(client)
    with Gate() as gate:
        running = client.submit(pass_gate, gate.path, workers=[asking.address])
        gate.wait_for()
        bulky = client.submit(Bulky, 1000, workers=[holder.address], key="bulky")
        wait(bulky)
        be_short(1)
        used = client.submit(size, bulky, workers=[asking.address])
        assert _was_short.acquire(timeout=DEADLINE_S)
        # The peer no longer waits for an acknowledgement.
        client.run(_has_sent_all, workers=[holder.address])
        assert not used.done()
        gate.open()
        assert used.result(DEADLINE_S) == 1000
        running.result(DEADLINE_S)
    told = [record for record in caplog.records if record.name == gather_dep.logger.name]
    assert [record.levelname for record in told] == ["WARNING"]
    assert "requested again: no room for 1000" in told[0].getMessage()


@pytest.mark.cluster
def test_input_that_never_fits_fails_its_tasks(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gather_dep, "PATIENCE_S", 0.01)
    holder, asking = peers(client)
    bulky = client.submit(Bulky, 1000, workers=[holder.address], key="bulky")
    wait(bulky)
    be_short(10**6)
    used = [client.submit(size, bulky, workers=[asking.address], pure=False) for _ in range(2)]
    for one in used:
        with pytest.raises(MemoryError, match=re.escape(asking.address) + " has no memory for 1"):
            one.result(DEADLINE_S)
    client.run(_knows_nothing_of, "bulky", workers=[asking.address])
    # Nothing remains of the failure: the same value arrives now that there is room.
    be_short(0)
    again = client.submit(size, bulky, workers=[asking.address], pure=False)
    assert again.result(DEADLINE_S) == 1000


@pytest.mark.cluster
def test_patch_is_removed(client: Client) -> None:
    _, asking = peers(client)
    assert "gather_dep" in vars(asking) and "reuse" in vars(asking.rpc)
    dask_gpurt.disable(client)
    assert "gather_dep" not in vars(asking) and "reuse" not in vars(asking.rpc)
