"""Shuffles end with the right result after any failure of any worker, and leave nothing.

The tests combine failures, phases of a shuffle and roles of a worker. Each test stops the shuffle
at a gate, causes the failure, opens the gate and checks the result. It also checks the number of
runs. The failure of a participating worker costs exactly one more run; others cost none.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from distributed import Status

from tests.failure import gates
from tests.failure.gates import Gate, from_call, pass_gate
from tests.failure.leftovers import assert_nothing_left, files_in
from tests.failure.stage import DEADLINE_S, ROLES, TRANSPORTS, Stage, expected, leaving, open_stage
from tests.integration.comparing import assert_same_partitions
from tests.thoroughness import RUNS_ALL

pytestmark = pytest.mark.usefixtures("no_tracebacks_kept")

PHASES = ("before", "transfer", "barrier", "unpack", "after")
TIMES = 5


class Paused:
    """A worker is paused as with full memory, until the others cannot continue without it."""

    def __init__(self, stage: Stage, victim: str, phase: str) -> None:
        self.stage = stage
        self.victim = victim

    def strike(self) -> None:
        self.stage.tell(self.victim, _set_status, Status.paused)

    def relent(self, outputs: list[Any]) -> None:
        self.stage.wait_until_stuck(self.victim, outputs)
        self.stage.tell(self.victim, _set_status, Status.running)


def _set_status(worker: Any, status: Status) -> None:
    worker.status = status


class Closed:
    """A worker is retired: its results move to others, then it closes."""

    def __init__(self, stage: Stage, victim: str, phase: str) -> None:
        self.stage = stage
        self.victim = victim

    def strike(self) -> None:
        self._leaving = contextlib.ExitStack()
        self._leaving.enter_context(leaving(self.stage, self.victim))

    def relent(self, outputs: list[Any]) -> None:
        self._leaving.close()


class Killed:
    """A worker is killed, and its nanny starts another one."""

    def __init__(self, stage: Stage, victim: str, phase: str) -> None:
        self.stage = stage
        self.victim = victim

    def strike(self) -> None:
        pid, self._directory = self.stage.tell(self.victim, _process)
        os.kill(pid, signal.SIGKILL)
        self.stage.departures.wait_for(self.victim)

    def relent(self, outputs: list[Any]) -> None:
        self.stage.client.wait_for_workers(sum(map(len, ROLES.values())), timeout=DEADLINE_S)
        assert files_in(self._directory) == []


def _process(worker: Any) -> tuple[int, str]:
    return os.getpid(), worker.local_directory


class Slow:
    """A worker is slow: it repeats the calls of this phase five times."""

    def __init__(self, stage: Stage, victim: str, phase: str) -> None:
        role = next(role for role in ROLES if victim in stage.addresses(role))
        if (phase, role) == ("transfer", "receiver"):
            # UCX delivers a message only once, so the senders repeat it.
            for sender in stage.addresses("sender"):
                stage.tell(sender, gates.deliver_again, TIMES, [victim])
        elif phase != "before":
            stage.tell(victim, gates.repeat, point_of(phase, role), TIMES)

    def strike(self) -> None:
        pass

    def relent(self, outputs: list[Any]) -> None:
        pass


DEEDS = {"closed": Closed, "killed": Killed, "paused": Paused, "slow": Slow}

NOTHING_TO_DO = {
    ("before", "receiver"): "a receiver does nothing before the first transfer",
    ("before", "bystander"): "a bystander does nothing",
    ("transfer", "bystander"): "a bystander does nothing",
    ("barrier", "bystander"): "a bystander is not asked to the barrier",
    ("unpack", "sender"): "a sender owns no output",
    ("unpack", "bystander"): "a bystander owns no output",
    ("after", "sender"): "the run is over",
    ("after", "receiver"): "the run is over",
    ("after", "bystander"): "the run is over",
}


def point_of(phase: str, role: str) -> str:
    return "receive" if phase == "transfer" and role == "receiver" else phase


def n_runs(deed: str, phase: str, role: str) -> int:
    """Return the expected number of runs of a shuffle."""
    if deed in ("paused", "slow") or phase == "before" or role == "bystander":
        return 1
    if phase == "after":
        # A retired worker gives its results to others; those of a killed worker are lost.
        return 2 if (deed, role) == ("killed", "receiver") else 1
    return 2


def cells() -> Iterator[Any]:
    for deed in DEEDS:
        for phase in PHASES:
            for role in ROLES:
                marks = []
                if deed == "slow" and (reason := NOTHING_TO_DO.get((phase, role))):
                    marks.append(pytest.mark.skip(reason=f"nothing to be slow at: {reason}"))
                if deed == "killed":
                    marks += [pytest.mark.cluster, pytest.mark.slow]
                yield pytest.param(deed, phase, role, id=f"{deed}-{phase}-{role}", marks=marks)


@pytest.fixture(scope="module", params=TRANSPORTS)
def transport(request: Any) -> str:
    if request.param == "ucx":
        pytest.importorskip("ucxx", reason="the ucx extra is not installed")
    return str(request.param)


@pytest.fixture(scope="module")
def processes(transport: str) -> Iterator[Stage]:
    with open_stage(transport, processes=True) as stage:
        yield stage


@pytest.fixture
def stage(request: Any, transport: str, deed: str) -> Iterator[Stage]:
    """A new cluster in this process, which starts fast; tests that kill share processes."""
    if deed == "killed":
        if transport == "comm" and not RUNS_ALL:
            pytest.skip("over Dask's connections, test_random_killer kills workers")
        yield request.getfixturevalue("processes")
    else:
        with open_stage(transport, processes=False) as stage:
            yield stage


@pytest.fixture(scope="module")
def answer() -> list[Any]:
    return expected()


def hold(stage: Stage, phase: str, role: str, gate: Gate) -> None:
    """Stop the victim in the middle of a phase, or a receiver if the victim has no part in it."""
    if phase == "transfer" and role == "sender":
        # Its shards are in flight, and the scheduler does not know yet that the task is done.
        stage.tell(stage.addresses(role)[0], _hold_after, "transfer", gate.path)
        return
    if role == "bystander" or phase == "unpack":
        role = "receiver"
    # When the second message or output waits, the first one is complete.
    nth = 1 if phase == "barrier" else 2
    stage.tell(stage.addresses(role)[0], _hold_before, point_of(phase, role), nth, gate.path)


def _hold_before(worker: Any, point: str, nth: int, path: str) -> None:
    gates.before(worker, point, from_call(nth, lambda: pass_gate(path)))


def _hold_after(worker: Any, point: str, path: str) -> None:
    gates.after(worker, point, lambda: pass_gate(path))


@pytest.mark.share(4)
@pytest.mark.parametrize(("deed", "phase", "role"), list(cells()))
def test_results_are_equal_under_every_failure(
    stage: Stage, answer: list[Any], deed: str, phase: str, role: str
) -> None:
    victim = stage.addresses(role)[0]
    runs_before = stage.runs()["gpurt"]
    with Gate() as gate:
        event = DEEDS[deed](stage, victim, phase)
        if phase not in ("before", "after"):
            hold(stage, phase, role, gate)
        outputs = stage.shuffle(
            gate=gate.path if phase == "before" else None,
            times={victim: TIMES} if deed == "slow" and phase == "before" else None,
        )
        if phase == "after":
            stage.wait(outputs)
        else:
            try:
                gate.wait_for(len(ROLES["sender"]) if phase == "before" else 1)
            except AssertionError:
                stage.print_state()
                raise
        event.strike()
        gate.open()
        event.relent(outputs)
        assert_same_partitions(stage.results(outputs), answer)
    assert stage.runs() == {"gpurt": runs_before + n_runs(deed, phase, role), "stock": 0}
    stage.restore()
    stage.forget(outputs)
    assert_nothing_left(stage.client, *stage.closed)
