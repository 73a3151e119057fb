"""Placement on real clusters keeps results and restrictions, and moves fewer bytes."""

from __future__ import annotations

import contextlib
import json
import pathlib

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import Event, Worker, wait
from distributed.core import Status
from distributed.utils_test import BlockedGetData, async_poll_for, gen_cluster, inc

import dask_gpurt
from dask_gpurt.command import status
from dask_gpurt.errors import ConfigError
from dask_gpurt.placement.policy import DataAware, Snapshot
from dask_gpurt.plugins.placement.placer import Placement
from tests.conftest import two_clusters

N = 250


@pytest.fixture(scope="module")
def four():
    with dask.config.set({"gpurt.placement.policy": "data-aware"}), two_clusters(4) as clients:
        yield clients


def received_nbytes(client):
    def total(dask_worker):
        return sum(one["total"] for one in dask_worker.transfer_incoming_log)

    return sum(client.run(total).values())


def random_array(seed):
    return da.random.default_rng(seed).random((8 * N, 8 * N), chunks=(N, N))


GRAPHS = {
    "a + b": lambda: random_array(1) + random_array(2),
    "x.T + x": lambda: (lambda x: x.T + x)(random_array(1)),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_operands_of_a_join_are_made_on_one_worker(four, name):
    """Stock Dask moves about half of the bytes. The limit is lower, with some room for timing."""
    nbytes, results = {}, {}
    for side, client in (("stock", four.stock), ("enabled", four.enabled)):
        with client.as_current():
            before = received_nbytes(client)
            made = client.persist(GRAPHS[name]())
            wait(made)
            nbytes[side] = received_nbytes(client) - before
            results[side] = client.compute(made).result()
    np.testing.assert_array_equal(results["enabled"], results["stock"])
    assert nbytes["enabled"] <= 0.75 * nbytes["stock"]


def test_remembered_decision_can_be_explained(four):
    client = four.enabled
    with client.as_current():
        x = client.persist(random_array(3) @ random_array(4))
        wait(x)
    for key in x.__dask_keys__()[0]:
        said = dask_gpurt.explain(client, key)
        assert said["known"]
        assert said["worker"] in client.scheduler_info(n_workers=-1)["workers"]
        costs = [one["total_s"] for one in said["candidates"]]
        assert costs == sorted(costs)
    future = client.submit(lambda: 1, key="one-that-is-known")
    future.result()
    assert dask_gpurt.explain(client, future)["known"]
    unknown = dask_gpurt.explain(client, "never-heard-of")
    assert not unknown["known"]
    assert "there is no such task" in unknown["reason"]
    assert not dask_gpurt.explain(four.stock, future.key)["known"]


def test_explanation_of_a_collection_is_refused(four):
    with pytest.raises(TypeError, match=r"type Array; futures_of\(collection\)"):
        dask_gpurt.explain(four.enabled, random_array(3))


def test_explanation_takes_a_persisted_delayed(four):
    with four.enabled.as_current():
        one = dask.delayed(sum)([1, 2]).persist()
        wait(one)
    assert dask_gpurt.explain(four.enabled, one)["known"]


def test_status_counts_decisions(four):
    client = four.enabled
    assert client.submit(sum, client.map(abs, range(8))).result() == 28
    found = dask_gpurt.status(client)["placement"]
    assert found["policy"] == "data-aware"
    assert sum(found["decisions"].values()) > 0
    text = status.placement_as_text(found)
    assert f"{sum(found['decisions'].values()):,}" in text
    for one in found["last_differing"]:
        assert one["key"] in text
        assert one["worker"] != one["stock_worker"]
    assert status.placement_as_text(None) == "stock Dask chooses workers"
    assert dask_gpurt.status(four.stock)["placement"] is None


def test_the_command_shows_placement_alone(four, capsys):
    address = four.enabled.scheduler.address
    assert status.show(address, None, False, placement=True) == 0
    text = capsys.readouterr().out
    assert "other than stock" in text
    assert "shuffles" not in text
    assert status.show(address, None, True, placement=True) == 0
    assert json.loads(capsys.readouterr().out)["policy"] == "data-aware"


@contextlib.contextmanager
def settings_of(client, **values):
    """Apply other settings to a live cluster, as another client would."""
    try:
        with dask.config.set(values):
            dask_gpurt.enable(client)
        yield
    finally:
        dask_gpurt.enable(client)


def test_placement_can_be_switched_on_a_live_cluster(four):
    client = four.enabled
    key = "gpurt.placement"
    with settings_of(client, **{f"{key}.enabled": False}):
        assert dask_gpurt.status(client)["placement"] is None
        assert client.submit(sum, [client.submit(int, 7)]).result() == 7
        assert "placement" in dask_gpurt.explain(client, "x")["reason"]
    with settings_of(client, **{f"{key}.policy": "stock"}):
        with client.as_current():
            wait(client.persist(GRAPHS["a + b"]()))
        found = dask_gpurt.status(client)["placement"]
        assert found["policy"] == "stock"
        assert found["decisions"]["stock"] == sum(found["decisions"].values()) > 0
        assert found["differ_from_stock"] == 0
    assert dask_gpurt.status(client)["placement"]["policy"] == "data-aware"


def test_automatic_placement_needs_known_links(four):
    client = four.enabled
    described = pathlib.Path(__file__).parents[1] / "data" / "topologies" / "two-hosts.yaml"
    auto = {"gpurt.placement.policy": "auto"}
    with settings_of(client, **auto, **{"gpurt.topology.file": None}):
        assert dask_gpurt.status(client)["placement"]["policy"] == "stock"
    with settings_of(client, **auto, **{"gpurt.topology.file": str(described)}):
        assert dask_gpurt.status(client)["placement"]["policy"] == "data-aware"


def test_a_wrong_description_changes_nothing(four, tmp_path):
    client = four.enabled
    path = tmp_path / "machines.yaml"
    path.write_text("hosts: [{name: h}]")
    with (
        dask.config.set({"gpurt.topology.file": str(path)}),
        pytest.raises(
            ConfigError, match=r"machines\.yaml, line 1: hosts\[0\] lacks the key 'numa'"
        ),
    ):
        dask_gpurt.enable(client)
    assert dask_gpurt.status(client)["placement"]["policy"] == "data-aware"


# ------------------------------------------------------------------ restrictions


@gen_cluster(
    client=True,
    nthreads=[("", 1)] * 3,
    worker_kwargs={"resources": {"token": 1}},
)
async def test_worker_restrictions_always_hold(c, s, *workers):
    """Each task's input is on a worker on which the task must not run."""
    Placement(s, "data-aware")
    extra = await Worker(s.address, nthreads=1, resources={"special": 1})
    addresses = [worker.address for worker in workers]
    for i, home in enumerate(addresses):
        x = c.submit(np.ones, 200_000, key=f"x-{i}", workers=[home])
        others = [one for one in addresses if one != home]
        for j in range(6):
            allowed = others if j % 2 else others[:1]
            y = c.submit(np.sum, x, key=f"y-{i}-{j}", workers=allowed)
            await y
            assert {ws.address for ws in s.tasks[y.key].who_has} <= set(allowed)
        special = c.submit(np.sum, x, key=f"special-{i}", resources={"special": 1})
        token = c.submit(np.sum, x, key=f"token-{i}", resources={"token": 1})
        await wait([special, token])
        assert {ws.address for ws in s.tasks[special.key].who_has} == {extra.address}
        assert {ws.address for ws in s.tasks[token.key].who_has} <= set(addresses)
    loose = c.submit(np.sum, x, workers=["127.0.0.9"], allow_other_workers=True)
    assert await loose == 200_000
    actor = await c.submit(Counter, x, actor=True)
    assert await actor.value() == 200_000
    await extra.close()


class Counter:
    def __init__(self, x):
        self._n = len(x)

    def value(self):
        return self._n


# With this setting, the memory monitor does not end the worker's pause.
@gen_cluster(client=True, nthreads=[("", 1)] * 2, config={"distributed.worker.memory.pause": False})
async def test_paused_worker_gets_no_tasks(c, s, a, b):
    Placement(s, "data-aware")
    x = c.submit(np.ones, 1_000_000, workers=[a.address])
    await x
    a.status = Status.paused
    await async_poll_for(lambda: s.workers[a.address] not in s.running, timeout=60)
    y = c.submit(np.sum, x)
    await y
    assert {ws.address for ws in s.tasks[y.key].who_has} == {b.address}


# ------------------------------------------------------------------ transfers in flight


class Large:
    """A value of no memory whose sizeof is a gigabyte."""

    def __sizeof__(self):
        return 10**9


NO_STEALING_BY_ITSELF = {"distributed.scheduler.work-stealing-interval": "1 hour"}
ONE_SECOND_EACH = {"distributed.scheduler.default-task-durations": {"blocked": "1s"}}


@gen_cluster(client=True, nthreads=[("", 1)], config=ONE_SECOND_EACH)
async def test_task_goes_to_a_worker_that_is_fetching_its_input(c, s, b):
    """So the input is fetched only once. Its holder is busy for longer than the transfer."""
    placement = Placement(s, "data-aware")
    async with (
        BlockedGetData(s.address, nthreads=1) as a,
        Worker(s.address, nthreads=1) as idle,
    ):
        gate = Event()
        x = c.submit(Large, key="x", workers=[a.address])
        await wait(x)
        keys = [f"blocked-{i}" for i in range(20)]
        blocked = c.map(lambda i: gate.wait(), range(20), key=keys, workers=[a.address])
        first = c.submit(id, x, key="first", workers=[b.address])
        await a.in_get_data.wait()
        second = c.submit(type, x, key="second")
        await async_poll_for(lambda: "second" in s.tasks, timeout=60)
        await async_poll_for(lambda: s.tasks["second"].processing_on is not None, timeout=60)
        chosen = s.tasks["second"].processing_on.address
        a.block_get_data.set()
        await gate.set()
        await wait([first, second, *blocked])
        assert chosen == b.address, placement.explain("second")
        assert "x" not in idle.data
        assert len(b.transfer_incoming_log) == 1


@gen_cluster(client=True, nthreads=[("", 1)] * 3, config=ONE_SECOND_EACH)
async def test_early_end_of_a_transfer_is_noticed(c, s, a, b, busy):
    """The transfer takes no time, although the link is believed to need 1,000 seconds."""
    placement = Placement(s, "data-aware", clock=lambda: 0.0)
    placement.observe(b.address, {a.address: (1e8, 100)})
    x = c.submit(Large, key="x", workers=[a.address])
    await wait(x)
    await wait(c.submit(id, x, key="first", workers=[b.address]))
    most = c.submit(np.ones, 300_000, key="most", workers=[b.address])
    less = c.submit(np.ones, 200_000, key="less", workers=[busy.address])
    await wait([most, less])
    gate = Event()
    blocked = [
        c.submit(lambda gate: gate.wait(), gate, key=f"blocked-{i}", workers=[busy.address])
        for i in range(2)
    ]
    await async_poll_for(lambda: len(s.workers[busy.address].processing) == 2, timeout=60)
    both = c.submit(lambda x, y: None, most, less, key="both")
    await wait(both)
    chosen = {ws.address for ws in s.tasks["both"].who_has}
    await gate.set()
    await c.gather(blocked)
    assert chosen == {b.address}, placement.explain("both")


# ------------------------------------------------------------------ devices


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_device_data_stays_with_workers_that_have_a_device(c, s, host):
    """The type of a result shows that it is on a GPU; a resource shows that a worker has one."""
    placement = Placement(s, "data-aware")
    async with Worker(s.address, nthreads=1, resources={"GPU": 1}) as gpu:
        placement.add_worker(s.workers[gpu.address])
        gate = Event()
        x = c.submit(Large, key="x", workers=[gpu.address])
        await wait(x)
        s.tasks["x"].type = "cudf.core.dataframe.DataFrame"
        blocked = c.map(lambda i: gate.wait(), range(50), workers=[gpu.address], pure=False)
        await async_poll_for(lambda: len(s.workers[gpu.address].processing) == 50, timeout=60)
        y = c.submit(type, x, key="y")
        await async_poll_for(lambda: "y" in s.tasks, timeout=60)
        await async_poll_for(lambda: s.tasks["y"].processing_on is not None, timeout=60)
        assert s.tasks["y"].processing_on.address == gpu.address
        await gate.set()
        await wait([y, *blocked])


@gen_cluster(
    client=True,
    nthreads=[("", 1, {"resources": {"A": 1}})],
    config={"gpurt.enabled": True, "gpurt.placement.policy": "data-aware"},
)
async def test_tasks_of_unknown_duration_are_stolen_as_in_dask(c, s, a):
    """Steals in negotiation count with the same expected seconds as queued tasks."""
    stealing, held = s.extensions["stealing"], Event()
    await stealing.stop()
    tasks = c.map(lambda _, held: held.wait(), range(20), held=held, resources={"A": 1})
    await async_poll_for(lambda: len(s.workers[a.address].processing) == 20, timeout=60)
    async with Worker(s.address, nthreads=1, resources={"A": 1}) as b:
        await async_poll_for(lambda: s.workers[b.address].status == Status.running, timeout=60)
        stealing.balance()
        # As many are stolen as without the runtime. With 0.5 s for each, it would be one.
        assert len(stealing.in_flight) == 5
        await held.set()
        await c.gather(tasks)


@gen_cluster(client=True, nthreads=[("", 1)] * 2)
async def test_join_partner_planned_on_a_removed_worker_is_ignored(c, s, a, b):
    """Tasks of a removed worker are placed again one by one, so some plans may still name it."""
    placement = Placement(s, "data-aware")
    near = c.submit(int, 7, key="near", workers=[b.address])
    await near
    gone = "tcp://127.0.0.1:1"
    task = placement._view.task(s.tasks["near"], [], [{gone: 2.0**30}], ())
    found = Snapshot(task, placement._view.workers, placement._links.places, idle=(a.address,))
    assert DataAware().decide(found).worker == a.address
    assert [one.address for one in placement._view.workers([gone, b.address])] == [b.address]


# ------------------------------------------------------------------ slow workers


def take_fifty_times_as_long(placement: Placement, slow: str, other: str) -> None:
    for _ in range(10):
        placement._view.speeds.ended(other, "g", 0.01, 0.0)
        placement._view.speeds.ended(slow, "g", 0.5, 0.0)


@gen_cluster(client=True, nthreads=[("", 1)] * 2)
async def test_task_leaves_a_slow_worker_when_moving_its_input_pays(c, s, a, b):
    placement = Placement(s, "data-aware")
    made = [c.submit(int, 7, key=key, workers=[a.address]) for key in "xy"]
    await wait(made)
    x, y = made
    take_fifty_times_as_long(placement, a.address, b.address)
    assert placement.slowness(s.workers[a.address]) > 1
    assert placement.slowness(s.workers[b.address]) == 1
    await wait(moved := c.submit(int, x, key=("work-2", 0)))
    assert {ws.address for ws in s.tasks[moved.key].who_has} == {b.address}
    # Stock Dask takes all workers for equal, so the task stays with its input.
    placement.close()
    await wait(left := c.submit(int, y, key=("work-3", 0)))
    assert {ws.address for ws in s.tasks[left.key].who_has} == {a.address}


def queue_of(**durations: str) -> dict:
    """Return settings that let root tasks stay queued. Validation has to be off for that."""
    key = "distributed.scheduler."
    return {
        f"{key}worker-saturation": 1.0,
        f"{key}default-task-durations": durations,
        f"{key}validate": False,
    }


async def wait_for_a_quick_one(c, s, quick, slow) -> tuple:
    """Make root tasks that should stay queued, while the quick worker waits for an event.

    Returns the placement, the event, the task that waits for it, and the root tasks.
    """
    placement = Placement(s, "data-aware")
    take_fifty_times_as_long(placement, slow.address, quick.address)
    outside = Event()
    waits = c.submit(lambda: outside.wait(), key="waits", workers=[quick.address])
    await async_poll_for(lambda: s.workers[quick.address].processing, timeout=60)
    return placement, outside, waits, c.map(inc, range(5), key=[f"load-{i}" for i in range(5)])


@gen_cluster(client=True, nthreads=[("", 1)] * 2, config=queue_of(load="10 ms"))
async def test_wait_for_a_faster_worker_ends_when_it_stops_paying(c, s, a, b):
    _, outside, waits, loads = await wait_for_a_quick_one(c, s, a, b)
    assert await c.gather(loads) == list(range(1, 6))
    assert {ws.address for load in loads for ws in s.tasks[load.key].who_has} == {b.address}
    # The tasks did wait for the quick worker.
    assert "gpurt-held-back" in {one[4] for one in s.transition_log}
    await outside.set()
    await waits


@gen_cluster(client=True, nthreads=[("", 1)] * 2, config=queue_of(load="1 hour"))
async def test_wait_for_a_faster_worker_ends_when_it_is_removed(c, s, a, b):
    placement, outside, waits, loads = await wait_for_a_quick_one(c, s, a, b)
    await async_poll_for(lambda: len(s.queued) == 5, timeout=60)
    assert not s.workers[b.address].processing
    await s.remove_worker(a.address, stimulus_id="gone")
    placement.remove_worker(a.address)
    assert await c.gather(loads) == list(range(1, 6))
    waits.release()
    await outside.set()


@gen_cluster(client=True, nthreads=[("", 1)] * 2, config=queue_of(load="1 hour"))
async def test_queued_tasks_return_to_dask_when_placement_is_off(c, s, a, b):
    placement, outside, waits, loads = await wait_for_a_quick_one(c, s, a, b)
    await async_poll_for(lambda: len(s.queued) == 5, timeout=60)
    placement.close()
    assert await c.gather(loads) == list(range(1, 6))
    await outside.set()
    await waits


@gen_cluster(client=True, nthreads=[("", 1)] * 2, config=NO_STEALING_BY_ITSELF)
async def test_tasks_queued_on_a_slow_worker_are_stolen_early(c, s, a, b):
    """Two tasks of 0.01 s are not worth a steal, unless they take longer on a slow worker."""
    placement = Placement(s, "data-aware")
    gate = Event()
    key = {"workers": [a.address], "allow_other_workers": True}
    blocked = c.map(lambda i: gate.wait(), range(3), key=[f"w-{i}" for i in range(3)], **key)
    await async_poll_for(lambda: len(s.workers[a.address].processing) == 3, timeout=60)
    s.task_prefixes["w"].duration_average = 0.01
    stealing = s.extensions["stealing"]
    stealing.balance()
    assert not stealing.in_flight
    take_fifty_times_as_long(placement, a.address, b.address)
    stealing.balance()
    assert stealing.in_flight
    await gate.set()
    await c.gather(blocked)
