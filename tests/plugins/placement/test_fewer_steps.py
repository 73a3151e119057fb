"""Programs on frames whose layers are put together, on clusters."""

from __future__ import annotations

import logging
from threading import Barrier

import dask
import dask.dataframe as dd
import pandas as pd
import pytest
from dask.base import collections_to_expr
from dask.core import flatten
from dask.utils import key_split
from distributed import Client, wait
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.utils_test import async_poll_for, gen_cluster

import dask_gpurt
from dask_gpurt.plugins.placement.roots import fewer_tasks
from tests.plugins.placement.held_tasks import HeldTasks, until_all_is_stocks

N = 6
CONFIG = {"gpurt.enabled": True, "dataframe.shuffle.method": "p2p"}


def part(number: int) -> pd.DataFrame:
    return pd.DataFrame({"key": [n % 5 for n in range(40)], "x": float(number)})


ALL = pd.concat([part(number) for number in range(N)])


def frame() -> dd.DataFrame:
    return dd.from_map(part, range(N), meta=part(0))


def filtered(of=None) -> dd.DataFrame:
    found = frame() if of is None else of
    found = found[found["key"] > 1]
    return found.assign(y=found["x"] * 2)


TOTAL = 2 * ALL["x"][ALL["key"] > 1].sum()


def on_cluster(**config):
    return gen_cluster(client=True, nthreads=[("", 1)] * 2, config={**CONFIG, **config})


class Ended(SchedulerPlugin):
    """Records the keys of tasks that ended."""

    def __init__(self, scheduler):
        self.keys = []
        scheduler.add_plugin(self, name="ended")

    def transition(self, key, start, finish, *args, **kwargs):
        if finish == "memory":
            self.keys.append(key)

    def names(self) -> set[str]:
        return {key_split(key) for key in self.keys}


def computed(c, collection):
    """Return an awaitable for the result, as a program that calls `compute` gets it."""
    expr = collections_to_expr([collection]).finalize_compute().optimize()
    (key,) = flatten(expr.__dask_keys__())
    return c.get(expr, key, sync=False)


@on_cluster()
async def test_a_partition_has_one_task(c, s, a, b):
    ended = Ended(s)
    assert await computed(c, filtered()["y"].sum()) == TOTAL
    assert len(ended.keys) == N + 1
    assert ended.names() == {"part-fused-chunk", "sum-tree"}


@on_cluster()
async def test_a_filter_is_part_of_handing_over(c, s, a, b):
    ended = Ended(s)
    found = filtered().shuffle("key", npartitions=3)
    found = found.assign(z=found["y"] + 1)["z"].sum()
    assert await computed(c, found) == TOTAL + (ALL["key"] > 1).sum()
    assert len(ended.keys) == N + 1 + 3 + 3 + 1
    assert any(name.startswith("part-") and "shuffle" in name for name in ended.names())


HELD = HeldTasks()


def counts(one: pd.DataFrame) -> pd.DataFrame:
    HELD.taken.append(one["x"].iloc[0])
    return one


def waits(one: pd.DataFrame) -> pd.DataFrame:
    """Return a partition, once the test goes on."""
    if len(one) > 1:
        HELD.taken.append(one["x"].iloc[0])
        HELD.wait()
    return one


@pytest.fixture(autouse=True)
def held():
    yield from HELD.during_a_test()


@on_cluster()
async def test_programs_that_send_several_graphs_share_results(c, s, a, b):
    made = frame().map_partitions(waits, meta=part(0))
    futures = [c.compute(made["x"].sum())]
    await HELD.started(c)
    futures.append(c.compute(made["x"].max()))
    await async_poll_for(lambda: len(s.tasks) >= 2 * N + 2, 60)
    HELD.go_on()
    assert await c.gather(futures) == [ALL["x"].sum(), N - 1]
    assert sorted(HELD.taken) == [*range(N)]


@on_cluster()
async def test_programs_that_wait_at_once_share_results(c, s, a, b):
    """The first one hides its layers in groups, and all others share theirs."""
    made = frame().map_partitions(waits, meta=part(0))
    programs = [made["x"].sum(), made["x"].max(), made["x"].min(), made["x"].count()]
    results = [computed(c, programs[0])]
    await HELD.started(c)
    results += [computed(c, program) for program in programs[1:]]
    await async_poll_for(lambda: sum(len(one.who_wants or ()) for one in s.tasks.values()) == 4, 60)
    HELD.go_on()
    assert [await one for one in results] == [ALL["x"].sum(), N - 1, 0, len(ALL)]
    assert sorted(HELD.taken) == sorted([*range(N)] * 2)


@on_cluster()
async def test_the_same_program_twice_is_done_once(c, s, a, b):
    made = frame().map_partitions(waits, meta=part(0))
    results = [computed(c, made["x"].sum())]
    await HELD.started(c)
    async with Client(s.address, asynchronous=True) as other:
        results.append(computed(other, made["x"].sum()))
        await async_poll_for(
            lambda: any(len(one.who_wants or ()) == 2 for one in s.tasks.values()), 60
        )
        HELD.go_on()
        assert [await one for one in results] == [ALL["x"].sum()] * 2
    assert sorted(HELD.taken) == [*range(N)]


def test_tasks_of_a_program_are_forgotten_after_the_runtime(caplog):
    @on_cluster()
    async def test(c, s, a, b):
        total = filtered(frame().map_partitions(waits, meta=part(0)))["y"].sum()
        first = computed(c, total)
        await HELD.started(c)
        await dask_gpurt.disable(c)
        before = {*s.tasks}
        second = c.compute(total + 1)
        await async_poll_for(lambda: not s.tasks.keys() <= before, 60)
        HELD.go_on()
        assert [await first, await second] == [TOTAL, TOTAL + 1]
        assert "run_spec" not in caplog.text and sorted(HELD.taken) == [*range(N)]
        del first, second
        await until_all_is_stocks(c, s)

    with caplog.at_level(logging.WARNING, "distributed.scheduler"):
        test()


@pytest.mark.parametrize("second", ["compute", "persist", "get"])
def test_a_task_of_two_programs_keeps_its_inputs(second, caplog):
    @on_cluster()
    async def test(c, s, a, b):
        total = filtered(frame().map_partitions(waits, meta=part(0)))["y"].sum()
        first = computed(c, total)
        await HELD.started(c)
        before = {*s.tasks}
        if second == "persist":
            later = c.persist(total + 1)
        else:
            later = computed(c, total + 1) if second == "get" else c.compute(total + 1)
        await async_poll_for(lambda: not s.tasks.keys() <= before, 60)
        HELD.go_on()
        assert [await first, await c.compute(later) if second == "persist" else await later] == [
            TOTAL,
            TOTAL + 1,
        ]
        assert "run_spec" not in caplog.text
        del later, first
        await async_poll_for(lambda: not s.tasks, 60)

    with caplog.at_level(logging.WARNING, "distributed.scheduler"):
        test()


@on_cluster()
async def test_results_of_an_earlier_program_are_used(c, s, a, b):
    made = frame().map_partitions(counts, meta=part(0))
    earlier = c.persist(made)
    await wait(earlier)
    ended = Ended(s)
    assert await computed(c, filtered(made)["y"].sum()) == TOTAL
    assert len(HELD.taken) == N and len(ended.keys) == N + 1


@on_cluster(**{"optimization.fuse.active": False})
async def test_dasks_own_switch_is_kept_to(c, s, a, b):
    ended = Ended(s)
    assert await computed(c, filtered()["y"].sum()) == TOTAL
    assert len(ended.keys) > 5 * N


@pytest.mark.parametrize("said", [{"retries": 1}, {"priority": lambda key: 1}])
def test_programs_that_name_single_tasks_keep_them(said):
    @on_cluster()
    async def test(c, s, a, b):
        ended = Ended(s)
        with dask.annotate(**said):
            assert await computed(c, filtered()["y"].sum()) == TOTAL
        assert len(ended.keys) > 5 * N

    test()


@on_cluster()
async def test_workers_of_a_program_are_kept_to(c, s, a, b):
    with dask.annotate(workers=[b.address]):
        result = computed(c, filtered()["y"].sum())
    assert await result == TOTAL
    assert not a.transfer_outgoing_count_total and not a.state.executed_count


@on_cluster()
async def test_frames_of_delayed_objects_are_computed(c, s, a, b, caplog):
    ended = Ended(s)
    parts = [dask.delayed(part)(number) for number in range(N)]
    made = dd.from_delayed(parts, meta=part(0), verify_meta=False)
    assert await computed(c, filtered(made)["y"].sum()) == TOTAL
    assert len(ended.keys) <= 4 * N + 1 and "examined" not in caplog.text


@pytest.mark.parametrize("n_partitions", [1, N])
@on_cluster()
async def test_programs_that_write_files_are_grouped(c, s, a, b, tmp_path, caplog, n_partitions):
    """An expression that writes files has no meta."""
    ended = Ended(s)
    frame = dd.from_pandas(ALL, npartitions=n_partitions)
    writing = frame[frame["key"] > 1].to_parquet(tmp_path / "x", compute=False)
    await computed(c, writing)
    written = pd.read_parquet(tmp_path / "x")
    assert written["x"].sum() == ALL["x"][ALL["key"] > 1].sum()
    # The frame itself stays apart: Dask holds its data.
    assert len(ended.keys) == 2 * n_partitions + 1
    assert "examined" not in caplog.text


@on_cluster()
async def test_inputs_are_grouped_if_layers_cannot_be_read(c, s, a, b, monkeypatch, caplog):
    def fail(*args):
        raise TypeError("an expression of another kind")

    monkeypatch.setattr(fewer_tasks, "layers", fail)
    ended = Ended(s)
    assert await computed(c, filtered().shuffle("key", npartitions=3)["y"].sum()) == TOTAL
    assert "the layers of a program could not be examined" in caplog.text
    assert any("-shuffle-transfer" in name for name in ended.names())


@gen_cluster(client=True, nthreads=[("", 2)], config=CONFIG)
async def test_branches_run_at_once(c, s, a):
    one, other = (
        dd.from_map(part, [number], meta=part(0), divisions=(0, 39)).map_partitions(
            meets, meta=part(0)
        )
        for number in (1, 2)
    )
    ended = Ended(s)
    assert await computed(c, (one["x"] + other["x"]).sum()) == 3 * 40
    assert ended.names() >= {"part-meets-getitem"} and len(ended.keys) == 4


MEETING = Barrier(2)


def meets(one: pd.DataFrame) -> pd.DataFrame:
    """Return a partition, once another thread is here, too."""
    if len(one) > 1:
        MEETING.wait(60)
    return one


@on_cluster()
async def test_layers_may_be_coroutines(c, s, a, b):
    made = dd.from_map(awaited, range(N), meta=part(0))
    assert await computed(c, filtered(made)["y"].sum()) == TOTAL


async def awaited(number: int) -> pd.DataFrame:
    return part(number)


@on_cluster()
async def test_an_error_is_the_users(c, s, a, b):
    with pytest.raises(ZeroDivisionError, match="part 0"):
        await computed(c, frame().map_partitions(fails, meta=part(0))["x"].sum())


def fails(one: pd.DataFrame) -> pd.DataFrame:
    if len(one) > 1:
        raise ZeroDivisionError("part 0")
    return one


@on_cluster()
async def test_layers_are_dasks_own_without_the_runtime(c, s, a, b):
    await dask_gpurt.disable(c)
    ended = Ended(s)
    assert await computed(c, filtered()["y"].sum()) == TOTAL
    assert len(ended.keys) > 5 * N
