"""Contract tests of the scheduler's replication and of the policy that removes replicas."""

from __future__ import annotations

import inspect
import zlib

import numpy as np
import pytest
from distributed import Scheduler, Worker
from distributed.active_memory_manager import ActiveMemoryManagerExtension, ReduceReplicas
from distributed.protocol.serialize import serialize_and_split
from distributed.utils_test import gen_cluster
from distributed.worker_state_machine import WorkerState

from dask_gpurt.errors import ProtocolError
from dask_gpurt.plugins.patches.values.replicate import (
    KeptReplicas,
    Received,
    ReplicateSwap,
    serialize,
    stretches_of,
)

#: Nothing runs by itself: tests decide when the policies run.
CONFIG = {"distributed.scheduler.active-memory-manager.start": False}


def parameters_of(function):
    return list(inspect.signature(function).parameters)


def test_names_are_as_expected():
    assert parameters_of(Scheduler.replicate) == [
        "self",
        "keys",
        "n",
        "workers",
        "branching_factor",
        "delete",
        "stimulus_id",
    ]
    names = ["self", "data", "workers", "client", "broadcast", "timeout"]
    assert parameters_of(Scheduler.scatter) == names
    assert parameters_of(Scheduler.update_data) == ["self", "who_has", "nbytes", "client"]
    assert parameters_of(Scheduler.add_replica) == ["self", "ts", "ws"]
    assert parameters_of(Scheduler.workers_list) == ["self", "workers"]
    assert parameters_of(Worker.update_data)[:2] == ["self", "data"]
    assert {"tasks", "in_flight_tasks"} <= {*WorkerState.__annotations__}
    assert parameters_of(ActiveMemoryManagerExtension.add_policy) == ["self", "policy"]


@gen_cluster(nthreads=[], config=CONFIG)
async def test_stock_functions_are_restored(s):
    stock = {name: (getattr(s, name), s.handlers[name]) for name in ("replicate", "scatter")}
    swap = ReplicateSwap(s, broadcast=None, scatter=None, keep=None)
    for name, (method, _) in stock.items():
        assert getattr(s, name) != method and s.handlers[name] is getattr(s, name)
    swap.uninstall()
    assert stock == {name: (getattr(s, name), s.handlers[name]) for name in stock}
    (policy,) = s.extensions["amm"].policies
    kept = KeptReplicas(s)
    (ours,) = s.extensions["amm"].policies
    assert isinstance(ours, ReduceReplicas) and ours is not policy
    kept.uninstall()
    assert s.extensions["amm"].policies == {policy}


@gen_cluster(client=True, nthreads=[("", 1)] * 3, config=CONFIG)
async def test_replicas_stay_as_long_as_a_client_has_a_future(c, s, *workers):
    manager = s.extensions["amm"]
    kept = KeptReplicas(s)
    ours, other = await c.scatter([1, 2], broadcast=True)
    kept.keep([s.tasks[ours.key]])
    manager.run_once()
    while len(s.tasks[other.key].who_has) > 1:
        await c.run(lambda: None)
    assert len(s.tasks[ours.key].who_has) == 3
    kept.uninstall()
    manager.run_once()
    while len(s.tasks[ours.key].who_has) > 1:
        await c.run(lambda: None)


def received(header, stretches):
    lengths = [one.nbytes for one in stretches]
    there = Received(header, lengths, lambda nbytes: np.empty(nbytes, np.uint8))
    for one, stretch in zip(there.stretches, stretches, strict=True):
        one[...] = stretch
    return there


@pytest.mark.parametrize(
    "value", [np.arange(12.0).reshape(3, 4), {"a": [1, np.ones(3)]}, "text", np.zeros(0)]
)
def test_values_are_taken_apart_and_put_together(value):
    header, stretches = serialize(value)
    found = received(header, stretches).value()
    assert str(found) == str(value) and type(found) is type(value)
    if isinstance(found, np.ndarray) and found.size:
        found[...] = 0  # it may be changed


def test_frames_in_parts_are_whole_again_without_a_copy():
    value = np.arange(4096.0)
    header, frames = serialize_and_split(value, size=1000)
    stretches = stretches_of(frames)
    assert len(stretches) > 10
    there = received(header, stretches)
    found = there.value()
    np.testing.assert_array_equal(found, value)
    assert np.shares_memory(found, there.stretches[-1])
    with pytest.raises(ProtocolError, match="stretches"):
        received(header, stretches[:-1])


def test_compressed_frames_are_decompressed():
    value = np.zeros(1 << 20)
    (frame, *_) = serialize(value)[1]
    header = {**serialize(value)[0], "compression": ("zlib",)}
    small = np.frombuffer(zlib.compress(frame.tobytes()), np.uint8)
    np.testing.assert_array_equal(received(header, [small]).value(), value)
