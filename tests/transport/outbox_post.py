"""An outbox for tests, which let its sends proceed one by one."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from dataclasses import dataclass

from dask_gpurt.transport.sending.outbox import Outbox
from dask_gpurt.transport.sending.send_budget import SendBudget

PATIENCE_S = 20.0


@dataclass(frozen=True)
class Item:
    name: object
    nbytes: int = 10


class Refused(Exception):
    """The error of sending to an unreachable peer."""


class WatchedCondition(threading.Condition):
    """A condition that signals when a producer begins to wait."""

    def __init__(self):
        super().__init__()
        self.held_back = threading.Semaphore(0)

    def wait(self, timeout=None):
        self.held_back.release()
        return super().wait(timeout)


def always(nbytes):
    """Return a function with one number for all peers."""
    return lambda peer: nbytes


def outbox(send, *, limit_nbytes=1 << 20, budget=None, changed=None, **options):
    """Make an outbox on the running loop, which sends shards as soon as it may."""
    budget = budget or SendBudget(limit_nbytes)
    if changed is not None:
        budget.changed = changed  # only the condition shows that a producer waits
    options = {"message_nbytes": 1 << 20, "concurrency": 1, "hold_s": 0} | options
    for name in ("message_nbytes", "concurrency"):
        if not callable(options[name]):
            options[name] = always(options[name])
    return Outbox(send, asyncio.get_running_loop(), budget=budget, **options)


class Post:
    """An outbox on the running loop, with peers whose gates the test opens and closes."""

    def __init__(self, **options):
        self.outbox = outbox(self._send, **{"changed": WatchedCondition()} | options)
        self.gates = defaultdict(asyncio.Event)
        self.refusals = {}
        self.started = defaultdict(list)
        self.arrived = defaultdict(list)
        self.n_under_way = defaultdict(int)
        self.most_under_way = defaultdict(int)
        self._news = asyncio.Condition()

    async def _send(self, peer, items):
        names = [item.name for item in items]
        self.n_under_way[peer] += 1
        self.most_under_way[peer] = max(self.most_under_way[peer], self.n_under_way[peer])
        self.started[peer].append(names)
        await self._tell()
        try:
            await self.gates[peer].wait()
            if peer in self.refusals:
                raise self.refusals[peer]
            self.arrived[peer].append(names)
        finally:
            self.n_under_way[peer] -= 1

    async def _tell(self):
        async with self._news:
            self._news.notify_all()

    async def until_started(self, peer, n_messages):
        async with self._news:
            await self._news.wait_for(lambda: len(self.started[peer]) >= n_messages)

    async def put(self, peer, *items):
        """Put from a thread, as producers do."""
        await asyncio.to_thread(self.outbox.put, peer, items)

    async def hold_back(self, peer, *items):
        """Start a producer; return once it waits."""
        task = asyncio.create_task(self.put(peer, *items))
        held_back = self.outbox._changed.held_back
        assert await asyncio.to_thread(held_back.acquire, timeout=PATIENCE_S)
        assert not task.done()
        return task

    def open(self, *peers):
        for peer in peers:
            self.gates[peer].set()


def run(scenario):
    """Run a scenario on a loop of its own, and check that it leaves no task there."""

    async def watched():
        async with asyncio.timeout(PATIENCE_S):
            await scenario()
        await settle()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(watched())


async def settle():
    """Run the loop until all that can run without new events has run."""
    for _ in range(20):
        await asyncio.sleep(0)


def flat(messages):
    return [name for names in messages for name in names]
