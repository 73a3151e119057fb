"""Shielded work completes even if its caller is cancelled, unless the event loop ends."""

from __future__ import annotations

import asyncio
import threading

import pytest

from dask_gpurt.plugins import shielding
from dask_gpurt.plugins.shielding import in_a_thread, to_its_end


def run(coro):
    return asyncio.run(asyncio.wait_for(coro, 120))


def test_cancellation_does_not_reach_shielded_work() -> None:
    async def main() -> None:
        begun, go_on, ended = asyncio.Event(), asyncio.Event(), []

        async def work() -> None:
            begun.set()
            await go_on.wait()
            ended.append(True)

        waiting = asyncio.create_task(to_its_end(work))
        await begun.wait()
        for _ in range(3):
            waiting.cancel()
            await asyncio.sleep(0)
        assert not waiting.done()
        go_on.set()
        assert await waiting
        assert ended == [True]

    run(main())


def test_shielded_work_cancelled_itself_is_called_again() -> None:
    """The end of an event loop cancels all tasks in this way."""

    async def main() -> None:
        calls: list[asyncio.Task[None]] = []
        again = asyncio.Event()

        async def work() -> None:
            task = asyncio.current_task()
            assert task is not None
            calls.append(task)
            if len(calls) == 1:
                again.set()
                await asyncio.Event().wait()

        waiting = asyncio.create_task(to_its_end(work))
        await again.wait()
        for task in (calls[0], waiting):
            task.cancel()
        assert await waiting
        assert len(calls) == 2

    run(main())


def test_shielded_work_that_does_not_end_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shielding, "DEADLINE_S", 0.01)

    async def main() -> None:
        cancelled = asyncio.Event()

        async def work() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        assert not await to_its_end(work)
        await cancelled.wait()

    run(main())


def test_error_of_shielded_work_reaches_the_caller() -> None:
    async def main() -> None:
        async def work() -> None:
            raise OSError("no space")

        with pytest.raises(OSError, match="no space"):
            await to_its_end(work)

        def blocks() -> None:
            raise OSError("no disk")

        with pytest.raises(OSError, match="no disk"):
            await in_a_thread(blocks)

    run(main())


def test_thread_is_waited_for_despite_a_cancellation() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        begun, go_on, ended = asyncio.Event(), threading.Event(), []

        def blocks() -> None:
            loop.call_soon_threadsafe(begun.set)
            go_on.wait()
            ended.append(True)

        waiting = asyncio.create_task(in_a_thread(blocks))
        await begun.wait()
        waiting.cancel()
        await asyncio.sleep(0)
        assert not waiting.done()
        go_on.set()
        assert await waiting
        assert ended == [True]

    run(main())


def test_hanging_thread_does_not_block_the_end_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop waits only for threads of its own executor."""
    monkeypatch.setattr(shielding, "DEADLINE_S", 0.01)
    go_on = threading.Event()

    async def main() -> None:
        assert not await in_a_thread(lambda: bool(go_on.wait()) and None)

    run(main())
    go_on.set()


def test_work_runs_in_the_loop_when_no_thread_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread starts when the interpreter ends."""

    def refuses(self: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    async def main() -> None:
        called: list[bool] = []
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuses)
            assert await in_a_thread(lambda: called.append(True))
        assert called == [True]

    run(main())
