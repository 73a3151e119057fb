"""Contracts with distributed's placement decisions, and the removal of the patches."""

from __future__ import annotations

import inspect
import re

import pytest
from distributed import Event, Scheduler
from distributed.scheduler import SchedulerState, WorkerState
from distributed.stealing import WorkStealing
from distributed.utils_test import async_poll_for, captured_logger, gen_cluster, inc

from dask_gpurt.plugins.placement.placer import Placement


def parameters(function):
    return list(inspect.signature(function).parameters)


def test_replaced_decisions_have_their_signatures():
    assert parameters(SchedulerState.decide_worker_non_rootish) == ["self", "ts"]
    assert parameters(SchedulerState.decide_worker_rootish_queuing_disabled) == ["self", "ts"]
    assert parameters(SchedulerState.decide_worker_rootish_queuing_enabled) == ["self"]
    assert parameters(SchedulerState._get_prefix_duration) == ["self", "prefix"]
    assert parameters(SchedulerState.valid_workers) == ["self", "ts"]


@gen_cluster(nthreads=[("127.0.0.1", 1)] * 3)
async def test_idle_workers_are_a_sorted_dict_by_address(s, a, b, c):
    """We use it as a plain dict in the order of becoming idle, and for the workers of a host."""
    assert isinstance(s.idle, dict)
    assert dict.items(s.idle) == {one.address: s.workers[one.address] for one in (a, b, c)}.items()
    last = max(one.address for one in (a, b, c))
    assert list(s.idle.irange("tcp://127.0.0.1:", last, (True, False))) == sorted(s.idle)[:-1]


def test_three_decisions_place_every_runnable_task():
    """No other function of the scheduler chooses a worker for a task."""
    source = inspect.getsource(SchedulerState)
    callers = re.findall(r"def (_transition_\w+)|self\.(decide_worker_\w+)\(", source)
    found, current = {}, None
    for transition, decision in callers:
        current = transition or current
        if decision:
            found.setdefault(current, set()).add(decision)
    assert found == {
        "_transition_no_worker_processing": {"decide_worker_non_rootish"},
        "_transition_waiting_processing": {
            "decide_worker_non_rootish",
            "decide_worker_rootish_queuing_disabled",
            "decide_worker_rootish_queuing_enabled",
        },
        "_transition_queued_processing": {"decide_worker_rootish_queuing_enabled"},
    }


def test_free_slots_are_filled_as_in_dask():
    """The patch copies this function, except that a task may stay in the queue."""
    assert parameters(Scheduler.stimulus_queue_slots_maybe_opened) == ["self", "stimulus_id"]
    source = inspect.getsource(Scheduler.stimulus_queue_slots_maybe_opened)
    code = [line.strip() for line in source.split('"""')[2].splitlines()]
    assert [
        line for line in code if line and not line.startswith(("#", "assert", "if self.val"))
    ] == [
        "if not self.queued:",
        "return",
        "slots_available = sum(",
        "_task_slots_available(ws, self.WORKER_SATURATION)",
        "for ws in self.idle_task_count",
        ")",
        "if slots_available == 0:",
        "return",
        "for _ in range(slots_available):",
        "if not self.queued:",
        "return",
        "qts = self.queued.peek()",
        'self.transitions({qts.key: "processing"}, stimulus_id)',
    ]


def test_transitions_are_looked_up_on_the_instance():
    table = SchedulerState._TRANSITIONS_TABLE
    for way in [("waiting", "processing"), ("queued", "processing")]:
        assert parameters(table[way])[:3] == ["self", "key", "stimulus_id"]
    assert "self._TRANSITIONS_TABLE" in inspect.getsource(SchedulerState._transition)


def test_stealing_asks_for_a_thief_and_accepts_none():
    assert parameters(WorkStealing._get_thief) == [
        "self",
        "scheduler",
        "ts",
        "potential_thieves",
        "occupancies",
    ]
    assert parameters(WorkStealing._combined_occupancy) == ["self", "ws", "occupancies"]
    source = inspect.getsource(WorkStealing.balance)
    assert re.search(r"if not \(\s*thief := self\._get_thief\(.*?\)\s*\):\s*continue", source, re.S)


@gen_cluster(client=True, nthreads=[("", 2)] * 6)
async def test_dask_chooses_the_least_busy_worker(c, s, *workers):
    """The fast path relies on this to skip a thousand other workers."""
    asked = []

    def load(ws):
        return len(ws.processing) / ws.nthreads

    class Spy(Placement):
        def place_root(self, ts, found):
            stock = SchedulerState.decide_worker_rootish_queuing_enabled(s)
            asked.append((load(found), load(stock)))
            return found

    Spy(s, "data-aware")
    gate = Event()
    futures = c.map(lambda i: gate.wait(), range(60))
    await async_poll_for(lambda: s.queued, timeout=60)
    assert len(asked) >= 12
    assert all(found == stock for found, stock in asked)
    assert {found for found, _ in asked} > {0}
    await gate.set()
    await c.gather(futures)


def test_end_of_a_task_reports_its_duration_and_worker():
    way = SchedulerState._TRANSITIONS_TABLE["processing", "memory"]
    assert {"worker", "startstops"} <= set(parameters(way))


def test_heartbeats_bring_the_rates_of_pairs():
    assert {"address", "metrics"} <= set(parameters(Scheduler.heartbeat_worker))
    source = inspect.getsource(Scheduler.heartbeat_worker)
    assert 'metrics["bandwidth"]["workers"]' in source


def test_worker_and_task_attributes_exist():
    slots = {"task_prefix_count", "needs_what", "memory_limit", "long_running", "processing"}
    assert slots <= set(WorkerState.__slots__)


REPLACED = [
    "decide_worker_non_rootish",
    "decide_worker_rootish_queuing_disabled",
    "decide_worker_rootish_queuing_enabled",
    "stimulus_queue_slots_maybe_opened",
    "_TRANSITIONS_TABLE",
]


@gen_cluster(nthreads=[("", 1)] * 2)
async def test_removal_restores_dask(s, a, b):
    before = vars(s).copy(), dict(s.handlers), dict(vars(s.extensions["stealing"]))
    placement = Placement(s, "data-aware")
    assert all(name in vars(s) for name in REPLACED)
    assert {"_get_thief", "_combined_occupancy"} <= set(vars(s.extensions["stealing"]))
    placement.close()
    after = vars(s).copy(), dict(s.handlers), dict(vars(s.extensions["stealing"]))
    assert after == before


@gen_cluster(nthreads=[("", 1)] * 2, config={"distributed.scheduler.work-stealing": False})
async def test_scheduler_without_stealing_is_supported(s, a, b):
    placement = Placement(s, "data-aware")
    placement.close()
    assert not any(name in vars(s) for name in REPLACED)


@gen_cluster(nthreads=[("", 1)] * 2)
async def test_dask_balances_on_request_when_stealing_is_enabled(s, a, b):
    swap, looked = Placement(s, "data-aware")._swap, []
    stealing = s.extensions["stealing"]
    assert callable(stealing.balance)
    stealing.balance = lambda: looked.append(s)
    swap.balance()
    assert looked == [s]
    await stealing.stop()
    swap.balance()
    assert looked == [s]


@gen_cluster(client=True, nthreads=[("", 1)] * 2)
async def test_each_replaced_decision_is_asked_for(c, s, a, b):
    """This includes the decision that Dask makes without naming the task."""
    asked = []

    class Spy(Placement):
        def place(self, ts, stock):
            asked.append(("place", ts.key))
            return super().place(ts, stock)

        def place_root(self, ts, stock):
            asked.append(("root", ts.key))
            return super().place_root(ts, stock)

    Spy(s, "data-aware")
    roots = c.map(inc, range(20), key=[f"root-{i}" for i in range(20)])
    last = c.submit(sum, roots, key="last")
    assert await last == sum(range(1, 21))
    kinds = {key: kind for kind, key in asked}
    # Some tasks waited in the queue first; the decision comes when they leave it.
    assert {kinds[f"root-{i}"] for i in range(20)} == {"root"}
    assert kinds["last"] == "place"


@gen_cluster(
    client=True, nthreads=[("", 1)] * 2, config={"distributed.scheduler.worker-saturation": "inf"}
)
async def test_root_tasks_are_placed_without_queueing(c, s, a, b):
    placement = Placement(s, "data-aware")
    roots = c.map(inc, range(20))
    assert await c.submit(sum, roots) == sum(range(1, 21))
    decisions = placement.summary()["decisions"]
    assert decisions["stock"] + decisions["siblings"] >= 20


@gen_cluster(client=True, nthreads=[("", 1)] * 2)
async def test_unqueueable_root_task_gets_a_worker(c, s, a, b):
    """Root tasks of shuffles cannot be queued."""

    class Never(Placement):
        def place_root(self, ts, stock):
            return None

    Never(s, "data-aware")
    await c.submit(inc, 1, key="x")
    ts = s.tasks["x"]
    ts._queueable = False
    assert s.decide_worker_rootish_queuing_disabled(ts) in s.workers.values()


@gen_cluster(client=True, nthreads=[("", 1)] * 2)
async def test_rates_arrive_with_heartbeats(c, s, a, b):
    placement = Placement(s, "data-aware")
    a.bandwidth_workers[b.address] = (3e9, 3)
    before = placement._links(b.address, a.address).bandwidth_nbytes_per_s
    await a.heartbeat()
    for _ in range(10):
        placement.observe(a.address, {b.address: (1e9, 1)})
    after = placement._links(b.address, a.address).bandwidth_nbytes_per_s
    assert before < after == pytest.approx(1e9, rel=0.1)


@pytest.mark.parametrize("is_wrapped", [False, True])
@gen_cluster(client=True, nthreads=[("", 1)])
async def test_a_later_handler_of_heartbeats_stays(c, s, a, is_wrapped):
    stock, heard = s.handlers["heartbeat_worker"], []
    placement = Placement(s, "data-aware")
    ours = s.handlers["heartbeat_worker"]

    def theirs(**message):
        heard.append(message["address"])
        return ours(**message)

    if is_wrapped:
        s.handlers["heartbeat_worker"] = theirs
    placement.close()
    assert s.handlers["heartbeat_worker"] is (theirs if is_wrapped else stock)
    await a.heartbeat()
    assert heard == [a.address] * is_wrapped


NO_STEALING_BY_ITSELF = {"distributed.scheduler.work-stealing-interval": "1 hour"}


@gen_cluster(client=True, nthreads=[("", 1)] * 2, config=NO_STEALING_BY_ITSELF)
async def test_stealing_asks_placement(c, s, a, b):
    asked = []

    class Never(Placement):
        def choose_thief(self, ts, stock, thieves, occupancy_s):
            assert stock in thieves
            assert occupancy_s(ts.processing_on) > 0
            asked.append(ts.key)
            return None

    placement = Never(s, "data-aware")
    gate = Event()
    keys = [f"waits-{i}" for i in range(10)]
    only_a = {"workers": [a.address], "allow_other_workers": True}
    futures = c.map(lambda i: gate.wait(), range(10), key=keys, **only_a)
    await async_poll_for(lambda: len(s.workers[a.address].processing) == 10, timeout=60)
    stealing = s.extensions["stealing"]
    stealing.balance()
    assert asked
    assert not stealing.in_flight
    placement.close()
    stealing.balance()
    assert stealing.in_flight
    await gate.set()
    await c.gather(futures)


@gen_cluster(client=True, nthreads=[("", 1)] * 2)
async def test_placement_error_is_logged_once_and_dask_decides(c, s, a, b):
    class Broken(Placement):
        def place(self, ts, stock):
            raise ZeroDivisionError("in place")

        def place_root(self, ts, stock):
            raise ZeroDivisionError("in place_root")

        def observe(self, address, rates):
            raise ZeroDivisionError("in observe")

        def ended(self, ts, address, seconds):
            raise ZeroDivisionError("in ended")

        def slowness(self, ws):
            raise ZeroDivisionError("in slowness")

    with captured_logger("dask_gpurt") as logged:
        placement = Broken(s, "data-aware")
        assert await c.submit(sum, c.map(inc, range(20))) == sum(range(1, 21))
        await a.heartbeat()
    assert logged.getvalue().count("placement failed") == 1
    assert placement.summary()["failed"] >= 22


@gen_cluster(client=True, nthreads=[("", 4)] * 2)
async def test_queued_task_is_decided_once(c, s, a, b):
    asked = []
    is_choosy = True

    class Choosy(Placement):
        def place_root(self, ts, stock):
            asked.append(ts.key)
            return None if is_choosy else stock

    s.validate = False  # Dask queues tasks only if all workers are busy
    Choosy(s, "data-aware")
    futures = c.map(inc, range(40))
    await async_poll_for(lambda: len(s.queued) == 40, timeout=60)
    asked.clear()
    s.stimulus_queue_slots_maybe_opened(stimulus_id="test")
    assert asked == [s.queued.peek().key]
    is_choosy = False
    s.stimulus_queue_slots_maybe_opened(stimulus_id="test")
    assert await c.gather(futures) == list(range(1, 41))
