"""Clocks are compared with all workers that answer, however many say nothing."""

from __future__ import annotations

import asyncio
from time import perf_counter
from types import SimpleNamespace

from dask_gpurt.plugins.tracing import clock_exchanges
from dask_gpurt.plugins.tracing.clock_exchanges import Clocks


class AnsweringScheduler:
    """Asks workers of which those with an `s` in their address never answer."""

    def rpc(self, address):
        async def gpurt_trace_clock():
            if "s" in address:
                await asyncio.Event().wait()
            return perf_counter(), perf_counter()

        return SimpleNamespace(gpurt_trace_clock=gpurt_trace_clock)


def test_silent_workers_hold_up_no_other(monkeypatch):
    monkeypatch.setattr(clock_exchanges, "_DEADLINE_S", 0.3)
    addresses = [*(f"s{number}" for number in range(100)), "a", "b"]
    workers = [SimpleNamespace(address=address, exchanges=[]) for address in addresses]

    async def run():
        async with asyncio.timeout(3):
            await Clocks(AnsweringScheduler()).compare(workers, 4)

    asyncio.run(run())
    assert [len(one.exchanges) for one in workers] == [0] * 100 + [1, 1]
