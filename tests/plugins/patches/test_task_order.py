"""Reductions whose inputs are in memory run first; all other tasks keep their order."""

from __future__ import annotations

import asyncio
import inspect
import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from distributed import Scheduler, wait
from distributed.collections import HeapSet
from distributed.worker_state_machine import TaskState, WorkerState

import dask_gpurt
from dask_gpurt.plugins.patches.task_order import (
    MAX_SCANNED,
    MIN_INPUT_NBYTES,
    SCANNED_PER_TASK,
    TASKS_BETWEEN_SCANS,
    TaskOrder,
)
from tests.failure.gates import Gate, pass_gate
from tests.integration.memory_cluster import cluster, stores

MIB = 1 << 20


@dataclass(eq=False)
class Task:
    prefix: str
    number: int
    needs: list[str] = field(default_factory=list)
    graph: int = 1

    @property
    def key(self) -> str:
        return f"{self.prefix}-{self.number}"

    @property
    def priority(self) -> tuple[int, ...]:
        return (0, self.graph, self.number, -self.number)

    @property
    def dependencies(self) -> list[Any]:
        return [SimpleNamespace(key=key) for key in self.needs]


class Queue:
    """A worker's queue, whose tasks `total` are known to be reductions."""

    def __init__(self, *tasks: Task, spilled: set[str]) -> None:
        self.spilled = spilled
        ready: HeapSet[Task] = HeapSet(key=lambda task: task.priority)
        for task in tasks:
            ready.add(task)
        self.state = SimpleNamespace(ready=ready, executed_count=0)
        self.task_order = TaskOrder(SimpleNamespace(state=self.state), spilled.__contains__)  # type: ignore[arg-type]
        self.task_order.learn("total", MIN_INPUT_NBYTES, 8)

    def pop(self) -> Task:
        self.state.executed_count += 1
        task: Task = self.state.ready.pop()
        assert self.task_order.dequeued == {task.key}
        self.task_order.begins(task.key)
        assert not self.task_order.dequeued
        return task

    def order(self) -> list[int]:
        return [self.pop().number for _ in range(len(self.state.ready))]


def totals(n: int, **about: Any) -> list[Task]:
    return [Task("total", number, [f"x{number}"], **about) for number in range(n)]


def test_distributed_has_the_replaced_functions() -> None:
    state = WorkerState()
    assert type(state.ready) is HeapSet
    assert state.ready.key(TaskState("x", priority=(1, 2))) == (1, 2)
    assert "return self.ready.pop()" in inspect.getsource(WorkerState._next_ready_task)
    assert {"prefix", "priority", "dependencies"} <= set(TaskState.__slots__)
    # The leading elements of a priority belong to the graph.
    assert "generation,\n                    internal_priority[ts.key],\n" in inspect.getsource(
        Scheduler._set_priorities
    )


def test_tasks_with_inputs_in_memory_run_first_in_order() -> None:
    assert Queue(*totals(5), spilled={"x0", "x1", "x3"}).order() == [2, 4, 0, 1, 3]


def test_order_is_unchanged_with_all_inputs_in_memory() -> None:
    assert Queue(*totals(5), spilled=set()).order() == [0, 1, 2, 3, 4]


def test_task_runs_first_once_its_inputs_are_read() -> None:
    queue = Queue(*totals(5), spilled={"x0", "x1"})
    assert queue.pop().number == 2
    queue.spilled.discard("x0")
    assert queue.order() == [0, 3, 4, 1]


def test_task_whose_inputs_were_spilled_does_not_run_first() -> None:
    queue = Queue(*totals(5), spilled={"x0"})
    assert queue.pop().number == 1
    queue.spilled.add("x2")
    assert queue.order() == [3, 4, 0, 2]


@pytest.mark.parametrize(
    "other", [Task("other", 2, ["x9"]), Task("total", 2, ["x9"], graph=2)], ids=["name", "graph"]
)
def test_tasks_of_other_kinds_keep_their_place(other: Task) -> None:
    first = totals(2)
    assert Queue(*first, other, spilled={"x0", "x1"}).order() == [0, 1, 2]


def test_tasks_with_large_outputs_keep_their_order() -> None:
    queue = Queue(*totals(3), spilled={"x0"})
    queue.task_order.learn("total", MIN_INPUT_NBYTES, MIN_INPUT_NBYTES)
    assert queue.order() == [0, 1, 2]
    queue = Queue(*totals(3), spilled={"x0"})
    queue.task_order.learn("total", MIN_INPUT_NBYTES - 1, 8)
    assert queue.order() == [0, 1, 2]


def test_queue_is_not_scanned_for_every_task() -> None:
    queue = Queue(
        *totals(2 * TASKS_BETWEEN_SCANS), spilled={f"x{n}" for n in range(2 * TASKS_BETWEEN_SCANS)}
    )
    looks = 0
    first_of = queue.state.ready.peekn

    def counting(n: int) -> Any:
        nonlocal looks
        looks += 1
        return first_of(n)

    queue.state.ready = CountingReady(queue.state.ready, counting)
    queue.order()
    assert looks == 2


def test_scan_of_a_very_long_queue_is_bounded() -> None:
    n, n_popped = 5 * MAX_SCANNED, 100
    queue = Queue(*totals(n), spilled=set())
    asked = 0

    class Spilled(set[str]):
        def __contains__(self, key: object) -> bool:
            nonlocal asked
            asked += 1
            return True

    queue.task_order._is_spilled = Spilled().__contains__
    assert [queue.pop().number for _ in range(n_popped)] == list(range(n_popped))
    # One input for each task, and those of each scan.
    n_scans = -(-n_popped * SCANNED_PER_TASK // MAX_SCANNED)
    assert asked <= n_popped + n_scans * MAX_SCANNED


class CountingReady:
    def __init__(self, ready: Any, peekn: Any) -> None:
        self._ready = ready
        self.peekn = peekn

    def __len__(self) -> int:
        return len(self._ready)

    def pop(self) -> Any:
        return self._ready.pop()


def test_eviction_sees_the_same_order() -> None:
    queue = Queue(spilled=set())
    first, second = totals(2)
    use = queue.task_order.use
    assert use(first, in_memory=False) == first.priority
    at_home = use(second, in_memory=True)
    assert at_home is not None
    assert at_home < first.priority
    assert use(Task("other", 1), in_memory=True) == (0, 1, 1, -1)
    # Never before tasks of a graph that was submitted earlier.
    assert at_home > (0, 0, 10**9, 0)
    assert use(None, in_memory=True) is None


def test_the_first_tasks_are_found_without_sorting() -> None:
    rng = random.Random(0)
    queue = Queue(*(Task("other", rng.randrange(50)) for _ in range(200)), spilled=set())
    ready = queue.state.ready
    while ready:
        in_order = list(HeapSet.peekn(ready, 200))
        for n in (0, 1, 7, 300):
            assert list(ready.peekn(n)) == in_order[:n]
        # Removed tasks leave entries in the heap.
        for task in rng.sample(in_order, min(30, len(in_order))):
            ready.discard(task)
        for task in in_order[:5]:
            ready.add(task)
        for _ in range(min(6, len(ready))):
            ready.pop()


def test_queue_is_restored() -> None:
    queue = Queue(*totals(3), spilled={"x0"})
    assert queue.pop().number == 1
    queue.task_order.uninstall()
    assert type(queue.state.ready) is HeapSet
    assert [task.number for task in queue.state.ready.sorted()] == [0, 2]


def total(block: Any) -> float:
    return float(block.sum())


def full(number: int) -> Any:
    return np.full(2 * MIB // 8, float(number))


@pytest.mark.cluster
def test_pass_over_the_data_reads_nothing_that_is_in_memory() -> None:
    with cluster(n_workers=1, memory_limit=32 * MIB) as client:
        (worker,) = client.cluster.workers.values()
        (store,) = stores(client)
        blocks = client.map(full, range(16))
        wait(blocks)
        # So that the worker learns that these tasks are reductions.
        assert client.submit(total, blocks[0]).result() == 0
        with Gate() as gate:
            busy = client.submit(pass_gate, gate.path)
            gate.wait_for()
            totals = client.map(total, blocks, pure=False)
            n_spilled, before = client.run(_settled, totals[-1].key)[worker.address]
            gate.open()
            assert client.gather(totals) == [n * 2 * MIB / 8 for n in range(16)]
            assert store.io()["disk-read", "count"] - before <= n_spilled
            busy.result()
        assert 4 < n_spilled < 12
        dask_gpurt.disable(client)
        assert type(worker.state.ready) is HeapSet


async def _settled(last: str, dask_worker: Any) -> tuple[int, float]:
    """Return the spilled values and the reads so far, once all tasks are there and none moves."""
    store = dask_worker.data
    while last not in dask_worker.state.tasks or store.residency.is_writing or _is_reading(store):
        await asyncio.sleep(0)
    return len(store.spilled()), store.io().get(("disk-read", "count"), 0)


def _is_reading(store: Any) -> bool:
    return any(level.reserved_nbytes for level in store.residency.levels)
