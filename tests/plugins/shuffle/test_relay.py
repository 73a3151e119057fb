"""A relay answers once all shards were handed on, also if one of them could not be."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from dask_gpurt.errors import DamagedError, TransportError
from dask_gpurt.plugins.shuffle.relay import Relay
from dask_gpurt.shuffle import envelope
from dask_gpurt.transport import wire

OWN, *PEERS = "tcp://h:1", "tcp://h:2", "tcp://h:3"


class MadePost:
    """Delivers to peers that raise, and to others when the test lets it."""

    def __init__(self, own=None, refuses=()):
        self.own, self.refuses = own, refuses
        self.may_deliver = asyncio.Event()
        self.delivered = []

    async def fetch(self, payload, lengths, empty):
        return [empty(number, nbytes) for number, nbytes in enumerate(lengths)]

    async def opened(self, headers, buffers, *, inside):
        if self.own is not None:
            raise self.own
        return ["own"]

    async def deliver(self, address, transport, compose):
        if address in self.refuses:
            raise TransportError("gone")
        await self.may_deliver.wait()
        self.delivered.append(address)

    async def in_lane(self, path, nbytes, function, *arguments):
        return function(*arguments)


def divided(post):
    def memory(nbytes, *_):
        return np.empty(nbytes, np.uint8)

    rows = wire.pack_rows([1])
    shard = wire.ShardHeader(b"", 0, 1, 0, 1, 0, rows, 8, parts=(8,), checksum=5)
    forwards = [envelope.Forward(one, wire.encode([shard])) for one in (*PEERS, OWN)]
    relay = Relay(post, "auto", OWN, PEERS, memory, memory, 1 << 30)
    return relay.divide(envelope.encode(forwards), [b"x" * 8] * 3)


def test_the_others_end_before_a_failure_is_reported():
    """The sender may send the message again, and peers still read from the buffers."""

    async def run():
        post = MadePost(refuses=PEERS[:1])
        dividing = asyncio.create_task(divided(post))
        for _ in range(20):  # turns of the loop: more than a failure needs to come through
            await asyncio.sleep(0)
        assert not dividing.done()
        post.may_deliver.set()
        with pytest.raises(TransportError, match="gone"):
            await dividing
        assert post.delivered == PEERS[1:]

    asyncio.run(run())


def test_nothing_is_handed_on_if_the_own_shard_is_damaged():
    async def run():
        post = MadePost(own=DamagedError("checksum"))
        post.may_deliver.set()
        with pytest.raises(DamagedError, match="checksum"):
            await divided(post)
        assert not post.delivered

    asyncio.run(run())


def test_shards_of_others_are_handed_on():
    async def run():
        post = MadePost()
        post.may_deliver.set()
        assert await divided(post) == ["own"]
        assert post.delivered == PEERS

    asyncio.run(run())
