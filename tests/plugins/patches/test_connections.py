"""Contract tests of distributed's connections; large messages leave the loop free."""

from __future__ import annotations

import asyncio
import gc
import inspect
import socket
import weakref
from itertools import chain
from types import SimpleNamespace

import distributed.comm.tcp as tcp
import numpy as np
import pytest
from distributed import Client, Event, LocalCluster, Scheduler, Worker
from distributed.comm import connect, listen
from distributed.core import ConnectionPool, _expects_comm, send_recv
from distributed.protocol import to_serialize
from distributed.utils_test import gen_test

import dask_gpurt
from dask_gpurt.plugins.patches import connections
from dask_gpurt.plugins.patches.connections import (
    PIECE_NBYTES,
    SMALL_NBYTES,
    TASKS_PER_TURN,
    LostPeers,
    ShortTurns,
    drop_message,
    read_in_pieces,
)
from dask_gpurt.process_patch import ProcessPatch

STOCK = tcp.read_bytes_rw


@pytest.fixture(autouse=True)
def nobody_else(monkeypatch):
    """Install stock's function; workers of other tests in this process may still use the patch."""
    monkeypatch.setattr(tcp, "read_bytes_rw", STOCK)
    monkeypatch.setattr(connections, "piecewise_reads", ProcessPatch(connections._read_in_pieces))


@pytest.fixture
def reads(nobody_else):
    holder = Holder()
    release = connections.piecewise_reads.hold(holder)
    yield
    release()
    assert tcp.read_bytes_rw is STOCK


class QuickPeer:
    """A stream whose data has all arrived, so that no read waits."""

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
    """Return a buffer, the lengths in which it was read, and the turns of the loop meanwhile."""
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


def test_comm_receives_a_buffer_by_a_module_function():
    assert list(inspect.signature(STOCK).parameters) == ["stream", "n"]
    assert inspect.getsource(tcp.TCP.read).count("await read_bytes_rw(stream, ") == 2
    # A separate TLS function would have to be replaced as well.
    assert tcp.TLS.read is tcp.TCP.read


def test_stock_blocks_the_loop_while_the_socket_has_data():
    # The reason for the patch.
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
def test_the_loop_runs_after_each_piece(n, lengths, rounds):
    assert asyncio.run(received(read_in_pieces, n)) == (lengths, rounds)


def test_message_arrives_complete(reads):
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


def test_closed_connection_is_noticed(reads):
    async def exchange():
        async def leave(comm):
            # The message has fewer bytes than it announces.
            await comm.stream.write(tcp.struct.pack("Q", 4 * PIECE_NBYTES) + b"x" * PIECE_NBYTES)
            comm.abort()

        async with listen("tcp://127.0.0.1", leave) as listener:
            comm = await connect(listener.contact_address)
            with pytest.raises(tcp.CommClosedError):
                await comm.read()

    asyncio.run(exchange())


# ------------------------------------------------------------------ released memory


@pytest.mark.parametrize("is_let_go_of", [False, True])
def test_unwritten_message_is_kept_until_it_is_dropped(is_let_go_of):
    async def no_answer(comm):
        await asyncio.Event().wait()

    async def fail_to_send(address):
        comm = await connect(address)
        comm.stream.socket.shutdown(socket.SHUT_WR)
        message = np.ones(PIECE_NBYTES, dtype=np.uint8)
        try:
            await send_recv(comm, op="anything", data=to_serialize(message))
        except OSError as error:
            assert "Broken pipe" in str(error)
            if is_let_go_of:
                drop_message(error)
            assert "Broken pipe" in str(error)
            return weakref.ref(message)

    @gen_test()
    async def run():
        listener = await listen("tcp://127.0.0.1", no_answer)
        try:
            kept = await fail_to_send(listener.contact_address)
        finally:
            listener.stop()
        gc.collect()
        assert (kept() is None) == is_let_go_of

    run()


# ------------------------------------------------------------------ retracted messages


class Holder:
    pass


def test_the_patch_stays_until_its_last_holder_is_gone():
    one, other = Holder(), Holder()
    release = connections.piecewise_reads.hold(one)
    connections.piecewise_reads.hold(other)
    release()
    release()
    assert tcp.read_bytes_rw is read_in_pieces
    del other
    assert tcp.read_bytes_rw is STOCK


def test_workers_have_the_patch_while_the_runtime_is_enabled():
    with (
        LocalCluster(
            n_workers=2, threads_per_worker=1, processes=False, dashboard_address=":0"
        ) as cluster,
        Client(cluster) as client,
    ):
        dask_gpurt.enable(client)
        assert tcp.read_bytes_rw is connections.read_in_pieces
        dask_gpurt.disable(client)
        assert tcp.read_bytes_rw is STOCK


class Batches:
    """A connection that delivers messages in the given batches."""

    def __init__(self, *batches):
        self._batches = list(batches)

    async def read(self):
        return self._batches.pop(0)


class Reader:
    """The parts of a worker that `ShortTurns` uses."""

    def __init__(self, comm):
        self.batched_stream = SimpleNamespace(comm=comm)


def tasks(n):
    return [{"op": "compute-task", "key": number} for number in range(n)]


@gen_test()
async def test_long_batch_of_messages_is_handled_in_portions():
    messages = tasks(2 * TASKS_PER_TURN + 3)
    comm = Batches(messages, tuple(messages[:TASKS_PER_TURN]), {"op": "one"}, messages)
    turns = ShortTurns(Reader(comm))
    found = [await comm.read() for _ in range(3)]
    assert [len(one) for one in found] == [TASKS_PER_TURN, TASKS_PER_TURN, 3]
    assert list(chain.from_iterable(found)) == messages
    assert await comm.read() == tuple(messages[:TASKS_PER_TURN])
    assert await comm.read() == {"op": "one"}
    turns.uninstall()
    assert await comm.read() == messages
    assert "read" not in vars(comm)


@pytest.mark.parametrize("other", [{"op": "free-keys"}, {"op": "remove-replicas"}, "OK"])
@gen_test()
async def test_other_parts_of_a_message_are_handled_in_one_turn(other):
    computed = tasks(3 * TASKS_PER_TURN)
    for before in (0, 1, TASKS_PER_TURN, 2 * TASKS_PER_TURN):
        messages = [*computed[:before], other, *computed[before:]]
        comm = Batches(messages)
        turns = ShortTurns(Reader(comm))
        first = await comm.read()
        assert len(first) == max(before + 1, TASKS_PER_TURN)
        rest = []
        while len(first) + len(rest) < len(messages):
            rest += await comm.read()
        assert [*first, *rest] == messages
        turns.uninstall()
    comm = Batches(messages := [*computed, other])
    turns = ShortTurns(Reader(comm))
    assert await comm.read() is messages
    turns.uninstall()


@gen_test()
async def test_the_rest_of_a_message_is_handed_out_after_uninstall():
    messages = tasks(TASKS_PER_TURN + 1)
    comm = Batches(messages, messages)
    turns = ShortTurns(Reader(comm))
    assert await comm.read() == messages[:TASKS_PER_TURN]
    turns.uninstall()
    assert await comm.read() == messages[TASKS_PER_TURN:]
    assert "read" not in vars(comm)
    assert await comm.read() == messages


@gen_test()
async def test_patches_may_overlap_while_a_message_is_handed_out():
    messages = tasks(3 * TASKS_PER_TURN)
    comm = Batches(messages, messages, messages)
    first = ShortTurns(Reader(comm))
    assert await comm.read() == messages[:TASKS_PER_TURN]
    first.uninstall()
    second = ShortTurns(Reader(comm))
    assert await comm.read() == messages[TASKS_PER_TURN : 2 * TASKS_PER_TURN]
    second.uninstall()
    assert await comm.read() == messages[2 * TASKS_PER_TURN :]
    assert "read" not in vars(comm)
    first, second = ShortTurns(Reader(comm)), ShortTurns(Reader(comm))
    first.uninstall()
    assert await comm.read() == messages[:TASKS_PER_TURN]
    second.uninstall()
    assert [*await comm.read(), *await comm.read()] == messages[TASKS_PER_TURN:]
    assert "read" not in vars(comm)
    assert await comm.read() == messages


@gen_test()
async def test_pending_read_returns_the_whole_batch_after_removal():
    messages = tasks(TASKS_PER_TURN + 1)
    arrived = asyncio.Event()

    class Slow(Batches):
        async def read(self):
            await arrived.wait()
            return await super().read()

    comm = Slow(messages)
    turns = ShortTurns(Reader(comm))
    waiting = asyncio.create_task(comm.read())
    await asyncio.sleep(0)
    turns.uninstall()
    arrived.set()
    assert await waiting == messages


@pytest.mark.parametrize("enabled", [True, False])
@gen_test()
async def test_the_loop_runs_while_a_graph_is_handled(enabled):
    n = 10 * TASKS_PER_TURN
    async with (
        Scheduler(dashboard_address=":0", port=0) as s,
        Worker(s.address, nthreads=1) as w,
        Client(s.address, asynchronous=True) as c,
    ):
        turns = ShortTurns(w) if enabled else None
        in_round = most = handled = 0
        stock = w.stream_handlers["compute-task"]

        def count(**kwargs):
            nonlocal in_round, most, handled
            in_round, handled = in_round + 1, handled + 1
            most = max(most, in_round)
            return stock(**kwargs)

        async def rounds():
            nonlocal in_round
            while True:
                await asyncio.sleep(0)
                in_round = 0

        # A message that the worker was already reading is not split.
        await c.submit(int)
        w.stream_handlers["compute-task"] = count
        counting = asyncio.create_task(rounds())
        gate = Event()
        first = c.submit(lambda gate: gate.wait(), gate, workers=[w.address])
        futures = c.map(lambda i, _: i, range(n), _=first, pure=False)
        await gate.set()
        assert await c.gather(futures) == list(range(n))
        counting.cancel()
        assert handled == n + 1
        assert most <= TASKS_PER_TURN if enabled else most > TASKS_PER_TURN
        if turns is not None:
            turns.uninstall()
            assert "read" not in vars(w.batched_stream.comm)


# ------------------------------------------------------------------ lost peers


def test_lost_workers_are_removed_from_pools():
    assert "self.rpc.remove(address)" in inspect.getsource(Scheduler.remove_worker)
    assert "self.rpc.remove(worker)" in inspect.getsource(Worker._handle_remove_worker)
    assert list(inspect.signature(ConnectionPool.remove).parameters) == ["self", "addr", "reason"]


def test_lost_peers_are_told_until_uninstall():
    told, removed = [], []
    pool = ConnectionPool()
    pool.remove = lambda addr, **kwargs: removed.append((addr, kwargs))
    lost = LostPeers(pool, told.append)
    pool.remove("tcp://a:1", reason="gone")
    assert (told, removed) == (["tcp://a:1"], [("tcp://a:1", {"reason": "gone"})])
    lost.uninstall()
    lost.uninstall()
    assert "remove" not in vars(pool)


def test_either_of_two_told_of_lost_peers_may_end_first():
    """A worker has two pools of connections, and either may be idle first."""
    told = []
    pool = ConnectionPool()
    first, second = (LostPeers(pool, told.append) for _ in range(2))
    first.uninstall()
    pool.remove("tcp://a:1")
    assert told == ["tcp://a:1"]
    second.uninstall()
    pool.remove("tcp://b:1")
    assert told == ["tcp://a:1"]
    assert "remove" not in vars(pool)


def test_forgotten_handlers_are_not_kept_alive():
    class Owner:
        async def handler(self, comm):
            pass

    owner = Owner()
    gone = weakref.ref(owner)
    assert _expects_comm(owner.handler)
    del owner
    assert gone() is not None, "Dask keeps no handlers any more: drop forget_handlers"
    connections.forget_handlers()
    assert gone() is None
