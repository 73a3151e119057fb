"""Contract tests of the private parts of dask and distributed that a simulation uses."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import time

import pytest
from dask._task_spec import Task, TaskRef
from distributed import Scheduler, Worker, worker_state_machine
from distributed.worker_state_machine import BaseWorker, WorkerState

from dask_gpurt.plugins.patches import simulator as seams
from dask_gpurt.plugins.simulation.virtual_loop import VirtualLoop
from dask_gpurt.simulate.clock import VirtualClock
from dask_gpurt.simulate.workload import StableStr
from tests.simulate.flat import task, workload


@pytest.mark.parametrize("module", seams.CLOCKS)
def test_replaced_clocks_are_read_by_their_modules(module):
    for name in seams.CLOCKS[module]:
        assert getattr(importlib.import_module(module), name) is getattr(time, name)


def test_virtual_time_applies_only_inside_a_virtual_loop():
    scheduler = importlib.import_module("distributed.scheduler")

    async def times():
        await asyncio.sleep(7)
        return scheduler.time(), scheduler.monotonic()

    with seams.virtual_time():
        assert VirtualLoop(VirtualClock()).run(times()) == (8.0, 8.0)
        assert abs(scheduler.time() - time.time()) < 60
    assert scheduler.time is time.time
    assert worker_state_machine.TaskState is seams.TaskState


def test_worker_tasks_hash_like_their_keys():
    key = StableStr("x-1")
    with seams.virtual_time():
        state = WorkerState(address="tcp://10.0.0.0:1")
        event = seams.EVENTS["compute-task"].dummy(key, stimulus_id="s")
        state.handle_stimulus(event)
    (found,) = state.tasks.values()
    assert isinstance(found, seams.TaskState)
    assert hash(found) == hash(key)


def test_events_equal_those_that_workers_make_of_messages():
    source = inspect.getsource(Worker.__init__)
    for op, event in seams.EVENTS.items():
        if op == "remove-worker":
            assert event.__name__ in inspect.getsource(Worker._handle_remove_worker)
        else:
            assert f'"{op}": self._handle_remote_stimulus({event.__name__})' in source


def test_instructions_equal_those_that_workers_follow():
    source = inspect.getsource(BaseWorker.handle_stimulus)
    named = [seams.SendMessageToScheduler, seams.Execute, seams.GatherDep]
    assert source.count("isinstance(inst,") == 4
    for instruction in (*named, seams.RetryBusyWorkerLater):
        assert f"isinstance(inst, {instruction.__name__})" in source


def test_workers_wait_and_refuse_as_modelled():
    assert "asyncio.sleep(0.15)" in inspect.getsource(Worker.retry_busy_worker_later)
    assert "max_connections = max_connections * 2" in inspect.getsource(Worker.get_data)
    assert "total_bytes > 1_000_000" in inspect.getsource(Worker._update_metrics_received_data)


def test_scheduler_has_the_overridden_methods():
    assert "self.start_http_server(" in inspect.getsource(Scheduler.__init__)
    source = inspect.getsource(Scheduler.add_worker)
    assert "self.stream_comms[address] = BatchedSend(" in source
    assert source.rstrip().endswith("await self.handle_worker(comm, address)")
    assert "expr.__dask_graph__()" in inspect.getsource(
        importlib.import_module("distributed.scheduler")._materialize_graph
    )


def test_scheduler_hashes_follow_from_given_names():
    scheduler = importlib.import_module("distributed.scheduler")
    assert "self._hash = hash(key)" in inspect.getsource(scheduler.TaskState.__init__)
    assert "self._hash = hash(self.server_id)" in inspect.getsource(scheduler.WorkerState.__init__)


def test_a_graph_has_the_dependencies_of_its_tasks():
    model = workload(task("a-0", source=True), task("b-0", 0))
    message = seams.graph_message(model, [0, 1], [model.tasks[1].key])
    graph = seams._Graph({"a-0": ([], True), "b-0": (["a-0"], False)})
    tasks = graph.__dask_graph__()
    assert {type(one) for one in tasks.values()} == {Task}
    # Compare as lists: the package's keys and plain text have different hashes.
    assert [list(one.dependencies) for one in tasks.values()] == [[], ["a-0"]]
    assert [one.data_producer for one in tasks.values()] == [True, False]
    # The key itself, not a copy as plain text.
    assert TaskRef(model.tasks[0].key).key is model.tasks[0].key
    assert set(message) <= set(inspect.signature(Scheduler.update_graph).parameters) | {"op"}
    assert message["internal_priority"] == {one.key: n for n, one in enumerate(model.tasks)}
