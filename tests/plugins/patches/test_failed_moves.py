"""Tasks whose inputs cannot be moved run where the inputs are, or fail with a clear error."""

from __future__ import annotations

import inspect
import threading

import dask
import pytest
from distributed import Client, LocalCluster, Scheduler, wait
from distributed.core import Status, error_message
from distributed.utils_test import async_poll_for, gen_cluster

from dask_gpurt.plugins.patches.values.failed_moves import FailedMoves
from dask_gpurt.plugins.placement.placer import Placement


class Unsendable:
    """Holds a lock, which cannot be pickled."""

    def __init__(self, value):
        self.value = value
        self.lock = threading.Lock()


def value_of(*values):
    return sum(one.value if isinstance(one, Unsendable) else one for one in values)


def parameters_of(function):
    return list(inspect.signature(function).parameters)


def test_handlers_accept_their_arguments():
    assert parameters_of(Scheduler.handle_task_erred) == ["self", "key", "stimulus_id", "msg"]
    reported = parameters_of(Scheduler.stimulus_task_erred)
    assert reported == ["self", "worker", "stimulus_id", "key", "run_id", "kwargs"]
    assert parameters_of(Scheduler._reschedule) == ["self", "key", "worker", "stimulus_id"]
    assert {"status", "exception", "exception_text"} < set(error_message(TypeError("no")))


@gen_cluster(nthreads=[])
async def test_the_handler_is_restored(s):
    stock = s.stream_handlers["task-erred"]
    patch = FailedMoves(s)
    assert s.stream_handlers["task-erred"] != stock
    patch.uninstall()
    assert s.stream_handlers["task-erred"] == stock


@pytest.fixture(params=["auto", "stock"])
def cluster(request):
    """Start two workers, and let no task be stolen, which would hide where it went first."""
    settings = {
        "gpurt.enabled": True,
        "gpurt.placement.policy": request.param,
        "distributed.scheduler.work-stealing": False,
    }
    options = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": ":0"}
    # Not `gen_cluster`: it validates workers, and stock Dask leaves them in an invalid state.
    with (
        dask.config.set(settings),
        LocalCluster(processes=False, protocol="tcp", **options) as cluster,
        Client(cluster) as client,
    ):
        yield client, *sorted(cluster.scheduler.workers)


def holders(client, future):
    return set(client.who_has([future])[future.key])


def test_a_task_runs_where_its_input_is(cluster):
    client, a, b = cluster
    made = client.submit(Unsendable, 3, workers=[a])
    # Stock Dask sends a task to the worker that the user prefers.
    done = client.submit(value_of, made, workers=[b], allow_other_workers=True)
    assert done.result() == 3
    assert holders(client, done) == {a}
    again = client.submit(value_of, made, 1, workers=[b], allow_other_workers=True)
    assert again.result() == 4
    assert holders(client, again) == {a}


def test_a_value_asked_for_with_a_stuck_one_can_be_moved(cluster):
    """Values of one worker are asked for in one message, which fails as a whole."""
    client, a, b = cluster
    lock = client.submit(Unsendable, 1, workers=[a], key="lock")
    number = client.submit(int, 2, workers=[a], key="number")
    other = client.submit(Unsendable, 4, workers=[b], key="other")
    wait([lock, number, other])
    both = client.submit(value_of, lock, number, workers=[b], allow_other_workers=True)
    assert both.result() == 3
    assert holders(client, both) == {a}
    apart = client.submit(value_of, number, other, workers=[a], allow_other_workers=True)
    assert apart.result() == 6
    assert holders(client, apart) == {b}


def test_a_task_that_can_run_nowhere_fails(cluster):
    client, a, b = cluster
    one = client.submit(Unsendable, 1, workers=[a], key="one")
    other = client.submit(Unsendable, 2, workers=[b], key="other")
    with pytest.raises(TypeError, match="cannot run on any worker: its input") as caught:
        client.submit(value_of, one, other, key="sum").result()
    assert "Return something that can be pickled" in str(caught.value)
    with pytest.raises(TypeError, match="'one' could not be moved"):
        client.submit(value_of, one, workers=[b], key="only there").result()
    # Workers go on.
    assert client.submit(value_of, one, key="here").result() == 1
    assert client.submit(value_of, other, key="there").result() == 2


def fail_moves(s, value, worker):
    """Report that a value did not reach a worker, as the worker does."""
    message = {"key": value.key, "worker": worker.address, "stimulus_id": "moved", "run_id": 0}
    s.stream_handlers["task-erred"](**message, **error_message(TypeError("no")))


# Without a memory limit, no monitor ends the pause.
@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 3, worker_kwargs={"memory_limit": 0})
async def test_a_paused_holder_does_not_block_the_queue(c, s, a, b, other):
    placement = Placement(s, "data-aware")
    value = await c.scatter(1, workers=[a.address], direct=False)
    (ts,) = s.tasks.values()
    fail_moves(s, ts, b)
    a.status = Status.paused
    await async_poll_for(lambda: s.workers[a.address] not in s.running, timeout=60)
    used = c.map(value_of, [value] * 30, range(30), key="used")
    unrelated = c.map(int, range(30), key="unrelated")
    assert await c.gather(unrelated) == list(range(30))
    assert await c.gather(used) == list(range(1, 31))
    placement.close()


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 3)
async def test_a_value_that_moves_is_stuck_no_longer(c, s, a, b, other):
    patch = FailedMoves(s)
    value = await c.scatter(1, workers=[a.address], direct=False)
    user = c.submit(value_of, value, workers=[a.address])
    await user
    (ts,) = [one for one in s.tasks.values() if one.key == value.key]
    user = s.tasks[user.key]
    fail_moves(s, ts, b)
    assert patch.workers(user) == {s.workers[a.address]}
    assert not patch.may_try(user, s.workers[b.address])
    assert patch.may_try(user, s.workers[other.address])
    await c.replicate([value], workers=[a.address, other.address], n=2)
    assert not patch.has_stuck_input(user)
    fail_moves(s, ts, b)
    assert patch.has_stuck_input(user)
    patch.workers_changed()
    assert not patch.has_stuck_input(user)
    patch.uninstall()
