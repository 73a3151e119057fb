"""Restarted runs are not disturbed by active threads and late calls of the previous run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import dask
import pytest
from distributed.core import error_message
from distributed.exceptions import Reschedule
from distributed.protocol.pickle import loads
from distributed.shuffle._core import id_from_key
from distributed.shuffle._exceptions import ShuffleClosedError

from tests.failure import gates
from tests.failure.gates import Gate, pass_gate
from tests.failure.leftovers import assert_nothing_left
from tests.failure.stage import Stage, expected, leaving, open_stage
from tests.integration.comparing import assert_same_partitions


@pytest.fixture
def stage() -> Iterator[Stage]:
    with (
        dask.config.set({"gpurt.shuffle.in-flight": "1 B"}),
        open_stage("comm", threads=2) as stage,
    ):
        yield stage


@pytest.fixture
def quiet_stage() -> Iterator[Stage]:
    """A stage without back-pressure."""
    with open_stage("comm") as stage:
        yield stage


def _first(visit: Callable[[], None]) -> Callable[[], None]:
    visits = iter([visit])
    return lambda: next(visits, lambda: None)()


def _hold_one(worker: Any, point: str, path: str) -> None:
    gates.before(worker, point, _first(lambda: pass_gate(path)))


def test_producers_wait_for_a_receiver_that_leaves(stage: Stage) -> None:
    """They are released and take part in the next run."""
    victim = stage.addresses("receiver")[0]
    with Gate() as gate:
        stage.tell(victim, gates.hold, "receive", gate.path)
        outputs = stage.shuffle()
        stage.wait_for_blocked_producers(4)
        with leaving(stage, victim):
            stage.wait(outputs)
            gate.open()
    assert_same_partitions(stage.results(outputs), expected())
    assert stage.runs() == {"gpurt": 2, "stock": 0}
    stage.forget(outputs)
    assert_nothing_left(stage.client, *stage.closed)


def test_hanging_barrier_does_not_disturb_the_next_run(stage: Stage) -> None:
    """A barrier hangs while it tries to reach a worker that has just died."""
    victim = stage.addresses("sender")[0]
    handlers = stage.cluster.scheduler.handlers
    stock = handlers["shuffle_barrier"]

    async def hang_once(**kwargs: Any) -> Any:
        handlers["shuffle_barrier"] = stock
        is_here.open()
        await asyncio.Event().wait()

    is_here = Gate()
    handlers["shuffle_barrier"] = hang_once
    outputs = stage.shuffle()
    pass_gate(is_here.path)
    with leaving(stage, victim):
        assert_same_partitions(stage.results(outputs), expected())
    assert stage.runs() == {"gpurt": 2, "stock": 0}
    stage.forget(outputs)
    assert_nothing_left(stage.client, *stage.closed)


def test_output_is_read_while_the_next_run_completes(stage: Stage) -> None:
    reader, victim = stage.addresses("receiver")[::-1]
    with Gate() as gate:
        stage.tell(reader, _hold_one, "unpack", gate.path)
        outputs = stage.shuffle()
        gate.wait_for()
        with leaving(stage, victim):
            stage.wait_for_done(len(outputs) - 1, outputs)
            gate.open()
            assert_same_partitions(stage.results(outputs), expected())
    assert stage.runs() == {"gpurt": 2, "stock": 0}
    stage.forget(outputs)
    assert_nothing_left(stage.client, *stage.closed)


def _conclude_late(worker: Any, path: str, when: Callable[..., None]) -> None:
    when(worker, "conclude", _first(lambda: pass_gate(path)))


@pytest.mark.parametrize("when", ["before", "after"])
def test_late_barrier_of_an_old_run_does_not_end_the_new_run(quiet_stage: Stage, when: str) -> None:
    """The late call reaches a worker that concludes the next run, and must not end that run."""
    stage = quiet_stage
    victim, sender = stage.addresses("sender")
    concluding = stage.addresses("receiver")[1]
    with Gate() as open_run, Gate() as late:
        # Otherwise, the barrier of the first run would end before the victim leaves.
        stage.tell(sender, _hold_one, "barrier", open_run.path)
        stage.tell(concluding, _conclude_late, late.path, getattr(gates, when))
        outputs = stage.shuffle()
        (late if when == "before" else open_run).wait_for()
        with leaving(stage, victim):
            late.wait_for()
            stage.barriers.wait_for(2)
            late.open()
            open_run.open()
            assert_same_partitions(stage.results(outputs), expected())
    assert stage.runs() == {"gpurt": 2, "stock": 0}
    stage.forget(outputs)
    assert_nothing_left(stage.client, *stage.closed)


def test_barrier_of_a_vanished_run_restarts_the_shuffle(quiet_stage: Stage) -> None:
    """All inputs are computed again, and no error reaches the client."""
    stage = quiet_stage
    concluding = stage.addresses("receiver")[1]
    plugin = stage.cluster.scheduler.plugins["shuffle"]

    async def lose_run() -> None:
        (run,) = plugin.active_shuffles.values()
        plugin._fail_on_workers(run, "lost")
        plugin._clean_on_scheduler(run.id, "lost")

    with Gate() as gate:
        stage.tell(concluding, _conclude_late, gate.path, gates.before)
        outputs = stage.shuffle()
        gate.wait_for()
        stage.cluster.sync(lose_run)
        gate.open()
        assert_same_partitions(stage.results(outputs), expected())
    assert stage.runs() == {"gpurt": 2, "stock": 0}
    stage.forget(outputs)
    assert_nothing_left(stage.client)


def test_task_that_asks_during_a_restart_runs_again(quiet_stage: Stage) -> None:
    """A task that asks too early is told to run again; an error would fail the computation."""
    stage = quiet_stage
    concluding = stage.addresses("receiver")[1]
    scheduler = stage.cluster.scheduler
    plugin = scheduler.plugins["shuffle"]
    answers = []

    async def lose_run_and_ask() -> None:
        (run,) = plugin.active_shuffles.values()
        plugin._fail_on_workers(run, "lost")
        plugin._clean_on_scheduler(run.id, "lost")
        (barrier,) = (ts for ts in scheduler.tasks.values() if id_from_key(ts.key) == run.id)
        transfer = min(map(str, (ts.key for ts in barrier.dependencies)))
        key = next(ts.key for ts in barrier.dependencies if str(ts.key) == transfer)
        handlers = scheduler.handlers
        answers.append(await handlers["shuffle_get"](id=run.id, worker=concluding))
        asked = {"shuffle_id": run.id, "key": key, "worker": concluding}
        answers.append(await handlers["shuffle_get_or_create"](**asked))

    with Gate() as gate:
        stage.tell(concluding, _conclude_late, gate.path, gates.before)
        outputs = stage.shuffle()
        gate.wait_for()
        stage.cluster.sync(lose_run_and_ask)
        gate.open()
        assert_same_partitions(stage.results(outputs), expected())
    errors = [type(loads(answer["exception"].data)) for answer in answers]
    assert errors == [Reschedule, ShuffleClosedError]
    stage.forget(outputs)
    assert_nothing_left(stage.client)


def _refuse(worker: Any) -> None:
    async def refused(**message: Any) -> Any:
        return error_message(ShuffleClosedError("has already been closed"))

    gates.replace(worker, "receive", lambda receive: refused)


def test_stopping_receiver_refuses_messages_before_it_leaves(quiet_stage: Stage) -> None:
    """A worker that was asked to stop refuses messages until the scheduler notices its end."""
    stage = quiet_stage
    sender, victim = stage.addresses("sender")[0], stage.addresses("receiver")[0]
    stage.tell(victim, _refuse)
    with Gate() as gate:
        stage.tell(sender, gates.hold, "barrier", gate.path)
        outputs = stage.shuffle()
        gate.wait_for()
        gate.open()
        with leaving(stage, victim):
            assert_same_partitions(stage.results(outputs), expected())
    assert stage.runs() == {"gpurt": 2, "stock": 0}
    stage.forget(outputs)
    assert_nothing_left(stage.client, *stage.closed)
