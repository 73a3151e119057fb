"""Contract tests of the private parts of dask and distributed that `patches.p2p` uses."""

from __future__ import annotations

import inspect

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from dask._task_spec import Task
from dask.dataframe.dask_expr._merge import HashJoinP2P
from dask.dataframe.dask_expr._shuffle import P2PShuffle
from dask.utils import get_default_shuffle_method
from distributed import Event
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.shuffle._core import (
    P2PBarrierTask,
    ShuffleRun,
    barrier_key,
    handle_transfer_errors,
    id_from_key,
    p2p_barrier,
)
from distributed.shuffle._scheduler_plugin import ShuffleSchedulerPlugin
from distributed.shuffle._worker_plugin import ShuffleWorkerPlugin, _ShuffleRunManager
from distributed.utils_test import async_poll_for, captured_logger, gen_cluster

import dask_gpurt
from dask_gpurt.plugins.patches import p2p
from dask_gpurt.plugins.shuffle.array_run import ArraySpec
from dask_gpurt.plugins.shuffle.exchange_run import ExchangeRun
from dask_gpurt.plugins.shuffle.frame_run import ADAPTERS, FrameSpec, frame_kind
from tests.integration.comparing import collection
from tests.integration.held_exchanges import all_say, held, shuffled


def test_installed_distributed_is_supported():
    assert p2p.unsupported_reason() is None


@pytest.mark.parametrize(
    ("version", "supported"),
    [
        ("2026.7.0", False),
        ("2026.7.1", True),
        ("2026.8.0", True),
        ("2026.8.0+12.gabc", True),
        ("2026.8.3", True),
        ("2026.9.0", False),
        ("2027.1.0", False),
    ],
)
def test_version_gate_refuses_other_versions(version, supported):
    reason = p2p.unsupported_reason(version)
    assert (reason is None) == supported
    assert supported or version in reason


def parameters(function):
    return list(inspect.signature(function).parameters)


def test_scheduler_plugin_has_the_replaced_methods():
    assert parameters(ShuffleSchedulerPlugin._retrieve_spec) == ["self", "shuffle_id"]
    assert parameters(ShuffleSchedulerPlugin._set_restriction) == ["self", "ts", "worker"]
    assert "_retrieve_spec" in inspect.getsource(ShuffleSchedulerPlugin._create)
    assert "create_new_run" in inspect.getsource(ShuffleSchedulerPlugin._create)
    assert parameters(ShuffleSchedulerPlugin.get) == ["self", "id", "worker"]
    of_creating = parameters(ShuffleSchedulerPlugin.get_or_create)
    assert of_creating == ["self", "shuffle_id", "key", "worker"]
    # These run a task again instead of failing it, on a worker without the runtime.
    source = inspect.getsource(handle_transfer_errors)
    assert "except ShuffleClosedError:\n        raise Reschedule()" in source
    assert "except Reschedule as e:\n        raise e" in inspect.getsource(p2p_barrier)
    assert "raise exc.with_traceback(tb)" in inspect.getsource(_ShuffleRunManager._fetch)
    # These give up a run, when a worker leaves and in `SpecSwap`.
    assert parameters(ShuffleSchedulerPlugin._fail_on_workers) == ["self", "shuffle", "message"]
    assert parameters(ShuffleSchedulerPlugin._clean_on_scheduler) == ["self", "id", "stimulus_id"]
    of_restart = parameters(ShuffleSchedulerPlugin._restart_shuffle)
    assert of_restart == ["self", "id", "scheduler", "stimulus_id"]


def test_worker_plugin_has_the_replaced_methods():
    assert parameters(ShuffleWorkerPlugin.get_or_create_shuffle) == ["self", "shuffle_id"]
    assert parameters(ShuffleWorkerPlugin.get_shuffle_run) == ["self", "shuffle_id", "run_id"]
    of_barrier = parameters(ShuffleWorkerPlugin.shuffle_inputs_done)
    assert of_barrier == ["self", "shuffle_id", "run_id"]
    assert {"_active_runs", "closed"} <= set(_ShuffleRunManager.__annotations__)


def test_run_has_all_attributes_that_distributed_uses():
    """Check all attributes of a run that the control plane uses, found in its source."""
    import re

    source = inspect.getsource(_ShuffleRunManager) + inspect.getsource(ShuffleWorkerPlugin)
    used = set(re.findall(r"shuffle_run\.(\w+)", source)) - {"run_spec"}
    assert {"add_partition", "barrier", "close", "fail", "receive", "inputs_done"} <= used
    made = inspect.getsource(ExchangeRun.__init__)
    for name in used:
        assert hasattr(ExchangeRun, name) or f"self.{name} =" in made or f"self.{name}:" in made


def test_methods_have_the_parameters_of_stock():
    for name in ("add_partition", "barrier", "receive", "get_output_partition", "fail"):
        stock = parameters(getattr(ShuffleRun, name))
        ours = parameters(getattr(ExchangeRun, name))
        assert ours[: len(stock)] == stock or "kwargs" in ours


def test_spec_has_every_field_of_dask():
    stock = p2p.DataFrameShuffleSpec(
        id="x",
        disk=True,
        npartitions=4,
        column="c",
        meta=pd.DataFrame({"c": [1]}),
        parts_out=4,
        drop_column=True,
    )
    ours = FrameSpec.replacing(stock, frame_kind(stock.meta), settings=None, read_order=())
    for field in stock.__dataclass_fields__:
        assert getattr(ours, field) is getattr(stock, field)
    assert list(ours.output_partitions) == [0, 1, 2, 3]
    assert frame_kind(stock.meta) in ADAPTERS


def test_runs_are_made_with_the_names_of_dask():
    """`SpecPickledOnce` stands between distributed and its own method."""
    for kind in (FrameSpec, ArraySpec):
        assert parameters(kind.create_new_run) == parameters(p2p.ShuffleSpec.create_new_run)


def test_array_spec_has_every_field_of_dask():
    stock = p2p.ArrayRechunkSpec(id="x", disk=True, new=((2, 2), (3,)), old=((4,), (1, 2)))
    ours = ArraySpec.replacing(stock, settings=None)
    for field in stock.__dataclass_fields__:
        assert getattr(ours, field) is getattr(stock, field)
    assert list(ours.output_partitions) == [(0, 0), (1, 0)]


@pytest.mark.parametrize("n_chunks", [(7,), (4, 4), (1, 8, 5), (4, 4, 4), (3, 2, 2, 5)], ids=str)
def test_output_chunks_are_spread_evenly(n_chunks):
    """Neighbours stay together, and workers differ by at most one chunk."""
    new = tuple((1,) * n for n in n_chunks)
    spec = ArraySpec(id="x", disk=True, new=new, old=new, settings=None, read_order=())
    workers = ["a", "b", "c"]
    picked = [spec.pick_worker(index, workers) for index in spec.output_partitions]
    assert picked == sorted(picked)
    counts = [picked.count(worker) for worker in workers]
    assert max(counts) - min(counts) <= 1


def test_join_takes_nested_lists():
    rows = [[np.ones((2, 1)), np.zeros((2, 3))], [np.ones((1, 1)), np.zeros((1, 3))]]
    joined = p2p.join_arrays(rows)
    assert joined.shape == (3, 4)
    assert joined.sum() == 3
    masked = p2p.join_arrays([[np.ma.masked_equal(row, 0) for row in line] for line in rows])
    assert masked.mask.sum() == 9


def graph_of(lazy):
    with dask.config.set({"dataframe.shuffle.method": "p2p"}):
        return lazy.optimize().__dask_graph__()


def test_partitions_read_by_plain_and_fused_tasks_are_found():
    frames = [pd.DataFrame({"a": np.arange(10), "b": 1.0}) for _ in range(3)]
    plain = graph_of(collection(frames).shuffle("a", npartitions=4))
    fused = graph_of(collection(frames).shuffle("a", npartitions=4)["b"] + 1)
    for graph in (plain, fused):
        barrier = next(t for t in graph.values() if "Barrier" in type(t).__name__)
        outputs = [t for t in graph.values() if barrier.key in getattr(t, "dependencies", ())]
        read = [p2p.partitions_read(task, barrier.spec.id) for task in outputs]
        assert sorted(read, key=min) == [{0}, {1}, {2}, {3}]
        assert p2p.partitions_read(outputs[0], "another") == set()


def test_partitions_read_by_a_merge_are_found():
    left = collection([pd.DataFrame({"a": np.arange(10), "b": 1.0}) for _ in range(3)])
    right = collection([pd.DataFrame({"a": np.arange(10), "c": 2.0}) for _ in range(3)])
    graph = graph_of(left.merge(right, on="a", shuffle_method="p2p", broadcast=False))
    barriers = [t for t in graph.values() if "Barrier" in type(t).__name__]
    assert len(barriers) == 2
    for barrier in barriers:
        outputs = [t for t in graph.values() if barrier.key in getattr(t, "dependencies", ())]
        read = [p2p.partitions_read(task, barrier.spec.id) for task in outputs]
        assert sorted(read, key=min) == [{i} for i in range(len(outputs))]


def test_partitions_read_by_a_rechunk_are_found():
    import dask.array as da

    lazy = da.ones((6, 4), chunks=(2, 4)).rechunk((6, 2), method="p2p")
    for one in (lazy, (lazy + 1).sum(axis=0, split_every=2)):
        (graph,) = dask.optimize(one)
        graph = graph.__dask_graph__().to_dict()
        barrier = next(t for t in graph.values() if "Barrier" in type(t).__name__)
        outputs = [t for t in graph.values() if barrier.key in getattr(t, "dependencies", ())]
        read = [p2p.partitions_read(task, barrier.spec.id) for task in outputs]
        assert sorted(read, key=min) == [{(0, 0)}, {(0, 1)}]
        assert p2p.partitions_read(outputs[0], "another") == set()


def test_other_tasks_read_no_partitions():
    assert p2p.partitions_read(Task("k", sum, [1]), "x") == set()
    assert p2p.partitions_read(None, "x") == set()


def test_replaced_handlers_exist(sides):
    def names(dask_scheduler):
        return sorted(name for name in dask_scheduler.handlers if name.startswith("shuffle_"))

    expected = ["shuffle_barrier", "shuffle_get", "shuffle_get_or_create", "shuffle_restrict_task"]
    assert sides.stock.run_on_scheduler(names) == expected

    def are_stock_s(dask_worker):
        handlers, stock = dask_worker.handlers, dask_worker.plugins["shuffle"]
        names = ("shuffle_inputs_done", "shuffle_receive")
        return [handlers[name] == getattr(stock, name) for name in names]

    assert all(map(all, sides.stock.run(are_stock_s).values()))
    assert not any(map(any, sides.enabled.run(are_stock_s).values()))


@gen_cluster(client=True, nthreads=[("", 1)] * 2)
async def test_a_worker_that_has_to_ask_again_logs_no_error(c, s, a, b):
    """A peer sends shards of a run that has failed, and the shuffle has yet to restart."""
    await dask_gpurt.enable(c)
    frame = pd.DataFrame({"k": np.arange(10), "x": 1.0})

    def input_of(number):
        Event("held").wait()
        return frame

    held = Event("held", client=c)
    lazy = dd.from_map(input_of, range(2), meta=frame).shuffle("k")
    computed = c.compute(lazy)
    await async_poll_for(lambda: any("barrier" in str(key) for key in s.tasks), timeout=60)
    (shuffle_id,) = filter(None, map(id_from_key, s.tasks))
    with captured_logger("distributed.core") as log:
        answer = await b.rpc(a.address).shuffle_receive(shuffle_id=shuffle_id, run_id=1, data={})
    assert answer["status"] == "error"
    assert isinstance(p2p.clean_exception(**answer)[1], p2p.Reschedule)
    assert log.getvalue() == ""
    await held.set()
    assert len(await computed) == 20


@gen_cluster(client=True, nthreads=[("", 1)] * 2)
async def test_a_barrier_of_a_closed_run_logs_no_error(c, s, a, b):
    """A worker has left, so the scheduler has closed the run, and asks for its barrier."""
    await dask_gpurt.enable(c)

    async def closed(shuffle_id, run_id):
        raise p2p.ShuffleClosedError("has already been closed")

    a.plugins["shuffle"]._get_shuffle_run = closed
    with captured_logger("distributed.core") as log:
        with pytest.raises(p2p.ShuffleClosedError, match="has already been closed"):
            await b.rpc(a.address).shuffle_inputs_done(shuffle_id="x", run_id=1)
    assert log.getvalue() == ""


@gen_cluster(client=True, nthreads=[("", 1)] * 2)
async def test_a_worker_without_a_disk_answers_with_its_error(c, s, a, b):
    """Stock raises this error of the system at the sender, which takes it for a lost connection."""
    await dask_gpurt.enable(c)

    async def gave_up(shuffle_id, run_id):
        raise p2p.P2POutOfDiskError()

    a.plugins["shuffle"]._get_shuffle_run = gave_up
    with captured_logger("distributed.core") as log:
        answer = await b.rpc(a.address).shuffle_receive(shuffle_id="x", run_id=1, data={})
    assert isinstance(p2p.clean_exception(**answer)[1], p2p.P2POutOfDiskError)
    assert log.getvalue() == ""
    # And the scheduler would ask it again and again, and then blame the network.
    with pytest.raises(RuntimeError, match="ran out of available disk space") as raised:
        await b.rpc(a.address).shuffle_inputs_done(shuffle_id="x", run_id=1)
    assert not isinstance(raised.value, OSError)


def test_output_tasks_start_on_their_owner(sides):
    def count_moves(dask_scheduler):
        stock = dask_scheduler.handlers["shuffle_restrict_task"]
        dask_scheduler.extensions["moves"] = []

        def counted(**kwargs):
            dask_scheduler.extensions["moves"].append(kwargs["key"])
            return stock(**kwargs)

        dask_scheduler.handlers["shuffle_restrict_task"] = counted

    def moves(dask_scheduler):
        return len(dask_scheduler.extensions.pop("moves"))

    client = sides.enabled
    frames = [pd.DataFrame({"a": np.arange(100), "b": 1.0}) for _ in range(6)]
    client.run_on_scheduler(count_moves)
    with client.as_current(), dask.config.set({"dataframe.shuffle.method": "p2p"}):
        assert (collection(frames).shuffle("a")["b"] * 2).sum().compute() == 1200.0
    assert client.run_on_scheduler(moves) == 0


def test_output_partitions_are_known_in_the_order_of_their_tasks(sides, monkeypatch):
    found = []

    def read_order(scheduler, shuffle_id, stock=p2p.read_order):
        order = stock(scheduler, shuffle_id)
        readers = scheduler.tasks[barrier_key(shuffle_id)].dependents
        turns = {
            partition: task.priority
            for task in readers
            for partition in p2p.partitions_read(task.run_spec, shuffle_id)
        }
        found.append((order, turns))
        return order

    monkeypatch.setattr(p2p, "read_order", read_order)
    frames = [pd.DataFrame({"key": range(10), "x": range(10)}) for _ in range(10)]
    with dask.config.set({"dataframe.shuffle.method": "p2p"}):
        sides.enabled.compute(collection(frames).shuffle("key")).result()
    ((order, turns),) = found
    assert sorted(order) == list(range(10))
    assert order == sorted(order, key=turns.get)


def test_dask_picks_p2p_if_there_is_a_client(sides):
    """dask-cudf sets no method of its own, so the runtime gets its shuffles without a change."""
    frame = dd.from_pandas(pd.DataFrame({"key": range(10), "x": 1}), npartitions=4)
    with sides.enabled.as_current():
        assert get_default_shuffle_method() == "p2p"
        shuffled = frame.shuffle("key").optimize(fuse=False)
        joined = frame.merge(frame, on="key", broadcast=False).optimize(fuse=False)
        with dask.config.set({"dataframe.shuffle.method": "tasks"}):
            assert get_default_shuffle_method() == "tasks"
    assert any(isinstance(one, P2PShuffle) for one in shuffled.walk())
    assert any(isinstance(one, HashJoinP2P) for one in joined.walk())
    for lazy in (shuffled, joined):
        tasks = lazy.__dask_graph__().values()
        metas = [task.spec.meta for task in tasks if isinstance(task, P2PBarrierTask)]
        # The type of the meta tells the kind of frame.
        assert metas
        assert all(type(meta) is pd.DataFrame for meta in metas)


class StepsOfShuffles(SchedulerPlugin):
    """Records how far shuffles are after each transition of a task, without repetitions."""

    def __init__(self, scheduler):
        self._scheduler = scheduler
        self.seen = []

    def transition(self, *args, **kwargs):
        for step in p2p.how_far(self._scheduler).values():
            if step not in self.seen:
                self.seen.append(step)


@gen_cluster(client=True, nthreads=[("", 2)] * 2)
async def test_tasks_around_a_barrier_tell_how_far_it_is(c, s, a, b):
    steps = StepsOfShuffles(s)
    s.add_plugin(steps)
    async with held(c, s, shuffled(6), all_say):
        (held_at,) = p2p.how_far(s).values()
    sizes = {"inputs": 4, "outputs": 6}
    sent = {"inputs_done": 3, "outputs_done": 0, "is_delivered": False}
    assert held_at == {**sizes, **sent}
    moves = [(one["inputs_done"], one["is_delivered"], one["outputs_done"]) for one in steps.seen]
    assert moves == sorted(moves)
    assert (4, False, 0) in moves
    assert [move for move in moves if move[1]] == [(4, True, done) for done in range(7)]
    assert all(sizes.items() <= one.items() for one in steps.seen)
