"""Broadcast a call to many workers, with one deadline for all answers.

distributed's `broadcast` waits for the last answer, and a worker with a blocked event loop never
answers. So each worker is called separately. This module knows nothing of the calls' contents.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from distributed import Scheduler


class Broadcaster(Protocol):
    """The part of a scheduler that is used here."""

    async def broadcast(
        self, *, msg: dict[str, Any], workers: list[str], on_error: Any
    ) -> dict[str, Any]: ...


class Answers(NamedTuple):
    """Answers of workers to a broadcast.

    Attributes
    ----------
    received
        Answers by address, in the order of the calls. An exception if the call failed.
    silent
        Addresses of workers that did not answer in time.
    """

    received: dict[str, Any]
    silent: list[str]


class QuietCalls:
    """Calls of a scheduler to workers that may leave at any time, for `ask`.

    Stock's broadcast logs an error for a worker that has just left.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    async def broadcast(
        self, *, msg: dict[str, Any], workers: list[str], on_error: Any
    ) -> dict[str, Any]:
        (worker,) = workers
        try:
            call = getattr(self._scheduler.rpc(worker), msg["op"])
            return {worker: await call(**{name: msg[name] for name in msg if name != "op"})}
        except Exception as error:
            return {worker: error}


async def ask(
    scheduler: Broadcaster, msg: dict[str, Any], workers: Iterable[str], deadline_s: float
) -> Answers:
    """Call workers and return the answers that arrive before the deadline."""
    asked = {
        asyncio.ensure_future(scheduler.broadcast(msg=msg, workers=[one], on_error="return")): one
        for one in workers
    }
    try:
        if asked:
            await _until_late(asked, deadline_s)
    finally:
        # Also if the caller was cancelled.
        late = {one: None for asking, one in asked.items() if asking.cancel()}
    received = {}
    for asking, one in asked.items():
        if one not in late:
            error = asking.exception()
            received[one] = asking.result()[one] if error is None else error
    return Answers(received, list(late))


async def _until_late(asked: Collection[asyncio.Future[Any]], deadline_s: float) -> None:
    await asyncio.wait(asked, timeout=deadline_s)
