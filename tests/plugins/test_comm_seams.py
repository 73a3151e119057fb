"""What is replaced of distributed's connections, and that large messages leave the loop free."""

from __future__ import annotations

import asyncio
import inspect

import distributed.comm.tcp as tcp
import numpy as np
import pytest
from distributed import Client, LocalCluster
from distributed.comm import connect, listen
from distributed.protocol import to_serialize

import dask_gpurt
from dask_gpurt.plugins import comm_seams
from dask_gpurt.plugins.comm_seams import PIECE_NBYTES, SMALL_NBYTES, PiecewiseReads, read_in_pieces

STOCK = tcp.read_bytes_rw


@pytest.fixture(autouse=True)
def nobody_else(monkeypatch):
    """Workers of other tests in this process may have it so still."""
    monkeypatch.setattr(tcp, "read_bytes_rw", STOCK)
    monkeypatch.setattr(comm_seams, "_replaced", comm_seams._Replaced())


@pytest.fixture
def reads(nobody_else):
    reads = PiecewiseReads()
    yield reads
    reads.end()
    assert tcp.read_bytes_rw is STOCK


class QuickPeer:
    """A stream with everything at hand, so that no read of it ever waits."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)
        self.lengths: list[int] = []

    def read_into(self, buffer: memoryview) -> asyncio.Future[int]:
        n = len(buffer)
        buffer[:], self._data = self._data[:n], self._data[n:]
        self.lengths.append(n)
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        done.set_result(n)
        return done


async def received(read, n):
    """A buffer and the lengths in which it was read; rounds of the loop meanwhile."""
    data = np.random.default_rng(n).bytes(n)
    peer = QuickPeer(data)
    rounds = 0

    async def count():
        nonlocal rounds
        while True:
            rounds += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    buffer = await read(peer, n)
    counting.cancel()
    assert bytes(buffer) == data
    assert not buffer.readonly
    return peer.lengths, rounds


# ------------------------------------------------------------------ contracts


def test_a_buffer_is_received_by_a_function_of_the_module():
    assert list(inspect.signature(STOCK).parameters) == ["stream", "n"]
    assert inspect.getsource(tcp.TCP.read).count("await read_bytes_rw(stream, ") == 2
    # One for TLS would have to be replaced as well.
    assert tcp.TLS.read is tcp.TCP.read


def test_stock_keeps_the_loop_as_long_as_there_is_something_to_read():
    # Were it otherwise, there would be nothing to replace.
    lengths, rounds = asyncio.run(received(STOCK, 8 * PIECE_NBYTES))
    assert lengths == [8 * PIECE_NBYTES]
    assert rounds == 0


# ------------------------------------------------------------------ reading


@pytest.mark.parametrize(
    ("n", "lengths", "rounds"),
    [
        (0, [], 0),
        (1, [1], 0),
        (SMALL_NBYTES - 1, [SMALL_NBYTES - 1], 0),
        (SMALL_NBYTES, [SMALL_NBYTES], 1),
        (PIECE_NBYTES, [PIECE_NBYTES], 1),
        (PIECE_NBYTES + 1, [PIECE_NBYTES, 1], 1),
        (8 * PIECE_NBYTES, [PIECE_NBYTES] * 8, 8),
    ],
)
def test_the_loop_comes_round_after_each_piece(n, lengths, rounds):
    assert asyncio.run(received(read_in_pieces, n)) == (lengths, rounds)


def test_a_message_arrives_whole(reads):
    sent = [np.random.default_rng(n).random(n) for n in (3, 100_000, 5_000_001)]

    async def exchange():
        async def send(comm):
            await comm.write([to_serialize(array) for array in sent])
            await comm.close()

        async with listen("tcp://127.0.0.1", send) as listener:
            comm = await connect(listener.contact_address)
            found = await comm.read()
            await comm.close()
        return found

    for array, found in zip(sent, asyncio.run(exchange()), strict=True):
        np.testing.assert_array_equal(found, array)
        assert found.flags.writeable


def test_a_peer_that_goes_away_is_noticed(reads):
    async def exchange():
        async def leave(comm):
            # A length, and then less than that.
            await comm.stream.write(tcp.struct.pack("Q", 4 * PIECE_NBYTES) + b"x" * PIECE_NBYTES)
            comm.abort()

        async with listen("tcp://127.0.0.1", leave) as listener:
            comm = await connect(listener.contact_address)
            with pytest.raises(tcp.CommClosedError):
                await comm.read()

    asyncio.run(exchange())


# ------------------------------------------------------------------ taken back


def test_it_stays_until_the_last_worker_has_let_go(reads):
    other = PiecewiseReads()
    assert tcp.read_bytes_rw is read_in_pieces
    other.end()
    other.end()
    assert tcp.read_bytes_rw is read_in_pieces


def test_a_worker_that_is_gone_without_a_word_has_let_go():
    reads = PiecewiseReads()
    assert tcp.read_bytes_rw is read_in_pieces
    del reads
    assert tcp.read_bytes_rw is STOCK


def test_workers_have_it_while_the_runtime_is_on():
    with (
        LocalCluster(
            n_workers=2, threads_per_worker=1, processes=False, dashboard_address=":0"
        ) as cluster,
        Client(cluster) as client,
    ):
        dask_gpurt.enable(client)
        assert tcp.read_bytes_rw is comm_seams.read_in_pieces
        dask_gpurt.disable(client)
        assert tcp.read_bytes_rw is STOCK
