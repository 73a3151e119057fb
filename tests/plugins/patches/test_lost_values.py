"""Contract tests of the scheduler's handlers for lost values."""

from __future__ import annotations

import asyncio
import inspect

import pytest
from distributed import Client, LocalCluster, Scheduler
from distributed.client import FutureCancelledError, FutureState
from distributed.queues import QueueExtension
from distributed.scheduler import SchedulerState
from distributed.variable import VariableExtension

from dask_gpurt.plugins.patches.values.lost_values import LostValues


@pytest.fixture
def cluster():
    options = {"n_workers": 1, "threads_per_worker": 1, "dashboard_address": ":0"}
    with LocalCluster(processes=False, **options) as cluster:
        yield cluster


def parameters_of(function):
    return list(inspect.signature(function).parameters)


def test_handlers_accept_their_arguments():
    assert parameters_of(Scheduler.release_worker_data) == ["self", "key", "worker", "stimulus_id"]
    assert parameters_of(Scheduler.client_desires_keys) == ["self", "keys", "client"]
    assert {"key", "client"} < set(parameters_of(Scheduler.report_on_key))
    received = VariableExtension.future_received_confirm
    assert {"key", "client"} < set(parameters_of(received))
    # distributed awaits a handler if it is a coroutine function.
    assert inspect.iscoroutinefunction(received)
    assert inspect.iscoroutinefunction(LostValues._got_from_variable)
    assert {"key", "client"} < set(parameters_of(QueueExtension.future_release))
    assert not inspect.iscoroutinefunction(QueueExtension.future_release)


def test_handlers_are_restored(cluster):
    scheduler = cluster.scheduler
    before = dict(scheduler.stream_handlers)
    lost = LostValues(scheduler)
    replaced = {n for n, handler in scheduler.stream_handlers.items() if handler != before[n]}
    assert replaced == {
        "client-desires-keys",
        "queue-future-release",
        "release-worker-data",
        "report-key",
        "variable-future-received-confirm",
    }
    lost.uninstall()
    assert scheduler.stream_handlers == before


def test_transitions_run_before_they_are_reported():
    assert parameters_of(SchedulerState._transitions) == [
        "self",
        "recommendations",
        "client_msgs",
        "worker_msgs",
        "stimulus_id",
    ]
    source = inspect.getsource(Scheduler.transitions)
    assert "self._transitions(recommendations, client_msgs, worker_msgs, stimulus_id)" in source
    assert "self.send_all(client_msgs, worker_msgs)" in source


def test_cancelled_task_has_a_reason():
    state = FutureState("key")

    async def cancel():
        state.cancel(reason="a reason", msg="a message")

    asyncio.run(cancel())
    assert isinstance(state.exception, FutureCancelledError)
    assert "a reason" in str(state.exception)
    assert "a message" in str(state.exception)


def test_scattered_value_has_a_state_but_no_recipe(cluster):
    with Client(cluster, set_as_default=False) as client:
        scattered = client.scatter(1)
        made = client.submit(int)
        made.result()
        tasks = cluster.scheduler.tasks
        (holder,) = cluster.scheduler.workers.values()
        assert tasks[scattered.key].run_spec is None
        assert tasks[scattered.key].state == "memory"
        assert tasks[scattered.key].who_has == {holder}
        assert tasks[made.key].run_spec is not None
        assert tasks[made.key].has_lost_dependencies is False
