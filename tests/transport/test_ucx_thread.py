"""The thread that owns UCX works without an event loop, and ends cleanly."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import Future

import numpy as np
import pytest

from dask_gpurt.errors import TransportError
from dask_gpurt.transport.ucx.engine import UcxEngine
from dask_gpurt.transport.ucx.thread import UcxThread
from tests.transport.ucx_peer import PATIENCE_S, invite_anybody
from tests.transport.ucx_processes import over_both

pytest.importorskip("ucxx", reason="the ucx extra is not installed")


@contextlib.contextmanager
def ucx_thread(options=None):
    thread = UcxThread.begin("127.0.0.1", options or {})
    try:
        board = thread.started.result(PATIENCE_S)
        asked(thread, board.invite, "0" * 32, 600).result(PATIENCE_S)
        yield thread, board
    finally:
        thread.close()
        thread.finished.result(PATIENCE_S)


def asked(thread, method, *args):
    """Call a method of the thread's switchboard; return a future of the result."""
    future = Future()
    assert thread.call(lambda: method(*args, future))
    return future


def until(condition):
    """Poll for a state of the thread that has no notification."""
    give_up = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up
        os.sched_yield()


def test_messages_move_without_an_event_loop():
    with ucx_thread() as (here, board), ucx_thread() as (there, other_board):
        asked(here, board.connect, other_board.descriptor).result(PATIENCE_S)
        there_token, here_token = other_board.descriptor.token, board.descriptor.token
        source = np.arange(8 << 20, dtype=np.uint32).view(np.uint8)
        target = np.zeros_like(source)
        receiving = asked(there, other_board.receive, here_token, 1, [target])
        sending = asked(here, board.send, there_token, 1, [source])
        # No event loop runs in this process, so only UCX's thread can do the work.
        sending.result(PATIENCE_S)
        receiving.result(PATIENCE_S)
        np.testing.assert_array_equal(source, target)


def test_calls_run_in_order_in_one_thread():
    seen = []
    with ucx_thread() as (thread, _):
        for number in range(100):
            assert thread.call(lambda number=number: seen.append((number, threading.get_ident())))
    numbers, threads = zip(*seen, strict=True)
    assert numbers == tuple(range(100))
    assert len({*threads}) == 1 and threading.get_ident() not in threads


def test_ended_thread_refuses_calls():
    with ucx_thread() as (thread, _):
        pass
    assert not thread.call(lambda: pytest.fail("called"))
    thread.close()  # repeated calls are harmless


def test_closed_engine_refuses_calls_and_leaves_its_thread():
    async def scenario():
        options = {"TLS": "tcp,self"}  # no other test uses these
        closed = await invite_anybody(await UcxEngine.start("127.0.0.1", options))
        await closed.close(PATIENCE_S)
        caller = await invite_anybody(await UcxEngine.start("127.0.0.1"))
        # UCX still listens: freeing a listener during a connection crashes the process.
        with pytest.raises(TransportError, match="UCX link to"):
            await caller.connect(closed.descriptor, PATIENCE_S)
        n_threads = threading.active_count()
        engine = await invite_anybody(await UcxEngine.start("127.0.0.1", options))
        assert threading.active_count() == n_threads
        assert engine.descriptor["port"] == closed.descriptor["port"]
        with pytest.raises(TransportError, match="another engine answered"):
            await caller.connect(closed.descriptor, PATIENCE_S)
        await caller.connect(engine.descriptor, PATIENCE_S)
        await closed.close(PATIENCE_S)  # a second close does not end the next engine
        buffers = [np.arange(10, dtype=np.uint8), np.zeros(10, dtype=np.uint8)]
        await asyncio.gather(
            caller.send(engine.token, 1, buffers[:1], PATIENCE_S),
            engine.receive(caller.token, 1, buffers[1:], PATIENCE_S),
        )
        np.testing.assert_array_equal(*buffers)
        assert closed.report()["peers"] == {} and engine.report()["peers"] == {caller.token: 1}
        # While the thread is in use, another engine gets a new one.
        other = await invite_anybody(await UcxEngine.start("127.0.0.1", options))
        assert other.descriptor["port"] != engine.descriptor["port"]
        for one in (engine, other, caller):
            await one.close(PATIENCE_S)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("os.eventfd", OSError(errno.EMFILE, "Too many open files")),
        ("select.epoll", OSError(errno.EMFILE, "Too many open files")),
        ("threading.Thread.start", RuntimeError("can't start new thread")),
    ],
)
def test_engine_reports_exhausted_process_limits(monkeypatch, what, error):
    """The error names the missing resource, and a later start can succeed."""

    async def scenario():
        options = {"TLS": "tcp", "TCP_MAX_POLL": str(len(what))}  # no other test uses these

        def refuse(*args):
            raise error

        with monkeypatch.context() as without:
            without.setattr(f"dask_gpurt.transport.ucx.thread.{what}", refuse)
            with pytest.raises(TransportError, match=f"UCX does not start: .*{error.args[-1]}"):
                await UcxEngine.start("127.0.0.1", options)
        engine = await invite_anybody(await UcxEngine.start("127.0.0.1", options))
        await engine.close(PATIENCE_S)

    asyncio.run(scenario())


def test_a_thread_that_failed_serves_no_further_engine():
    async def scenario():
        options = {"TLS": "self,tcp"}  # no other test uses these
        engine = await invite_anybody(await UcxEngine.start("127.0.0.1", options))
        engine._session.call(fail)
        await asyncio.wrap_future(engine._session.finished)
        other = await invite_anybody(await UcxEngine.start("127.0.0.1", options))
        assert other.descriptor["port"] != engine.descriptor["port"]
        await other.close(PATIENCE_S)

    asyncio.run(scenario())


def test_closing_abandons_a_stuck_thread_that_continues():
    async def scenario():
        engine = await invite_anybody(await UcxEngine.start("127.0.0.1"))
        stuck, may_go_on = threading.Event(), threading.Event()
        engine._session.call(lambda: (stuck.set(), may_go_on.wait(PATIENCE_S)))
        try:
            assert await asyncio.to_thread(stuck.wait, PATIENCE_S)
            with pytest.raises(TransportError, match=r"did not close within 0\.01 s"):
                await engine.close(0.01)
            assert not engine.report()["is_closed"]
        finally:
            may_go_on.set()
        await engine.close(PATIENCE_S)
        assert engine.report()["is_closed"]

    asyncio.run(scenario())


def fail():
    raise ZeroDivisionError("a mistake")


def test_thread_error_is_raised_in_pending_and_later_calls():
    async def scenario():
        engine = await invite_anybody(await UcxEngine.start("127.0.0.1"))
        await engine.connect(engine.descriptor, PATIENCE_S)
        buffer = np.zeros(10, dtype=np.uint8)
        waiting = asyncio.create_task(engine.receive(engine.token, 1, [buffer], PATIENCE_S))
        while not engine.report()["under_way"]["receives"]:
            await asyncio.sleep(0)
        engine._session.call(fail)
        reason = "the UCX thread ended: ZeroDivisionError"
        with pytest.raises(TransportError, match=reason):
            await waiting
        assert engine.is_closing
        await engine.close(PATIENCE_S)
        with pytest.raises(TransportError, match=reason):
            await engine.send(engine.token, 2, [buffer], PATIENCE_S)
        assert any(reason in problem for problem in engine.report()["problems"])

    asyncio.run(scenario())


def test_an_error_of_one_call_is_raised_in_its_caller(monkeypatch):
    async def scenario():
        engine = await invite_anybody(await UcxEngine.start("127.0.0.1"))
        monkeypatch.setattr(engine._board, "send", lambda *args: fail())
        # Several, because some calls are added while the thread ends.
        sends = [engine.send("peer", number, [], PATIENCE_S) for number in range(3)]
        for told in await asyncio.gather(*sends, return_exceptions=True):
            assert isinstance(told, TransportError)
            assert "ZeroDivisionError" in str(told)
        await engine.close(PATIENCE_S)

    asyncio.run(scenario())


@over_both
def test_a_link_is_closed_after_incoming_data_has_arrived(options):
    """Otherwise UCX would write through freed memory, and crash now and then."""
    with ucx_thread(options) as (here, board), ucx_thread(options) as (there, other_board):
        asked(there, other_board.connect, board.descriptor).result(PATIENCE_S)
        there_token, here_token = other_board.descriptor.token, board.descriptor.token
        buffer = np.zeros(8 << 20, dtype=np.uint8)
        stopped, may_go_on = threading.Event(), threading.Event()

        def send_and_stop(future):
            other_board.send(here_token, 1, [np.ones_like(buffer)], future)
            stopped.set()
            may_go_on.wait(PATIENCE_S)

        sending = asked(there, send_and_stop)
        assert stopped.wait(PATIENCE_S)
        # Announced and posted; the sender does not answer yet.
        receiving = asked(here, board.receive, there_token, 1, [buffer])
        until(lambda: any(getattr(t, "is_posted", False) for t in list(board._transfers)))
        (link,) = board._links.values()
        asked(here, board.disconnect, there_token).result(PATIENCE_S)
        with pytest.raises(TransportError, match="disconnected here"):
            receiving.result(PATIENCE_S)
        assert not board.peers()
        assert link.endpoint.alive
        assert board.under_way()["closing_links"] == 1
        assert board.held_nbytes() >= buffer.nbytes
        may_go_on.set()
        sending.result(PATIENCE_S)
        until(lambda: not any(board.under_way().values()))
        # UCX's thread lets go of them right after.
        until(lambda: not board.held_nbytes() and not link.endpoint.alive)


def test_closing_fails_announced_messages():
    with ucx_thread() as (_, other_board):
        with ucx_thread() as (here, board):
            asked(here, board.connect, other_board.descriptor).result(PATIENCE_S)
            buffer = np.zeros(8 << 20, dtype=np.uint8)
            sending = asked(here, board.send, other_board.descriptor.token, 1, [buffer])
            until(lambda: other_board.under_way()["unclaimed_parcels"] == 2)
        with pytest.raises(TransportError, match="closed"):
            sending.result(PATIENCE_S)
        # The other side dropped the message before it closed; otherwise it would keep it forever.
        assert not board.held_nbytes()
        assert not any(board.under_way().values())
        assert other_board.counters["dropped_parcels"] >= 2


class Stubborn:
    """An endpoint that UCX fails to close."""

    alive = True

    def __init__(self, endpoint):
        self.endpoint = endpoint

    def close(self):
        fail()


@pytest.mark.parametrize("n_stubborn", [1, 2])
def test_a_link_that_fails_to_close_does_not_keep_others_open(n_stubborn):
    with ucx_thread() as (here, board):
        with ucx_thread() as (_, one), ucx_thread() as (_, other):
            for there in (one, other):
                asked(here, board.connect, there.descriptor).result(PATIENCE_S)
            buffer = np.zeros(10, dtype=np.uint8)
            tokens = [there.descriptor.token for there in (one, other)]
            waiting = [asked(here, board.receive, token, 1, [buffer]) for token in tokens]

            def lose_all():
                links = list(board._links.values())
                for link in links[:n_stubborn]:
                    link.endpoint = Stubborn(link.endpoint)
                board.close("as was asked")
                kept.set_result(links)

            kept = Future()
            here.call(lose_all)
            links = kept.result(PATIENCE_S)
            for one_waiting in waiting:
                with pytest.raises(TransportError, match="as was asked"):
                    one_waiting.result(PATIENCE_S)
            assert len(links) == 2 and not board._links and not board.peers()
            here.finished.result(PATIENCE_S)
            failed = [problem for problem in board.problems if "ZeroDivisionError" in problem]
            assert len(failed) == n_stubborn


def test_first_engine_of_a_process_leaves_its_thread():
    """It does so although the import of `ucxx` sets UCX options in the environment."""
    script = """
import asyncio
from dask_gpurt.transport.ucx.engine import UcxEngine

async def port():
    engine = await UcxEngine.start("127.0.0.1")
    await engine.close(10)
    return engine.descriptor["port"]

print(len({asyncio.run(port()) for _ in range(3)}))
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "1\n"


def test_engines_that_start_at_once_filter_their_own_sockets():
    """Closed sockets of one engine must not drop the connections that another one waits for."""
    # Options that no other test has, so that each engine gets a new UCX context.
    sessions = [UcxThread.begin("127.0.0.1", {"TCP_RX_SEG_SIZE": f"{65 + n}k"}) for n in range(4)]
    try:
        for session in sessions:
            session.started.result(PATIENCE_S)
        sockets = [set(session._thread._sockets._fds) for session in sessions]
        assert all(sockets)
        assert len(set.union(*sockets)) == sum(map(len, sockets))
    finally:
        for session in sessions:
            session.close()
