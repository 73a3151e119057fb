"""Broadcasts return the answers of responding workers if others fail or stay silent."""

from __future__ import annotations

import asyncio

import pytest
from distributed.utils_test import captured_logger, gen_cluster

from dask_gpurt.plugins import ask_workers
from dask_gpurt.plugins.ask_workers import ask


def say(worker, answer):
    """Let a worker answer with its own addition."""

    async def x(number):
        return answer + number

    worker.handlers["x"] = x


class Silence:
    """A handler that does not answer before its test lets it."""

    def __init__(self, worker):
        self.is_asked, self.may_answer = asyncio.Event(), asyncio.Event()
        worker.handlers["x"] = self.x

    async def x(self, number):
        self.is_asked.set()
        await self.may_answer.wait()
        return f"late {number}"


@gen_cluster(nthreads=[("", 1)] * 3)
async def test_answers_arrive_although_a_worker_is_silent(s, a, b, c, monkeypatch):
    say(a, 10)
    silence = Silence(b)
    say(c, "text")

    async def until_others_have(asked, deadline_s):
        assert deadline_s == 7
        await silence.is_asked.wait()
        while sum(not one.done() for one in asked) > 1:
            late = [one for one in asked if not one.done()]
            await asyncio.wait(late, return_when=asyncio.FIRST_COMPLETED)

    monkeypatch.setattr(ask_workers, "_until_late", until_others_have)
    with captured_logger("distributed.scheduler") as logged, captured_logger("distributed.core"):
        said, silent = await ask(s, "x", [a.address, b.address, c.address], 7, number=1)
    assert list(said) == [a.address, c.address]
    assert said[a.address] == 11
    assert "concatenate" in str(said[c.address])
    assert silent == [b.address]
    assert logged.getvalue() == ""


@gen_cluster(nthreads=[("", 1)])
async def test_cancelled_call_leaves_no_late_answer(s, a):
    silence = Silence(a)
    asking = asyncio.create_task(ask(s, "x", [a.address], 1e9, number=1))
    await silence.is_asked.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    silence.may_answer.set()
    assert (await ask(s, "x", [a.address], 1e9, number=2)).received == {a.address: "late 2"}
    assert s.rpc.active == 0
    # The second call's connection stays open for the next ones.
    assert (await ask(s, "x", [a.address], 1e9, number=3)).received == {a.address: "late 3"}
    assert s.rpc.open == 1


@gen_cluster(nthreads=[("", 1)] * 2)
async def test_broadcast_ends_at_once_when_all_answer_or_none_is_asked(s, a, b):
    say(a, 10)
    say(b, 20)
    found = await ask(s, "x", [a.address, b.address], 1e9, number=1)
    assert found == ({a.address: 11, b.address: 21}, [])
    assert await ask(s, "x", [], 1e9, number=1) == ({}, [])
