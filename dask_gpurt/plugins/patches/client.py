"""Reconnections of a client; workers and schedulers in its process.

| what | why | taken back by |
|---|---|---|
| `Worker._instances`, `Scheduler._instances` | a client in a worker's process belongs to a task,
unless the whole cluster runs in that process | |
| `Client._reconnect` | a restarted scheduler has no plugins, and Dask runs a client's preloads only
once | `forget_reconnects` |
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from distributed import Client, Scheduler, Worker


def call_on_reconnect(client: Client, call: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Call a function each time this client has reconnected, in place of an earlier function."""
    forget_reconnects(client)
    stock = client._reconnect
    calls: set[asyncio.Task[None]] = set()

    async def gpurt_reconnect() -> None:
        await stock()
        if client.status == "running":
            # Not awaited: until this returns, the client hears nothing of its futures.
            calls.add(made := asyncio.create_task(call(), name="gpurt-reconnect"))
            made.add_done_callback(calls.discard)

    vars(client)["_reconnect"] = gpurt_reconnect


def forget_reconnects(client: Client) -> None:
    """Restore the stock method."""
    vars(client).pop("_reconnect", None)


def workers_here() -> list[Worker]:
    """Return the started workers of this process, unordered."""
    return [one for one in tuple(Worker._instances) if one.scheduler is not None]


def scheduler_ids_here() -> set[str]:
    """Return the `id` in the identity of each scheduler of this process."""
    return {str(one.id) for one in tuple(Scheduler._instances)}


def address_of_scheduler(worker: Worker) -> str:
    """Return the address by which a worker found its scheduler; others may spell it differently."""
    return str(worker.scheduler.address)


def address_at_scheduler(worker: Worker) -> str:
    """Return the address by which its scheduler knows a worker."""
    return str(worker.contact_address)
