"""The thread that owns UCX, without an event loop: what it does by itself, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from concurrent.futures import Future

import numpy as np
import pytest

from dask_gpurt.errors import TransportError
from dask_gpurt.transport.ucx import UcxEngine
from dask_gpurt.transport.ucx_thread import UcxThread
from tests.transport.ucx_peer import PATIENCE_S

pytest.importorskip("ucxx", reason="the ucx extra is not installed")


@contextlib.contextmanager
def ucx_thread():
    thread = UcxThread("127.0.0.1", {})
    try:
        yield thread, thread.started.result(PATIENCE_S)
    finally:
        thread.close()
        thread.finished.result(PATIENCE_S)


def asked(thread, method, *args):
    """What the thread answers to a call of its switchboard."""
    future = Future()
    assert thread.call(lambda: method(*args, future))
    return future


def test_messages_move_while_nobody_else_does_anything():
    with ucx_thread() as (here, board), ucx_thread() as (there, other_board):
        asked(here, board.connect, other_board.descriptor).result(PATIENCE_S)
        there_token, here_token = other_board.descriptor.token, board.descriptor.token
        source = np.arange(8 << 20, dtype=np.uint32).view(np.uint8)
        target = np.zeros_like(source)
        receiving = asked(there, other_board.receive, here_token, 1, [target])
        sending = asked(here, board.send, there_token, 1, [source])
        # No event loop runs in this process, and this thread only waits.
        sending.result(PATIENCE_S)
        receiving.result(PATIENCE_S)
        np.testing.assert_array_equal(source, target)


def test_calls_are_made_in_order_in_one_thread_of_its_own():
    seen = []
    with ucx_thread() as (thread, _):
        for number in range(100):
            assert thread.call(lambda number=number: seen.append((number, threading.get_ident())))
    numbers, threads = zip(*seen, strict=True)
    assert numbers == tuple(range(100))
    assert len({*threads}) == 1 and threading.get_ident() not in threads


def test_a_thread_that_ended_takes_no_calls():
    with ucx_thread() as (thread, _):
        pass
    assert not thread.call(lambda: pytest.fail("called"))
    thread.close()  # as often as one likes


def test_closing_gives_up_on_a_thread_that_is_stuck_and_the_thread_goes_on():
    async def scenario():
        engine = await UcxEngine.start("127.0.0.1")
        stuck, may_go_on = threading.Event(), threading.Event()
        engine._thread.call(lambda: (stuck.set(), may_go_on.wait(PATIENCE_S)))
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


def test_an_error_in_the_thread_is_told_to_all_who_wait_and_all_who_come():
    async def scenario():
        engine = await UcxEngine.start("127.0.0.1")
        await engine.connect(engine.descriptor, PATIENCE_S)
        buffer = np.zeros(10, dtype=np.uint8)
        waiting = asyncio.create_task(engine.receive(engine.token, 1, [buffer], PATIENCE_S))
        while not engine.report()["under_way"]["receives"]:
            await asyncio.sleep(0)
        engine._thread.call(fail)
        reason = "the UCX thread ended: ZeroDivisionError"
        with pytest.raises(TransportError, match=reason):
            await waiting
        assert engine.is_closing
        await engine.close(PATIENCE_S)
        with pytest.raises(TransportError, match=reason):
            await engine.send(engine.token, 2, [buffer], PATIENCE_S)
        assert any(reason in problem for problem in engine.report()["problems"])

    asyncio.run(scenario())


def test_an_error_of_one_call_is_told_to_whoever_made_it(monkeypatch):
    async def scenario():
        engine = await UcxEngine.start("127.0.0.1")
        monkeypatch.setattr(engine._board, "send", lambda *args: fail())
        # More than one, as those that wait for their turn are made while the thread ends.
        sends = [engine.send("peer", number, [], PATIENCE_S) for number in range(3)]
        for told in await asyncio.gather(*sends, return_exceptions=True):
            assert isinstance(told, TransportError)
            assert "ZeroDivisionError" in str(told)
        await engine.close(PATIENCE_S)

    asyncio.run(scenario())


class Stubborn:
    """An endpoint that UCX fails to close."""

    alive = True

    def __init__(self, endpoint):
        self.endpoint = endpoint

    def close(self):
        fail()


@pytest.mark.parametrize("n_stubborn", [1, 2])
def test_a_link_that_cannot_be_closed_keeps_no_other_one_open(n_stubborn):
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
            failed = [problem for problem in board.problems if "ZeroDivisionError" in problem]
            assert len(failed) == n_stubborn
            here.finished.result(PATIENCE_S)
