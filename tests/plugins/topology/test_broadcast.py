"""Workers that are asked together: who fails or is silent, and what the others say."""

from __future__ import annotations

import asyncio

import pytest

from dask_gpurt.plugins.topology.broadcast import ask

SILENT = asyncio.Event()


class Cluster:
    """Stands in for a scheduler: what each worker answers at once, if it does."""

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


def test_what_others_say_is_known_although_some_are_silent():
    cluster = Cluster(a=1, b=SILENT, c=OSError("gone"), d=SILENT)

    async def go():
        answers = await ask(cluster, {"op": "x"}, "abcd", 0)
        # Those that are given up hear of it in the next round.
        await asyncio.sleep(0)
        return answers

    said, silent = run(go())
    assert list(said) == ["a", "c"]
    assert said["a"] == ("x", 1)
    assert said["c"] is cluster.answers["c"]
    assert silent == cluster.given_up == ["b", "d"]


def test_nobody_is_waited_for_where_all_answer_or_nobody_is_asked():
    cluster = Cluster(a=1, b=2)
    assert run(ask(cluster, {"op": "x"}, "ab", 1e9)) == ({"a": ("x", 1), "b": ("x", 2)}, [])
    assert run(ask(cluster, {"op": "x"}, "", 1e9)) == ({}, [])


def test_who_stops_waiting_leaves_no_questions_behind():
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
