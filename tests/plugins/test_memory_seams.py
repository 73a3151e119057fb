"""Contracts with what managed memory touches of distributed."""

from __future__ import annotations

import inspect
from collections import UserDict

from distributed import Worker
from distributed.core import _expects_comm
from distributed.spill import SpillBuffer
from distributed.worker_memory import WorkerMemoryManager
from distributed.worker_state_machine import (
    BaseWorker,
    ExecuteSuccessEvent,
    TaskState,
    WorkerState,
)

from dask_gpurt.plugins import memory_seams


def test_a_task_is_run_by_calling_the_instance():
    assert list(inspect.signature(Worker.execute).parameters) == ["self", "key", "stimulus_id"]
    assert "self.execute," in inspect.getsource(BaseWorker.handle_stimulus)
    # What `execute` reads from the store, it reads before it runs anything.
    source = inspect.getsource(Worker.execute)
    assert source.index("self.data[dkey]") < source.index("run_in_executor")


def test_values_are_sent_by_a_handler_that_takes_the_comm():
    assert list(inspect.signature(Worker.get_data).parameters) == [
        "self",
        "comm",
        "keys",
        "who",
        "serializers",
    ]
    assert _expects_comm(Worker.get_data.__get__(object()))


def test_a_value_is_read_for_sending_in_one_place():
    assert "self.data[k] for k in keys if k in self.data" in inspect.getsource(Worker.get_data)


def test_the_monitor_spills_by_calling_the_instance():
    assert "await self._maybe_spill(worker, memory)" in inspect.getsource(
        WorkerMemoryManager.memory_monitor
    )
    assert list(inspect.signature(WorkerMemoryManager._maybe_spill).parameters) == [
        "self",
        "worker",
        "memory",
    ]


def test_a_worker_has_its_store_in_two_places():
    assert "self.memory_manager.data" in inspect.getsource(Worker.data.fget)
    assert "data" in inspect.signature(WorkerState.__init__).parameters


def test_a_stock_store_says_what_it_has(tmp_path):
    stock = SpillBuffer(str(tmp_path), target=1000)
    stock["small"] = b"x" * 100
    stock["large"] = b"x" * 2000
    objects, cold = memory_seams.take_over(stock)
    assert objects == {"small": b"x" * 100}
    assert set(cold) == {"large"}
    assert cold["large"] >= 2000
    # What was in memory is not in it any more; what is on disk can still be read from it.
    assert list(stock) == ["large"]
    assert stock.slow["large"] == b"x" * 2000


def test_a_store_of_another_kind_is_emptied():
    other = UserDict({"x": 1, "y": 2})
    objects, cold = memory_seams.take_over(other)
    assert objects == {"x": 1, "y": 2}
    assert cold == {} == memory_seams.on_disk(other)
    assert not other


def test_states_and_fields_of_tasks_on_a_worker():
    assert {"dependents", "dependencies", "priority", "state"} <= set(TaskState.__annotations__)
    source = inspect.getsource(WorkerState)
    for state in ("waiting", "ready", "constrained"):
        assert f'"{state}"' in source
    assert "nbytes" in inspect.signature(ExecuteSuccessEvent).parameters


def test_a_value_that_is_freed_is_reported_to_the_scheduler():
    released = inspect.getsource(WorkerState._transition_memory_released)
    assert "ReleaseWorkerDataMsg" in released
    assert '"released"' in inspect.getsource(WorkerState._handle_free_keys)
