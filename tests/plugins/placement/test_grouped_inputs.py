"""Shuffles whose tasks hand over several inputs, on clusters."""

from __future__ import annotations

import logging
from threading import Event

import dask
import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from distributed import futures_of, wait
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.utils_test import async_poll_for, gen_cluster

import dask_gpurt
from dask_gpurt.placement import input_groups
from dask_gpurt.plugins.patches.graphs.transfer_tasks import n_inputs

CONFIG = {"gpurt.enabled": True, "dataframe.shuffle.method": "p2p"}
N = 24


@pytest.fixture(autouse=True)
def few_tasks(monkeypatch):
    monkeypatch.setattr(input_groups, "TASKS_PER_THREAD", 1)


def part(number: int) -> pd.DataFrame:
    rng = np.random.default_rng(number)
    return pd.DataFrame({"key": rng.integers(0, 50, 40), "x": rng.random(40), "from": number})


META = part(0)


def frame(make=part, n: int = N) -> dd.DataFrame:
    return dd.from_map(make, range(n), meta=META)


def on_cluster(n_workers=2, nthreads=1):
    return gen_cluster(client=True, nthreads=[("", nthreads)] * n_workers, config=CONFIG)


class HandingOver(SchedulerPlugin):
    """Records the tasks that hand over inputs, how many each, and how often barriers run."""

    def __init__(self, scheduler):
        self.scheduler, self.sizes, self.n_barriers = scheduler, {}, 0
        scheduler.add_plugin(self, name="handing-over")

    def transition(self, key, start, finish, *args, **kwargs):
        if "-transfer-" in str(key) and finish == "processing":
            self.sizes[key] = n_inputs(self.scheduler.tasks[key].run_spec)
        self.n_barriers += "shuffle-barrier" in str(key) and finish == "processing"


def all_rows(n: int = N) -> pd.DataFrame:
    return ordered(pd.concat([part(number) for number in range(n)]))


def ordered(found: pd.DataFrame) -> pd.DataFrame:
    return found.sort_values([*found.columns]).reset_index(drop=True)


@on_cluster()
async def test_few_tasks_hand_over_many_inputs(c, s, a, b):
    tasks = HandingOver(s)
    parts = c.persist(frame().shuffle("key", npartitions=5))
    await wait(parts)
    assert sorted(tasks.sizes.values()) == [12, 12]
    assert len(s.tasks) == 2 + 1 + 5, "hand over, barrier, outputs"
    pd.testing.assert_frame_equal(ordered(await c.compute(parts)), all_rows())


@on_cluster()
async def test_rows_come_in_the_order_of_inputs(c, s, a, b):
    found = await c.compute(frame().shuffle("key", npartitions=3).map_partitions(sources))
    for numbers in found.groupby("of")["from"]:
        assert numbers[1].is_monotonic_increasing


def sources(part: pd.DataFrame) -> pd.DataFrame:
    return pd.DataFrame({"from": part["from"].to_numpy(), "of": part["key"].min()})


@on_cluster()
async def test_few_inputs_have_a_task_each(c, s, a, b, monkeypatch):
    monkeypatch.undo()
    tasks = HandingOver(s)
    found = await c.compute(frame().merge(frame(n=6), on="key", npartitions=4)["x_x"].sum())
    assert len(tasks.sizes) == N + 6 and {*tasks.sizes.values()} == {1}
    assert found == pytest.approx(all_rows().merge(all_rows(6), on="key")["x_x"].sum())


@on_cluster()
async def test_held_inputs_are_handed_over_where_they_are(c, s, a, b):
    held = c.persist(frame())
    await wait(held)
    tasks = HandingOver(s)
    found = await c.compute(held.shuffle("key", npartitions=4)["x"].sum())
    assert sum(tasks.sizes.values()) == N and len(tasks.sizes) <= 4
    assert found == pytest.approx(all_rows()["x"].sum())
    inputs = {str(future.key) for future in futures_of(held)}
    moved = {str(key) for one in (a, b) for log in one.transfer_incoming_log for key in log["keys"]}
    assert not inputs & moved


@on_cluster()
async def test_an_input_that_is_wanted_too_is_made_once(c, s, a, b):
    made = frame()
    shuffled = made.shuffle("key", npartitions=4)
    total, parts = await c.gather(c.compute([shuffled["x"].sum(), made.map_partitions(len)]))
    assert total == pytest.approx(all_rows()["x"].sum())
    assert [*parts] == [40] * N


@on_cluster()
async def test_an_error_in_an_input_is_the_users(c, s, a, b):
    with pytest.raises(ZeroDivisionError, match="part 7"):
        await c.compute(frame(fails).shuffle("key", npartitions=4))


def fails(number: int) -> pd.DataFrame:
    if number == 7:
        raise ZeroDivisionError("part 7")
    return part(number)


STARTED, GO_ON = Event(), Event()
#: Inputs of the first task, in the order in which they were made.
MADE: list[int] = []


def holds(number: int) -> pd.DataFrame:
    """Return a partition. The first task waits in the middle until the test goes on."""
    if number < N // 2:
        MADE.append(number)
        if len(MADE) == 6:
            STARTED.set()
            assert GO_ON.wait(60)
    return part(number)


@pytest.fixture(autouse=True)
def events():
    STARTED.clear()
    GO_ON.clear()
    MADE.clear()
    yield
    GO_ON.set()


async def held(c, s, tasks):
    """Wait until the first task waits, and the other one is done."""
    await c.loop.asyncio_loop.run_in_executor(None, STARTED.wait, 60)
    await async_poll_for(
        lambda: [s.tasks[key].state for key in tasks.sizes].count("memory") == 1, 60
    )


@on_cluster()
async def test_a_task_whose_shuffle_restarts_runs_again(c, s, a, b):
    """The first inputs of the task that waits went to a run that ends with a worker."""
    tasks = HandingOver(s)
    shuffled = frame(holds).shuffle("key", npartitions=5)
    future = c.compute(shuffled)
    await held(c, s, tasks)
    holder = next(one for one in (a, b) if one.state.executing_count)
    await (b if holder is a else a).close()
    GO_ON.set()
    pd.testing.assert_frame_equal(ordered(await future), all_rows())
    assert tasks.n_barriers == 1, "the barrier never gets inputs of two runs"


@on_cluster()
async def test_a_second_program_keeps_the_tasks(c, s, a, b, monkeypatch, caplog):
    shuffled = frame(holds).shuffle("key", npartitions=5)
    tasks = HandingOver(s)
    first = c.persist(shuffled)
    await held(c, s, tasks)
    n_tasks = len(s.tasks)
    monkeypatch.setattr(input_groups, "TASKS_PER_THREAD", 100)
    with caplog.at_level(logging.WARNING, "distributed.scheduler"):
        second = c.persist(shuffled)
        GO_ON.set()
        await wait([first, second])
    assert "run_spec" not in caplog.text
    assert len(s.tasks) == n_tasks and 1 not in tasks.sizes.values()
    assert len(await c.compute(second)) == N * 40


@on_cluster()
async def test_tasks_are_dasks_own_without_the_runtime(c, s, a, b):
    await dask_gpurt.disable(c)
    assert s.stream_handlers["update-graph"] == s.update_graph
    tasks = HandingOver(s)
    await c.compute(frame().shuffle("key", npartitions=4)["x"].sum())
    assert len(tasks.sizes) == N


@on_cluster()
async def test_annotations_by_key_find_their_tasks(c, s, a, b):
    tasks = HandingOver(s)
    with dask.annotate(retries=lambda key: 1):
        total = await c.compute(frame().shuffle("key", npartitions=4)["x"].sum())
    assert total == pytest.approx(all_rows()["x"].sum())
    assert len(tasks.sizes) == N
    assert all(name.startswith("shuffle-transfer-") for name, _ in tasks.sizes)


@on_cluster()
async def test_chunks_of_arrays_are_taken_together(c, s, a, b):
    tasks = HandingOver(s)
    with dask.config.set({"array.rechunk.method": "p2p", "array.chunk-size": 1000}):
        array = da.random.default_rng(1).random((240, 240), chunks=(10, 240))
        found = await c.compute(array.rechunk((240, 10)))
    assert sorted(tasks.sizes.values()) == [12, 12]
    np.testing.assert_array_equal(found, array.compute(scheduler="sync"))
