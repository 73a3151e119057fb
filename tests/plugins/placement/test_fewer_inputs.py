"""Shuffles whose tasks hand over several inputs, on clusters."""

from __future__ import annotations

import logging

import dask
import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from dask.utils import key_split
from distributed import Client, futures_of, wait
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.utils_test import async_poll_for, gen_cluster

import dask_gpurt
from dask_gpurt.placement import input_groups
from dask_gpurt.plugins.patches.graphs.transfer_tasks import n_inputs
from dask_gpurt.plugins.shuffle import frame_run
from tests.plugins.placement.held_tasks import HeldTasks, until_all_is_stocks

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


async def held_frame(c, make=part, n: int = N):
    """Return a frame whose partitions are in memory."""
    frame_ = c.persist(frame(make, n))
    await wait(frame_)
    return frame_


@on_cluster()
async def test_a_task_makes_an_input_and_hands_it_over(c, s, a, b):
    tasks = HandingOver(s)
    parts = c.persist(frame().shuffle("key", npartitions=5))
    await wait(parts)
    assert [*tasks.sizes.values()] == [1] * N
    assert len(s.tasks) == N + 1 + 5, "hand over, barrier, outputs"
    assert {key_split(key) for key in tasks.sizes} == {"part-shuffle-transfer"}
    pd.testing.assert_frame_equal(ordered(await c.compute(parts)), all_rows())


@on_cluster()
async def test_inputs_may_be_delayed_objects(c, s, a, b, caplog):
    tasks = HandingOver(s)
    parts = [dask.delayed(part)(number) for number in range(N)]
    made = dd.from_delayed(parts, meta=META, verify_meta=False)
    found = await c.compute(made.shuffle("key", npartitions=4)["x"].sum())
    assert found == pytest.approx(all_rows()["x"].sum())
    assert {key_split(key) for key in tasks.sizes} == {"part-shuffle-transfer"}
    assert len(tasks.sizes) == N and "examined" not in caplog.text


@on_cluster()
async def test_held_inputs_are_handed_over_where_they_are(c, s, a, b):
    held = await held_frame(c)
    tasks = HandingOver(s)
    found = await c.compute(held.shuffle("key", npartitions=4)["x"].sum())
    assert sum(tasks.sizes.values()) == N and len(tasks.sizes) <= 4
    assert found == pytest.approx(all_rows()["x"].sum())
    inputs = {str(future.key) for future in futures_of(held)}
    moved = {str(key) for one in (a, b) for log in one.transfer_incoming_log for key in log["keys"]}
    assert not inputs & moved


def unlike(number: int) -> pd.DataFrame:
    """Return a partition whose numbers, or whose missing values, are of another type."""
    found = part(number)
    found["x"] = (found["x"] * 100).round().astype((int, float, "Int64")[number % 3])
    return found


@pytest.mark.parametrize("make", [part, unlike])
@on_cluster(n_workers=1)
async def test_rows_come_in_the_order_of_inputs(c, s, a, make):
    held = await held_frame(c, make)
    found = await c.compute(held.shuffle("key", npartitions=3).map_partitions(sources))
    for numbers in found.groupby("of")["from"]:
        assert numbers[1].is_monotonic_increasing


@on_cluster(n_workers=1)
async def test_large_inputs_among_small_ones_keep_their_order(c, s, a, monkeypatch):
    monkeypatch.setattr(frame_run, "MOST_WAITING_NBYTES", 16 * 2000)
    held, tasks = await held_frame(c, unequal), HandingOver(s)
    found = await c.compute(held.shuffle("key", npartitions=3).map_partitions(sources))
    assert max(tasks.sizes.values()) == 16
    assert len(found) == sum(len(unequal(number)) for number in range(N))
    for numbers in found.groupby("of")["from"]:
        assert numbers[1].is_monotonic_increasing


def unequal(number: int) -> pd.DataFrame:
    """Return a partition of about 1 kB, or of 5 kB."""
    return pd.concat([part(number)] * (1 if number % 5 else 5))


@on_cluster()
async def test_inputs_of_two_workers_keep_their_order(c, s, a, b):
    """Each task hands over every other input, so rows of two tasks alternate in the outputs."""
    futures = [
        c.submit(part, number, workers=[(a, b)[number % 2].address], allow_other_workers=True)
        for number in range(N)
    ]
    await wait(futures)
    tasks = HandingOver(s)
    shuffled = dd.from_delayed(futures, meta=META).shuffle("key", npartitions=3)
    found = await c.compute(shuffled.map_partitions(with_least_key))
    assert max(tasks.sizes.values()) > 3
    rows = pd.concat([part(number) for number in range(N)])
    outputs = [one.drop(columns="least") for _, one in found.groupby("least")]
    assert len(outputs) == 3
    for output in outputs:
        pd.testing.assert_frame_equal(output, rows[rows["key"].isin({*output["key"]})])


def with_least_key(part: pd.DataFrame) -> pd.DataFrame:
    return part.assign(least=part["key"].min())


def swapped(number: int) -> pd.DataFrame:
    """Return a partition whose numbers have the order of bytes of another machine."""
    found = part(number)
    return found.assign(x=found["x"].to_numpy().astype(">f8"))


def with_own_words(number: int) -> pd.DataFrame:
    """Return a partition with an Arrow dictionary. Those of several need too many codes for one."""
    found = part(number)
    words = pa.array([f"{number} {n}" for n in range(len(found))]).dictionary_encode()
    short = words.cast(pa.dictionary(pa.int8(), pa.string()))
    return found.assign(x=pd.arrays.ArrowExtensionArray(short))


@pytest.mark.parametrize(
    ("make", "plain"), [(unlike, float), (swapped, float), (with_own_words, str)]
)
@on_cluster()
async def test_inputs_of_one_task_may_have_other_types(c, s, a, b, make, plain):
    held = c.persist(dd.from_map(make, range(N), meta=make(0).iloc[:0]))
    await wait(held)
    tasks = HandingOver(s)
    # The words of an output fit into one dictionary.
    parts = held.shuffle("from", npartitions=8 * N).to_delayed()
    found = [part for part in await c.gather(c.compute(parts)) if len(part)]
    assert max(tasks.sizes.values()) > 3
    found = pd.concat([part.astype({"x": plain}) for part in found])
    expected = pd.concat([make(number).astype({"x": plain}) for number in range(N)])
    pd.testing.assert_frame_equal(ordered(found), ordered(expected))


def sources(part: pd.DataFrame) -> pd.DataFrame:
    return pd.DataFrame({"from": part["from"].to_numpy(), "of": part["key"].min()})


@on_cluster()
async def test_few_inputs_have_a_task_each(c, s, a, b, monkeypatch):
    monkeypatch.undo()
    left, right = await held_frame(c), await held_frame(c, n=6)
    tasks = HandingOver(s)
    found = await c.compute(left.merge(right, on="key", npartitions=4)["x_x"].sum())
    assert len(tasks.sizes) == N + 6 and {*tasks.sizes.values()} == {1}
    assert found == pytest.approx(all_rows().merge(all_rows(6), on="key")["x_x"].sum())


@on_cluster()
async def test_a_table_that_all_inputs_need_groups_nothing(c, s, a, b):
    (table,) = await c.scatter([pd.Series(range(N))])
    tasks = HandingOver(s)
    made = dd.from_map(looked_up, range(N), args=[table], meta=META)
    assert await c.compute(made.shuffle("key", npartitions=4)["x"].count()) == N * 40
    assert {*tasks.sizes.values()} == {1}


def looked_up(number: int, table: pd.Series) -> pd.DataFrame:
    return part(int(table[number]))


@on_cluster()
async def test_an_input_that_is_wanted_too_is_made_once(c, s, a, b):
    made = frame(counted)
    COUNTED.clear()
    shuffled = made.shuffle("key", npartitions=4)
    total, parts = await c.gather(c.compute([shuffled["x"].sum(), made.map_partitions(len)]))
    assert total == pytest.approx(all_rows()["x"].sum())
    assert [*parts] == [40] * N and len(COUNTED) == N


COUNTED: list[int] = []


def counted(number: int) -> pd.DataFrame:
    COUNTED.append(number)
    return part(number)


@on_cluster()
async def test_inputs_of_an_earlier_program_are_used(c, s, a, b):
    made = frame(counted)
    COUNTED.clear()
    earlier = c.persist(made)
    total = await c.compute(made.shuffle("key", npartitions=4)["x"].sum())
    assert total == pytest.approx(all_rows()["x"].sum())
    assert len(COUNTED) == N
    del earlier


@on_cluster()
async def test_an_error_in_an_input_is_the_users(c, s, a, b):
    with pytest.raises(ZeroDivisionError, match="part 7"):
        await c.compute(frame(fails).shuffle("key", npartitions=4))


def fails(number: int) -> pd.DataFrame:
    if number == 7:
        raise ZeroDivisionError("part 7")
    return part(number)


@on_cluster()
async def test_each_task_has_its_retries(c, s, a, b):
    FAILED.clear()
    held = await held_frame(c)
    flaky = held.map_partitions(fails_once, meta=META)
    total = await c.compute(flaky.shuffle("key", npartitions=4)["x"].sum(), retries=1)
    assert total == pytest.approx(all_rows()["x"].sum())
    assert len(FAILED) == N


FAILED: set[int] = set()


def fails_once(part: pd.DataFrame) -> pd.DataFrame:
    if (number := part["from"].iloc[0]) not in FAILED:
        FAILED.add(number)
        raise OSError(number)
    return part


@on_cluster()
async def test_inputs_may_be_coroutines(c, s, a, b):
    shuffled = frame(awaited).shuffle("key", npartitions=4)
    assert await c.compute(shuffled["x"].sum()) == pytest.approx(all_rows()["x"].sum())


async def awaited(number: int) -> pd.DataFrame:
    return part(number)


#: Has the inputs of the task that waits.
HELD = HeldTasks()


def holds(part: pd.DataFrame) -> pd.DataFrame:
    """Return a partition. A task of one worker waits in the middle until the test goes on."""
    if len(part) and part["place"].iloc[0] == 0:
        HELD.taken.append(part["from"].iloc[0])
        if len(HELD.taken) == 3:
            HELD.wait()
    return part


@pytest.fixture(autouse=True)
def held():
    yield from HELD.during_a_test()


def placed(number: int) -> pd.DataFrame:
    return part(number).assign(place=number % 2)


async def held_at(c, a, b):
    """Return a frame of which each worker holds one half, and a function waits at `a`."""
    at = [a.address, b.address]
    futures = [
        c.submit(placed, number, workers=at[number % 2], allow_other_workers=True)
        for number in range(N)
    ]
    await wait(futures)
    return dd.from_delayed(futures, meta=placed(0)).map_partitions(holds)


async def until_held(c, s, tasks):
    """Wait until one task waits, and all others are done."""
    await HELD.started(c)
    await async_poll_for(
        lambda: [s.tasks[key].state for key in tasks.sizes].count("processing") == 1, 60
    )


@on_cluster()
async def test_a_task_whose_shuffle_restarts_runs_again(c, s, a, b):
    """The first inputs of the task that waits went to a run that ends with a worker."""
    frame_ = await held_at(c, a, b)
    tasks = HandingOver(s)
    future = c.compute(frame_.shuffle("key", npartitions=5))
    await until_held(c, s, tasks)
    assert max(tasks.sizes.values()) > 3
    await (b if a.state.executing_count else a).close()
    HELD.go_on()
    pd.testing.assert_frame_equal(ordered((await future).drop(columns="place")), all_rows())
    assert tasks.n_barriers == 1, "the barrier never gets inputs of two runs"


@pytest.mark.parametrize("again", ["by the same client", "by two clients", "by key"])
def test_a_second_program_keeps_the_tasks(again, monkeypatch, caplog):
    @on_cluster()
    async def test(c, s, a, b):
        shuffled = (await held_at(c, a, b)).shuffle("key", npartitions=5)
        tasks = HandingOver(s)
        first = c.persist(shuffled)
        if again != "by two clients":
            await until_held(c, s, tasks)
        async with Client(s.address, asynchronous=True) as other:
            monkeypatch.setattr(input_groups, "TASKS_PER_THREAD", 100)
            client = other if again == "by two clients" else c
            with dask.annotate(**({"priority": lambda key: 1} if again == "by key" else {})):
                second = client.persist(shuffled)
            await until_held(c, s, tasks)
            n_tasks = len(s.tasks)
            HELD.go_on()
            await wait(first)
            assert len(await client.compute(second)) == N * 40
        assert "run_spec" not in caplog.text
        assert n_tasks == N + len(tasks.sizes) + 1 + 5
        del first, second, shuffled
        await async_poll_for(lambda: not s.tasks, 60)

    with caplog.at_level(logging.WARNING, "distributed.scheduler"):
        test()


def test_a_shuffles_tasks_are_forgotten_after_the_runtime(caplog):
    @on_cluster()
    async def test(c, s, a, b):
        shuffled = (await held_at(c, a, b)).shuffle("key", npartitions=5)
        tasks = HandingOver(s)
        first = c.persist(shuffled)
        await until_held(c, s, tasks)
        await dask_gpurt.disable(c)
        before = {*s.tasks}
        second = c.compute(shuffled["x"].sum())
        await async_poll_for(lambda: not s.tasks.keys() <= before, 60)
        HELD.go_on()
        await wait(first)
        assert await second == pytest.approx(all_rows()["x"].sum())
        assert "run_spec" not in caplog.text
        del first, second, shuffled
        await until_all_is_stocks(c, s)

    with caplog.at_level(logging.WARNING, "distributed.scheduler"):
        test()


@on_cluster()
async def test_tasks_are_dasks_own_without_the_runtime(c, s, a, b):
    await dask_gpurt.disable(c)
    assert s.stream_handlers["update-graph"] == s.update_graph
    tasks = HandingOver(s)
    await c.compute(frame().shuffle("key", npartitions=4)["x"].sum())
    assert len(tasks.sizes) == N
    assert {key_split(key) for key in tasks.sizes} == {"shuffle-transfer"}


@on_cluster()
async def test_annotations_by_key_find_their_tasks(c, s, a, b):
    tasks = HandingOver(s)
    with dask.annotate(retries=lambda key: 1):
        total = await c.compute(frame().shuffle("key", npartitions=4)["x"].sum())
    assert total == pytest.approx(all_rows()["x"].sum())
    assert {key_split(key) for key in tasks.sizes} == {"shuffle-transfer"}


@on_cluster()
async def test_chunks_of_arrays_are_taken_together(c, s, a, b):
    with dask.config.set({"array.rechunk.method": "p2p", "array.chunk-size": 1000}):
        array = c.persist(da.random.default_rng(1).random((240, 240), chunks=(10, 240)))
        await wait(array)
        tasks = HandingOver(s)
        found = await c.compute(array.rechunk((240, 10)))
    assert sum(tasks.sizes.values()) == N and len(tasks.sizes) <= 4
    np.testing.assert_array_equal(found, await c.compute(array))
