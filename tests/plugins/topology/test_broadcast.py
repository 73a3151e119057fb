"""Broadcasts return the answers of responding workers if others fail or stay silent."""

from __future__ import annotations

import asyncio

import pytest

from dask_gpurt.plugins.topology.broadcast import ask

SILENT = asyncio.Event()


class Cluster:
    """A stand-in for a scheduler, with the immediate answer of each worker, if any."""

    def __init__(self, **answers):
        self.answers = answers
        self.given_up = []

    async def broadcast(self, *, msg, workers, on_error):
        assert on_error == "return"
        (one,) = workers
        answer = self.answers[one]
        if answer is SILENT:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.given_up.append(one)
                raise
        if isinstance(answer, Exception):
            raise answer
        return {one: (msg["op"], answer)}


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 30))


def test_answers_arrive_although_some_workers_are_silent():
    cluster = Cluster(a=1, b=SILENT, c=OSError("gone"), d=SILENT)

    async def go():
        answers = await ask(cluster, {"op": "x"}, "abcd", 0)
        # Abandoned calls are cancelled in the next turn of the loop.
        await asyncio.sleep(0)
        return answers

    said, silent = run(go())
    assert list(said) == ["a", "c"]
    assert said["a"] == ("x", 1)
    assert said["c"] is cluster.answers["c"]
    assert silent == cluster.given_up == ["b", "d"]


def test_broadcast_ends_at_once_when_all_answer_or_none_is_asked():
    cluster = Cluster(a=1, b=2)
    assert run(ask(cluster, {"op": "x"}, "ab", 1e9)) == ({"a": ("x", 1), "b": ("x", 2)}, [])
    assert run(ask(cluster, {"op": "x"}, "", 1e9)) == ({}, [])


def test_cancelled_broadcast_leaves_no_requests():
    cluster = Cluster(a=SILENT)

    async def go():
        asking = asyncio.create_task(ask(cluster, {"op": "x"}, "a", 1e9))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await asyncio.sleep(0)

    run(go())
    assert cluster.given_up == ["a"]
