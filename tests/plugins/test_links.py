"""Paths to a peer are shared between runs; what goes wrong for one run is not another's."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from dask_gpurt.plugins.links import Links
from dask_gpurt.shuffle.messages import Message


class RunIsOver(Exception):
    pass


async def compose(path):
    return Message(b"", [])


def with_links(test):
    """Run a coroutine function with links of a worker on its loop."""

    async def main():
        loop = SimpleNamespace(asyncio_loop=asyncio.get_running_loop())
        rpc = SimpleNamespace(available={}, occupied={})
        links = Links(SimpleNamespace(loop=loop, rpc=rpc), 0)
        if links._lender is None:
            pytest.skip("no files in memory here, and so nothing is asked of a peer")
        try:
            await test(links)
        finally:
            await links.close()

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_run_that_ends_while_it_links_takes_no_other_with_it():
    async def test(links):
        asked, refuse = asyncio.Event(), asyncio.Event()
        answered = []

        async def of_the_old_run(data):
            asked.set()
            await refuse.wait()
            raise RunIsOver

        async def of_the_new_run(data):
            answered.append("offers" in data)
            return {"status": "OK", "ours": None, "why_not": None}

        old = asyncio.create_task(links.deliver("peer", "auto", compose, of_the_old_run))
        await asked.wait()
        new = asyncio.create_task(links.deliver("peer", "auto", compose, of_the_new_run))
        await asyncio.sleep(0)  # it waits for the answer to the old run's question
        assert answered == []
        refuse.set()
        with pytest.raises(RunIsOver):
            await old
        await new
        assert answered == [True, False]

    with_links(test)


def test_a_run_has_its_own_error():
    async def test(links):
        async def call(data):
            raise RunIsOver

        with pytest.raises(RunIsOver):
            await links.deliver("peer", "auto", compose, call)

    with_links(test)
