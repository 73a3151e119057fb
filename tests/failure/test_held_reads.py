"""If a peer fails during a read of its memory, the loop keeps running and the read ends safely."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dask_gpurt.plugins.shuffle import arrivals
from dask_gpurt.transport import shared
from tests.failure.gates import DEADLINE_S, Gate, pass_gate
from tests.failure.leftovers import assert_nothing_left
from tests.failure.stage import ROLES, Stage, expected, open_stage
from tests.integration.comparing import assert_same_partitions


def held(read: Callable[..., None], path: str) -> Callable[..., None]:
    def pass_and_read(*args: Any) -> None:
        pass_gate(path)
        read(*args)

    return pass_and_read


def _hold_reads(worker: Any, path: str) -> None:
    """Make reads wait at a gate, in a worker process that ends with the test."""
    arrivals.LEAST_THREAD_NBYTES = 0
    shared._read_into = held(shared._read_into, path)


def _n_open_runs(worker: Any) -> int:
    return len(worker.plugins["shuffle"].shuffle_runs._runs)


def assert_loop_answers(stage: Stage) -> None:
    answered = threading.Event()
    stage.cluster.loop.add_callback(answered.set)
    assert answered.wait(DEADLINE_S), "a read holds up the loop"


@pytest.fixture
def gate() -> Iterator[Gate]:
    with Gate() as gate:
        yield gate


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch, gate: Gate) -> Iterator[Stage]:
    """A stage with all workers in this process; reads from a peer stop at the gate."""
    monkeypatch.setattr(arrivals, "LEAST_THREAD_NBYTES", 0)
    monkeypatch.setattr(shared, "_read_into", held(shared._read_into, gate.path))
    with open_stage("shared") as stage:
        yield stage


def test_event_loop_answers_during_a_blocked_read(stage: Stage, gate: Gate) -> None:
    outputs = stage.shuffle()
    gate.wait_for()
    assert_loop_answers(stage)
    assert not any(future.done() for future in outputs)
    gate.open()
    assert_same_partitions(stage.results(outputs), expected())
    assert stage.runs() == {"gpurt": 1, "stock": 0}
    stage.forget(outputs)
    assert_nothing_left(stage.client)


def test_run_ends_during_a_blocked_read(stage: Stage, gate: Gate) -> None:
    outputs = stage.shuffle()
    gate.wait_for()
    assert_loop_answers(stage)
    stage.forget(outputs)
    give_up = time.monotonic() + DEADLINE_S
    while any(stage.tell(address, _n_open_runs) for address in stage.addresses("receiver")):
        assert time.monotonic() < give_up, "a run waits for a read"
    gate.open()
    assert_nothing_left(stage.client)
    again = stage.shuffle()
    assert_same_partitions(stage.results(again), expected())


@pytest.mark.cluster
@pytest.mark.slow
def test_sender_killed_during_a_read_costs_one_more_run(gate: Gate) -> None:
    with open_stage("shared", processes=True) as stage:
        for receiver in stage.addresses("receiver"):
            stage.tell(receiver, _hold_reads, gate.path)
        outputs = stage.shuffle()
        gate.wait_for(2)
        # Both messages may come from one sender, while the other one has not begun.
        victim = next(one for one in stage.addresses("sender") if stage.tell(one, _n_open_runs))
        os.kill(stage.tell(victim, lambda worker: os.getpid()), signal.SIGKILL)
        stage.departures.wait_for(victim)
        gate.open()
        assert_same_partitions(stage.results(outputs), expected())
        assert stage.runs() == {"gpurt": 2, "stock": 0}
        stage.client.wait_for_workers(sum(map(len, ROLES.values())), timeout=DEADLINE_S)
        stage.forget(outputs)
        assert_nothing_left(stage.client)
