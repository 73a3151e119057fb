"""Exchanges in two steps give the same results, over few links, also when a relay fails."""

from __future__ import annotations

import asyncio

import dask
import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from distributed.utils_test import gen_cluster

from dask_gpurt.plugins.shuffle import peer_connections
from dask_gpurt.plugins.shuffle.messenger import Messenger
from dask_gpurt.plugins.shuffle.relay import Relay
from dask_gpurt.plugins.worker.worker_runtime import runtime_of
from dask_gpurt.shuffle.routing import host_of

#: Two addresses of this machine stand for two hosts.
HOSTS = [("127.0.0.1", 1)] * 2 + [("127.0.0.2", 1)] * 2
ROWS = 3_000


def config(**settings):
    return {
        "gpurt.enabled": True,
        "gpurt.strict": True,
        "gpurt.shuffle.routing": "two-level",
        "distributed.p2p.comm.retry.count": 0,
        **settings,
    }


def part(number):
    rng = np.random.default_rng(number)
    return pd.DataFrame(
        {
            "key": rng.integers(0, 1000, ROWS),
            "x": rng.random(ROWS),
            "name": pd.array(rng.choice(["a", "bb", "ccc"], ROWS), dtype="str"),
        }
    )


def shuffled():
    lazy = dd.from_map(part, range(12), meta=part(0).iloc[:0])
    with dask.config.set({"dataframe.shuffle.method": "p2p"}):
        return lazy.shuffle("key", npartitions=8)


async def assert_right(c):
    got = await c.compute(shuffled())
    # Dask turns strings into its own type of them.
    whole = pd.concat([part(number) for number in range(12)]).astype(got.dtypes)
    by = ["key", "x"]
    pd.testing.assert_frame_equal(
        got.sort_values(by).reset_index(drop=True), whole.sort_values(by).reset_index(drop=True)
    )


def links_between_hosts(workers):
    return {
        frozenset((worker.address, peer))
        for worker in workers
        for peer in runtime_of(worker).links.report()
        if host_of(peer) != host_of(worker.address)
    }


@pytest.mark.parametrize("transport", ["auto", "comm"])
def test_rows_arrive_over_one_link_for_each_worker(transport):
    @gen_cluster(
        client=True, nthreads=HOSTS, config=config(**{"gpurt.shuffle.transport": transport})
    )
    async def test(c, s, *workers):
        await assert_right(c)
        assert len(links_between_hosts(workers)) == 2

    test()


def test_relays_do_not_wait_for_each_other(monkeypatch):
    """Each worker has two connections for its messages, and two for those that it hands on."""
    monkeypatch.setattr(peer_connections, "open_files", lambda: (16, 16))

    @gen_cluster(client=True, nthreads=HOSTS, config=config(**{"gpurt.shuffle.transport": "comm"}))
    async def test(c, s, *workers):
        for _ in range(3):
            await assert_right(c)
        assert (await runtime_of(workers[0]).links.connections.pool()).limit == 2

    test()


@gen_cluster(client=True, nthreads=HOSTS, config=config(**{"gpurt.shuffle.routing": "direct"}))
async def test_directly_each_worker_has_a_link_to_each(c, s, *workers):
    await assert_right(c)
    assert len(links_between_hosts(workers)) == 4


@gen_cluster(client=True, nthreads=HOSTS, config=config())
async def test_chunks_of_arrays_arrive_too(c, s, *workers):
    x = da.random.default_rng(1).random((400, 400), chunks=(40, 400))
    with dask.config.set({"array.rechunk.method": "p2p"}):
        y = x.rechunk((400, 40))
    x, y = await c.gather(c.compute([x, y]))
    np.testing.assert_array_equal(y, x)
    assert 1 <= len(links_between_hosts(workers)) <= 2


@gen_cluster(client=True, nthreads=HOSTS, config=config())
async def test_shards_go_round_a_relay_that_cannot_hand_them_on(c, s, *workers):
    """One worker reaches no peer of its own host any more."""
    failing, n_around = workers[0], []
    hand_on, send_around = Relay.divide, Messenger.send_around

    async def divide(relay, header, payload):
        if relay._own == failing.address:
            raise OSError("no way into this host")
        return await hand_on(relay, header, payload)

    async def around(messenger, relay, shards):
        n_around.append(relay)
        return await send_around(messenger, relay, shards)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Relay, "divide", divide)
        patch.setattr(Messenger, "send_around", around)
        await assert_right(c)
    assert set(n_around) == {failing.address}


#: As by default: until the scheduler has noticed that a worker left, others try again.
PATIENT = {"distributed.p2p.comm.retry.count": 10, "gpurt.strict": False}


@gen_cluster(client=True, nthreads=HOSTS, config=config(**PATIENT))
async def test_a_relay_may_leave_while_it_hands_on(c, s, *workers):
    divide, closing = Relay.divide, []

    async def leave_instead(relay, header, payload):
        if not closing:
            closing.append(relay._own)
            (one,) = [worker for worker in workers if worker.address == relay._own]
            closing.append(asyncio.create_task(one.close()))
            await asyncio.Event().wait()
        return await divide(relay, header, payload)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Relay, "divide", leave_instead)
        await assert_right(c)
        await closing[1]
    assert len(s.workers) == 3
