"""Shuffles give the right result if a worker takes long to close in their middle.

Such a worker has closed its runs, but still answers until the scheduler notices. At the end it
cannot ask the scheduler any more, because it has closed its own connections.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import dask
import pytest
from distributed import Status
from distributed.diagnostics.plugin import WorkerPlugin
from distributed.protocol.pickle import loads
from distributed.shuffle._exceptions import ShuffleClosedError

from tests.failure import gates
from tests.failure.gates import Gate, pass_gate, until
from tests.failure.leftovers import assert_nothing_left
from tests.failure.stage import Stage, expected, open_stage
from tests.integration.comparing import assert_same_partitions


@pytest.fixture(params=["comm", "shared"])
def stage(request: Any) -> Iterator[Stage]:
    # Each shard is a message, so that some wait while others are in flight.
    with (
        dask.config.set({"gpurt.shuffle.message-size": "1 B"}),
        open_stage(request.param) as stage,
    ):
        yield stage


class Lingers(WorkerPlugin):
    """A user's plugin that delays the end of its worker."""

    name = "lingers"

    def __init__(self, path: str) -> None:
        self.path = path

    async def teardown(self, worker: Any) -> None:
        await asyncio.to_thread(pass_gate, self.path)


def _linger(worker: Any, path: str) -> None:
    worker.plugins["lingers"] = Lingers(path)


def _linger_without_connections(worker: Any, path: str) -> None:
    close = worker.rpc.close

    async def close_and_linger() -> None:
        await close()
        await asyncio.to_thread(pass_gate, path)

    worker.rpc.close = close_and_linger


@pytest.fixture(params=[_linger, _linger_without_connections])
def delay(request: Any) -> Any:
    """Where a worker waits while it closes."""
    return request.param


@contextlib.contextmanager
def closing(stage: Stage, victim: str, delay: Any) -> Iterator[None]:
    """Close a worker: inside the block its runs are closed, and after it the worker is gone."""
    worker = stage.worker_at(victim)
    stage.closed.append(worker)
    shuffles = worker.plugins["shuffle"]
    with Gate() as gate:
        stage.tell(victim, delay, gate.path)

        async def begin() -> asyncio.Task[Any]:
            return asyncio.create_task(worker.close(nanny=False))

        task = stage.cluster.sync(begin)
        gate.wait_for()
        until(lambda: shuffles.closed and not shuffles.shuffle_runs._runs, "its runs stay open")
        yield
        gate.open()
        stage.departures.wait_for(victim)

    async def end() -> None:
        await task

    stage.cluster.sync(end)


def is_done(outputs: list[Any]) -> bool:
    return all(future.done() for future in outputs)


def _is_held(worker: Any) -> bool:
    """Return whether a call waits for the end of this worker."""
    assert worker.status == Status.closing
    return bool(worker._event_finished._waiters)


def assert_it_ran_again_and_left_nothing(stage: Stage, outputs: list[Any]) -> None:
    assert stage.runs() == {"gpurt": 2, "stock": 0}
    stage.forget(outputs)
    assert_nothing_left(stage.client, *stage.closed)


def test_unsent_messages_of_a_closing_sender_do_not_count(stage: Stage, delay: Any) -> None:
    """The sender has dropped them, and must not report them as delivered."""
    victim = stage.addresses("sender")[0]
    worker = stage.worker_at(victim)
    with Gate() as asked, Gate() as taken:
        stage.tell(victim, gates.hold, "barrier", asked.path)
        for receiver in stage.addresses("receiver"):
            stage.tell(receiver, gates.hold, "receive", taken.path)
        outputs = stage.shuffle()
        asked.wait_for()
        asked.open()
        run = next(iter(worker.plugins["shuffle"].shuffle_runs._runs))
        until(lambda: run.transferred, "the barrier does not ask the sender")
        with closing(stage, victim, delay):
            taken.open()
            until(lambda: _is_held(worker) or is_done(outputs), "no answer and no wait")
        assert_same_partitions(stage.results(outputs), expected())
    assert_it_ran_again_and_left_nothing(stage, outputs)


def test_barrier_asks_a_sender_that_has_closed_its_runs(stage: Stage, delay: Any) -> None:
    """Its shards were delivered, but the sender has no record of it any more."""
    victim = stage.addresses("sender")[0]
    worker = stage.worker_at(victim)
    with Gate() as asked:
        stage.tell(victim, gates.hold, "barrier", asked.path)
        outputs = stage.shuffle()
        asked.wait_for()
        with closing(stage, victim, delay):
            asked.open()
            until(lambda: _is_held(worker) or is_done(outputs), "no answer and no wait")
        assert_same_partitions(stage.results(outputs), expected())
    assert_it_ran_again_and_left_nothing(stage, outputs)


def test_messages_wait_for_the_next_run_of_a_closing_receiver(stage: Stage) -> None:
    """Messages wait until the receiver is gone, and then for the next run."""
    victim = stage.addresses("receiver")[0]
    worker = stage.worker_at(victim)
    refused: list[Any] = []

    def noting_refusals(receive: Any) -> Any:
        async def noting(**message: Any) -> Any:
            answer = await receive(**message)
            if answer["status"] == "error":
                refused.append(answer)
            return answer

        return noting

    gates.replace(worker, "receive", noting_refusals)
    with Gate() as made:
        outputs = stage.shuffle(gate=made.path)
        made.wait_for(2)
        with closing(stage, victim, _linger):
            made.open()
            until(lambda: refused or is_done(outputs), "nothing is refused")
        assert_same_partitions(stage.results(outputs), expected())
    assert_it_ran_again_and_left_nothing(stage, outputs)


def test_a_worker_without_connections_refuses_messages_quietly(stage: Stage, caplog: Any) -> None:
    """They come on connections that peers had opened before."""
    victim = stage.addresses("receiver")[0]
    receive = stage.worker_at(victim).handlers["shuffle_receive"]
    with Gate() as made:
        outputs = stage.shuffle(gate=made.path)
        made.wait_for(2)
        with closing(stage, victim, _linger_without_connections):
            answer = stage.cluster.sync(receive, shuffle_id="any", run_id=1, data={})
            made.open()
        assert_same_partitions(stage.results(outputs), expected())
    assert answer["status"] == "error"
    assert type(loads(answer["exception"].data)) is ShuffleClosedError
    assert "Exception while handling op" not in caplog.text
    stage.forget(outputs)
    assert_nothing_left(stage.client, *stage.closed)
