"""A worker reads messages in the memory of a peer on its host, and refuses damaged ones."""

from __future__ import annotations

import asyncio
import threading
import weakref

import numpy as np
import pytest

from dask_gpurt.devices.host_memory.pages import SharedPages
from dask_gpurt.devices.host_memory.pool import HostPool
from dask_gpurt.devices.lanes import Lane
from dask_gpurt.errors import (
    DamagedError,
    ProtocolError,
)
from dask_gpurt.plugins.shuffle.arrivals import LEAST_THREAD_NBYTES
from dask_gpurt.plugins.shuffle.peer_links import DAMAGED
from dask_gpurt.shuffle.messages import Message
from dask_gpurt.transport import shared
from tests.limits import HANG_S
from tests.plugins.shuffle.links_rig import RunIsOver, compose, with_links

# ------------------------------------------------------------------ memory of a peer


class Peer:
    """A peer that lends buffers of these sizes, and sends three bytes more in its message."""

    def __init__(self, *sizes):
        memory = SharedPages()
        self._lender = shared.Lender(memory)
        pool = HostPool(0, source=memory)
        self.lengths = [*sizes, 3]
        self.lent = [pool.empty(nbytes, lane="outgoing") for nbytes in sizes]
        for number, buffer in enumerate(self.lent, 1):
            buffer[:] = number
        self.offer = {"shared": self._lender.descriptor}
        places = [self._lender.place(buffer) for buffer in self.lent]
        token = self._lender.descriptor["token"]
        self.payload = {"by": "shared", "token": token, "places": [*places, b"end"]}
        self.sign()

    def sign(self):
        self.payload["seal"] = shared.seal(self.payload["token"], self.payload["places"])

    def fetched_by(self, links, beside):
        return links.fetch(self.payload, self.lengths, empty, beside)

    def assert_equal(self, buffers):
        assert [bytes(buffer) for buffer in buffers] == [*map(bytes, self.lent), b"end"]


def empty(number, nbytes):
    return np.empty(nbytes, dtype=np.uint8)


async def never(nbytes, read):
    raise AssertionError("not worth a thread")


def in_lane(lane, asked):
    async def beside(read):
        asked.append(read)
        await asyncio.wrap_future(lane.submit(read))

    return beside


def test_only_large_messages_are_read_outside_of_the_loop():
    async def test(links):
        large = Peer(LEAST_THREAD_NBYTES - 100_000, 100_000 - 3)
        small = Peer(LEAST_THREAD_NBYTES - 100_000, 100_000 - 4)
        asked = []
        with Lane("beside") as lane:
            for peer in (large, small):
                assert (await links.accept(peer.offer))["why_not"] is None
            large.assert_equal(await large.fetched_by(links, in_lane(lane, asked)))
            small.assert_equal(await small.fetched_by(links, never))
        assert len(asked) == 1

    with_links(test)


def test_an_incomplete_message_is_not_read_at_all():
    async def test(links):
        peer = Peer(LEAST_THREAD_NBYTES)
        peer.payload["places"][-1] = b"too long"
        peer.sign()
        await links.accept(peer.offer)
        with pytest.raises(ProtocolError, match="received 8 of 3 bytes"):
            await peer.fetched_by(links, never)

    with_links(test)


#: Smaller buffers are not in shared memory.
PLACED_NBYTES = 100_000


@pytest.mark.parametrize(
    "damaged",
    [
        lambda place, end: [[(place - 64, PLACED_NBYTES)], end],
        lambda place, end: [[(place, PLACED_NBYTES - 1), (place, 1)], end],
        lambda place, end: [[(place, PLACED_NBYTES)], b"enD"],
        lambda place, end: [[(place, PLACED_NBYTES)], end, b""],
        lambda place, end: [end, [(place, PLACED_NBYTES)]],
    ],
    ids=["elsewhere", "cut otherwise", "other bytes", "one more", "another order"],
)
def test_damaged_places_are_not_read(damaged):
    """Damaged places may be inside the lent memory, and lead to other rows."""

    async def test(links):
        peer = Peer(PLACED_NBYTES)
        await links.accept(peer.offer)
        [[(place, nbytes)], end] = peer.payload["places"]
        assert nbytes == PLACED_NBYTES
        peer.payload["places"] = damaged(place, end)
        with pytest.raises(DamagedError, match="damaged on their way"):
            await peer.fetched_by(links, never)

    with_links(test)


@pytest.mark.parametrize("parts", [None, 7, [None], ["text"], [[("a", 1)]], [[(-1, 1)]]])
def test_malformed_places_are_refused(parts):
    async def test(links):
        peer = Peer(PLACED_NBYTES)
        await links.accept(peer.offer)
        peer.payload["places"] = parts
        with pytest.raises(ProtocolError):
            await peer.fetched_by(links, never)

    with_links(test)


def test_a_read_without_a_waiting_caller_finishes(monkeypatch):
    begun, may_go_on = threading.Event(), threading.Event()
    read_into = shared._read_into

    def held(*args):
        begun.set()
        assert may_go_on.wait(HANG_S)
        read_into(*args)

    monkeypatch.setattr(shared, "_read_into", held)

    async def test(links):
        peer = Peer(LEAST_THREAD_NBYTES)
        await links.accept(peer.offer)
        with Lane("beside") as lane:
            jobs = []

            async def beside(read):
                jobs.append(lane.submit(read))
                await asyncio.wrap_future(jobs[0])

            fetching = asyncio.create_task(peer.fetched_by(links, beside))
            assert await asyncio.to_thread(begun.wait, HANG_S)
            fetching.cancel()
            with pytest.raises(asyncio.CancelledError):
                await fetching
            await links.disconnect()
            may_go_on.set()
            assert jobs[0].result(HANG_S) is None

    try:
        with_links(test)
    finally:
        may_go_on.set()


# ------------------------------------------------------------------ where peers reach our engine


@pytest.mark.parametrize("n_damaged", [1, 2, 3])
def test_message_damaged_three_times_is_a_clear_error(n_damaged):
    async def test(links):
        sent = []

        async def call(data):
            if "offers" in data:
                return {"status": "OK", "ours": None, "why_not": None}
            sent.append(data)
            return {"status": DAMAGED if len(sent) <= n_damaged else "OK"}

        delivery = links.deliver("tcp://peer:1", "auto", compose, call)
        if n_damaged < 3:
            await delivery
            assert len(sent) == n_damaged + 1
            return
        with pytest.raises(DamagedError, match="3 times in a row a message to tcp://peer:1"):
            await delivery
        assert len(sent) == 3

    with_links(test)


def test_second_error_does_not_keep_the_first_message_alive():
    async def test(links):
        made = []

        async def compose_once(path):
            if made:
                raise RunIsOver
            buffer = np.zeros(10, dtype=np.uint8)
            made.append(weakref.ref(buffer))
            return Message(b"", [buffer])

        async def call(data):
            return {"status": DAMAGED}

        with pytest.raises(RunIsOver) as error:
            await links.deliver("peer", "comm", compose_once, call)
        assert made[0]() is None
        del error

    with_links(test)


@pytest.mark.parametrize(
    ("transport", "stays"), [("auto", True), ("comm", False), ("device", False)]
)
def test_on_host_has_only_peers_whose_path_is_known(transport, stays):
    async def test(links):
        async def call(data):
            return {"status": "OK", "ours": None, "why_not": None}

        assert links.on_host("auto") == set()
        await links.deliver("peer", "auto", compose, call)
        assert links.on_host(transport) == ({"peer"} if stays else set())
        links._forget("peer", "auto")
        assert links.on_host("auto") == set()
        await links.deliver("peer", "auto", compose, call)
        assert links.on_host(transport) == ({"peer"} if stays else set())
        links.cool_down()
        assert links.on_host("auto") == set()

    with_links(test)
