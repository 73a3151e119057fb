"""Each operation gives NumPy's result on every rank, with every algorithm and type."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from dask_gpurt.collectives import Communicator
from dask_gpurt.command.status import as_text
from dask_gpurt.plugins.worker.worker_runtime import runtime_of
from tests.plugins.collectives.gang import (
    ALGORITHMS,
    assert_nothing_stays,
    forced,
    on_cluster,
)

#: Elements: none, one, fewer than ranks, a message, and more than a message or a job of the loop.
LENGTHS = [0, 1, 3, 1000, 150_000]


def value(rank, length, dtype):
    """Return a rank's value; sums of floats depend on the order of ranks."""
    rng = np.random.default_rng(rank)
    if np.dtype(dtype).kind in "fc":
        return (rng.random(length) * 10.0 ** rng.integers(-4, 2, length)).astype(dtype)
    return rng.integers(0, 2 if dtype == "?" else 100, length).astype(dtype)


def all_operations(comm, _, lengths, dtype):
    found, last = [], comm.size - 1
    for length in lengths:
        array = value(comm.rank, length, dtype)
        before = array.copy()
        rows = value(comm.rank, 7 * length, dtype).reshape(7, length)
        found.append(
            {
                "all_reduce": comm.allreduce(array),
                "reduce_scatter": comm.reduce_scatter(rows),
                "all_gather": comm.all_gather(array),
                "broadcast": comm.broadcast(array if comm.rank == last else None, root=last),
            }
        )
        assert (array == before).all()
    return found


def reduced(arrays):
    total = arrays[0]
    for one in arrays[1:]:
        total = total + one
    return total


def assert_equal_numpys(results, n, dtype):
    for number, length in enumerate(LENGTHS):
        values = [value(rank, length, dtype) for rank in range(n)]
        rows = [value(rank, 7 * length, dtype).reshape(7, length) for rank in range(n)]
        parts = np.array_split(reduced(rows), n)
        for rank in range(n):
            found = results[rank][number]
            np.testing.assert_array_equal(found["all_reduce"], reduced(values))
            np.testing.assert_array_equal(found["reduce_scatter"], parts[rank])
            np.testing.assert_array_equal(found["all_gather"], np.stack(values))
            np.testing.assert_array_equal(found["broadcast"], values[-1])


@on_cluster()
async def test_every_algorithm_has_the_result_of_numpy(c, s, *workers):
    n = max(map(len, ALGORITHMS.values()))
    async with Communicator(c) as comm:
        for number in range(n):
            with contextlib.ExitStack() as stack:
                for collective, names in ALGORITHMS.items():
                    stack.enter_context(forced(collective, names[number % len(names)]))
                futures = await comm.run(all_operations, None, LENGTHS, "i4")
                assert_equal_numpys(await c.gather(futures), len(workers), "i4")
    chosen = s.plugins["gpurt"].collectives.gangs.report()["algorithms"]
    assert chosen.keys() == {name for names in ALGORITHMS.values() for name in names}
    del futures
    await assert_nothing_stays(c, s, *workers)


@on_cluster()
async def test_all_ranks_have_the_same_bits_in_every_type(c, s, *workers):
    async with Communicator(c) as comm:
        for dtype in ("f8", "f4", "f2", "c16", "u1", "i8", "?", ">f8"):
            futures = await comm.run(all_operations, None, [1000], dtype)
            results = await c.gather(futures)
            bits = {one[0]["all_reduce"].tobytes() for one in results}
            assert len(bits) == 1, dtype
            assert {one[0]["all_reduce"].dtype for one in results} == {np.dtype(dtype)}
            values = [value(rank, 1000, dtype) for rank in range(len(workers))]
            # Floats are added in another order than NumPy's, which is the same each time.
            np.testing.assert_allclose(results[0][0]["all_reduce"], reduced(values), rtol=1e-2)


OPS = ["sum", "prod", "min", "max", "any", "all"]


def every_way(comm, _):
    return [comm.allreduce(np.arange(4) % (comm.rank + 2), op) for op in OPS]


@on_cluster()
async def test_every_way_to_combine(c, s, *workers):
    async with Communicator(c) as comm:
        found = (await c.gather(await comm.run(every_way)))[0]
    values = np.stack([np.arange(4) % (rank + 2) for rank in range(len(workers))])
    for op, one in zip(OPS, found, strict=True):
        np.testing.assert_array_equal(one, getattr(values, op)(axis=0).astype(one.dtype))


def odd_shapes(comm, _):
    cube = np.arange(24.0).reshape(2, 3, 4)
    return [
        comm.allreduce(comm.rank + 0.5),
        comm.allreduce(np.asfortranarray(cube[0])),
        comm.allreduce(cube[:, ::2]),
        comm.all_gather(np.array(["a", "bcd"][comm.rank % 2 :][:1], dtype="U3")),
        comm.broadcast(np.datetime64("2026-01-01") if comm.rank == 0 else None),
        comm.barrier(),
    ]


@on_cluster()
async def test_numbers_strides_texts_and_dates(c, s, *workers):
    async with Communicator(c) as comm:
        results = await c.gather(await comm.run(odd_shapes))
    cube = np.arange(24.0).reshape(2, 3, 4)
    for number, plain, strided, texts, date, nothing in results:
        assert number == sum(rank + 0.5 for rank in range(5)) and number.shape == ()
        np.testing.assert_array_equal(plain, 5 * cube[0])
        np.testing.assert_array_equal(strided, 5 * cube[:, ::2])
        assert texts[:, 0].tolist() == ["a", "bcd", "a", "bcd", "a"]
        assert date == np.datetime64("2026-01-01")
        assert nothing is None


def one_rank(comm, _):
    array = np.arange(5)
    comm.barrier()
    return [
        comm.allreduce(array),
        comm.reduce_scatter(array),
        comm.all_gather(array)[0],
        comm.broadcast(array),
    ]


@on_cluster([("127.0.0.1", 1)])
async def test_one_rank_alone(c, s, a):
    async with Communicator(c) as comm:
        (found,) = await c.gather(await comm.run(one_rank))
    assert [one.tolist() for one in found] == [list(range(5))] * 4


def explained(comm, _):
    assert comm.explain() == {}
    comm.allreduce(np.ones(1 << 20))
    return comm.explain()


@on_cluster()
async def test_the_choice_is_explained_and_counted(c, s, *workers):
    async with Communicator(c) as comm:
        found = (await c.gather(await comm.run(explained)))[2]
    assert found["operation"] == "all-reduce" and found["nbytes"] == 8 << 20
    assert found["chosen"] == found["candidates"][0]["algorithm"] == "two-level"
    costs = [one["seconds"] for one in found["candidates"]]
    assert costs == sorted(costs) and len(costs) == 5 and found["seconds"] > 0
    counted = s.plugins["gpurt"].collectives.gangs.report()
    assert counted["operations"] == {"all-reduce": 1} and counted["nbytes"] == 8 << 20
    assert counted["algorithms"] == {"two-level": 1}
    shown = as_text({**await c.scheduler.gpurt_status(), "scheduler": s.address})
    assert "1 all-reduce; 8.00 MiB in" in shown and "; two-level 1" in shown


def rate_of(comm, _):
    return comm._costs.rate


@on_cluster([("127.0.0.1", 1), ("127.0.0.2", 1)])
async def test_measured_links_decide(c, s, a, b):
    """The slowest one that a worker knows is the rate for all ranks."""
    async with Communicator(c) as comm:
        usual = await c.gather(await comm.run(rate_of))
        with pytest.MonkeyPatch.context() as patch:
            for worker, peer, rate in ((a, b, 3e7), (b, a, 2e7)):
                known = {peer.address: {"bandwidth": rate}, worker.address: {"bandwidth": 1.0}}
                patch.setattr(runtime_of(worker).links, "report", lambda known=known: known)
            assert await c.gather(await comm.run(rate_of)) == [2e7, 2e7]
    assert usual == [1.25e9, 1.25e9]


@on_cluster()
async def test_few_connections_are_enough(c, s, *workers):
    """Workers of one process share its open files, so each may have few connections."""
    for worker in workers:
        (await runtime_of(worker).links.connections.pool()).limit = 2
    async with Communicator(c) as comm:
        for algorithm in ("one-shot", "ring"):
            with forced("all_reduce", algorithm):
                found = await c.gather(await comm.run(many_sums))
            assert found == [[5.0 * number for number in range(30)]] * 5


def many_sums(comm, _):
    return [float(comm.allreduce(float(number))) for number in range(30)]


@pytest.mark.parametrize("n", [1, 2])
def test_any_and_all_give_zeros_and_ones(n):
    """Also with one rank, which has nothing to combine."""
    rows = np.array([[0, 3], [2, 0]])

    def step(comm, _):
        return [
            [comm.allreduce(rows, op).tolist(), comm.reduce_scatter(rows, op).tolist()]
            for op in ("any", "all")
        ]

    @on_cluster([("127.0.0.1", 1)] * n)
    async def test(c, s, *workers):
        async with Communicator(c) as comm:
            found = await c.gather(await comm.run(step))
        whole = [[0, 1], [1, 0]]
        parts = [whole] if n == 1 else [whole[:1], whole[1:]]
        assert found == [[[whole, part]] * 2 for part in parts]

    test()
