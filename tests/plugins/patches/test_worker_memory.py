"""Contract tests of the names of distributed that managed memory uses."""

from __future__ import annotations

import asyncio
import inspect
from collections import UserDict
from types import SimpleNamespace
from weakref import ref

import pytest
from distributed import Client, LocalCluster, Worker, get_client
from distributed.core import Status, _expects_comm
from distributed.spill import SpillBuffer
from distributed.worker_memory import WorkerMemoryManager
from distributed.worker_state_machine import (
    BaseWorker,
    ExecuteSuccessEvent,
    TaskState,
    WorkerState,
)

from dask_gpurt.plugins.patches import worker_memory
from tests.failure.gates import DEADLINE_S, Gate, pass_gate


class Used:
    """A value, and the tasks that depend on it."""

    def __init__(self, dependents):
        self.dependents = dependents


class User:
    def __init__(self, state, number):
        self.key, self.state, self.priority = state, state, (number,)


def test_task_runs_through_the_instance_method():
    assert list(inspect.signature(Worker.execute).parameters) == ["self", "key", "stimulus_id"]
    assert "self.execute," in inspect.getsource(BaseWorker.handle_stimulus)
    # `execute` reads from the store before it runs the task.
    source = inspect.getsource(Worker.execute)
    assert source.index("self.data[dkey]") < source.index("run_in_executor")


def test_task_gets_its_client_through_the_instance_method():
    assert list(inspect.signature(Worker._get_client).parameters) == ["self", "timeout"]
    assert "worker._get_client(timeout=timeout)" in inspect.getsource(get_client)
    # The task's key is known in its thread.
    options = {"n_workers": 1, "threads_per_worker": 1, "dashboard_address": ":0"}
    with (
        LocalCluster(processes=False, **options) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        task = client.submit(lambda: worker_memory.thread_state.key, key="task")
        assert task.result(DEADLINE_S) == "task"


def test_get_data_handler_takes_the_comm():
    assert list(inspect.signature(Worker.get_data).parameters) == [
        "self",
        "comm",
        "keys",
        "who",
        "serializers",
    ]
    assert _expects_comm(Worker.get_data.__get__(object()))


@pytest.mark.parametrize("is_paused", [False, True])
@pytest.mark.parametrize("peer", ["tcp://127.0.0.1:7", "tcp://10.1.2.3:7"])
def test_busy_worker_refuses_to_send(client, is_paused, peer):
    """Our answer is the one of Dask itself."""

    class Written(Exception):
        pass

    class Comm:
        peer_address = peer

        async def write(self, *args, **kwargs):
            raise Written

    async def least_count(dask_worker):
        dask_worker.transfer_outgoing_count_limit = 2
        if is_paused:
            dask_worker.status = Status.paused
        found = []
        for count in range(5):
            dask_worker.transfer_outgoing_count = 0
            said = worker_memory.would_answer_busy(dask_worker, Comm(), count)
            dask_worker.transfer_outgoing_count = count
            assert worker_memory.would_answer_busy(dask_worker, Comm(), 0) == said
            try:
                is_busy = await dask_worker.get_data(Comm(), []) == {"status": "busy"}
            except Written:
                is_busy = False
            assert is_busy == said, count
            found.append(said)
        return found.index(True)

    is_near = peer.startswith("tcp://127.0.0.1")
    expected = 1 if is_paused else 4 if is_near else 2
    assert set(client.run(least_count).values()) == {expected}


def test_value_is_read_for_sending_in_one_place():
    assert "self.data[k] for k in keys if k in self.data" in inspect.getsource(Worker.get_data)


def test_memory_monitor_spills_through_the_instance_method():
    assert "await self._maybe_spill(worker, memory)" in inspect.getsource(
        WorkerMemoryManager.memory_monitor
    )
    assert list(inspect.signature(WorkerMemoryManager._maybe_spill).parameters) == [
        "self",
        "worker",
        "memory",
    ]


def test_worker_refers_to_its_store_in_two_places():
    assert "self.memory_manager.data" in inspect.getsource(Worker.data.fget)
    assert "data" in inspect.signature(WorkerState.__init__).parameters


def test_dask_store_tells_its_contents(tmp_path):
    stock = SpillBuffer(str(tmp_path), target=1000)
    stock["small"] = b"x" * 100
    stock["large"] = b"x" * 2000
    objects, cold = worker_memory.take_over(stock)
    assert objects == {"small": b"x" * 100}
    assert set(cold) == {"large"}
    assert cold["large"] >= 2000
    # It no longer has the values from memory; those on disk can still be read from it.
    assert list(stock) == ["large"]
    assert stock.slow["large"] == b"x" * 2000


def test_dask_store_tells_its_settings(tmp_path):
    stock = SpillBuffer(str(tmp_path), target=1000, max_spill=2000)
    disk = stock._slow_uncached
    assert (stock.n, disk.max_weight, disk.d.directory) == (1000, 2000, str(tmp_path))
    source = inspect.getsource(WorkerMemoryManager.__init__)
    for said in ('worker.local_directory, "storage"', "sys.maxsize", "max_spill=self.max_spill"):
        assert said in source


def test_other_kind_of_store_is_emptied():
    other = UserDict({"x": 1, "y": 2})
    objects, cold = worker_memory.take_over(other)
    assert objects == {"x": 1, "y": 2}
    assert cold == {} == worker_memory.on_disk(other)
    assert not other


def test_worker_tasks_have_the_expected_states_and_fields():
    assert {"dependents", "dependencies", "priority", "state"} <= set(TaskState.__annotations__)
    source = inspect.getsource(WorkerState)
    for state in ("waiting", "ready", "constrained"):
        assert f'"{state}"' in source
    assert {"nbytes", "value"} <= set(inspect.signature(ExecuteSuccessEvent).parameters)


def test_users_of_a_value_are_found():
    """A task that left the queue is known by its key only until it starts."""
    states = ["waiting", "ready", "constrained", "executing", "memory"]
    users = [User(state, priority) for priority, state in enumerate(reversed(states))]
    value = Used(set(users))
    worker = SimpleNamespace(state=SimpleNamespace(tasks={"x": value}))
    dequeued = {"executing"}
    first_users = worker_memory.FirstUsers(worker, dequeued)
    for expected in ("executing", "constrained", "ready", "waiting", None):
        first = first_users.of("x")
        assert (first and first.key) == expected
        # As when it begins: it is neither queued nor about to begin.
        if first is not None:
            first.state = "executing"
        dequeued.clear()
    assert first_users.of("y") is None


def test_an_earlier_user_that_comes_later_is_first():
    value = Used({User("ready", 2)})
    first_users = worker_memory.FirstUsers(
        SimpleNamespace(state=SimpleNamespace(tasks={"x": value}))
    )
    assert first_users.of("x").priority == (2,)
    value.dependents.add(User("waiting", 1))
    assert first_users.of("x").priority == (1,)


def test_the_first_user_is_found_without_a_pass_over_all():
    asked = []

    class Watched(User):
        def __getattribute__(self, name):
            if name == "state":
                asked.append(self)
            return super().__getattribute__(name)

    value = Used({Watched("ready", number) for number in range(1_000)})
    first_users = worker_memory.FirstUsers(
        SimpleNamespace(state=SimpleNamespace(tasks={"x": value}))
    )
    for _ in range(100):
        assert first_users.of("x").priority == (0,)
    assert len(asked) <= 1_000 + 100


def test_what_is_remembered_keeps_no_task_alive():
    tasks = {"x": Used(set())}
    user = User("ready", 1)
    user.dependencies = {tasks["x"]}
    tasks["x"].dependents.add(user)
    first_users = worker_memory.FirstUsers(SimpleNamespace(state=SimpleNamespace(tasks=tasks)))
    assert first_users.of("x") is user
    value, _ = ref(tasks["x"]), tasks["x"].dependents.clear()
    del user, tasks["x"]
    assert value() is None and not first_users._known


def test_freed_value_is_reported_to_the_scheduler():
    released = inspect.getsource(WorkerState._transition_memory_released)
    assert "ReleaseWorkerDataMsg" in released
    assert '"released"' in inspect.getsource(WorkerState._handle_free_keys)


def test_scheduler_tells_the_next_use_seen_from_the_worker():
    """Tasks that wait for a peer rank behind as many own tasks as the peer runs first."""
    options = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": ":0"}
    with (
        LocalCluster(processes=False, **options) as cluster,
        Client(cluster, set_as_default=False) as client,
        Gate() as gate,
    ):
        here, there = (worker.address for worker in cluster.workers.values())
        value = client.submit(abs, -1, workers=[here], key="value")
        value.result(DEADLINE_S)

        def submit(function, *args, number, worker):
            return client.submit(function, *args, priority=-number, workers=[worker], pure=False)

        # Priorities, smallest first: the running task, the one behind it, the user of the value.
        running = submit(pass_gate, gate.path, number=1, worker=there)
        behind = submit(abs, -2, number=2, worker=there)
        use = submit(max, value, behind, number=3, worker=here)
        queue = [submit(pass_gate, gate.path, number=4 + n, worker=here) for n in range(3)]
        gate.wait_for(2)

        async def asked(of, dask_scheduler):
            tasks = dask_scheduler.tasks
            # Submissions and requests of a client use different connections.
            while not {future.key for future in [use, *queue]} <= tasks.keys():
                await asyncio.sleep(0)
            priorities = {future.key: tasks[future.key].priority for future in [use, *queue]}
            given = {task.state for task in tasks.values()} - {"memory", "waiting"}
            return worker_memory.next_uses(dask_scheduler, ["value"], of), priorities, given

        (seen_here,), priorities, given = client.run_on_scheduler(asked, here)
        assert given == {"processing"}, "tasks are not held back"
        assert seen_here == (0, *priorities[queue[1].key], *priorities[use.key])
        (seen_there,), _, _ = client.run_on_scheduler(asked, there)
        assert seen_there == (0, *priorities[use.key])
        gate.open()
        assert use.result(DEADLINE_S) == 2
        del running
