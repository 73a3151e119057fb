"""Questions to many workers at once, with a deadline: who is silent does not hold up the others.

distributed's `broadcast` waits for the last answer, and a worker whose event loop is held up does
not give one. So each worker is asked by itself. Knows nothing of what is asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple, Protocol


class Broadcaster(Protocol):
    """A scheduler."""

    async def broadcast(
        self, *, msg: dict[str, Any], workers: list[str], on_error: Any
    ) -> dict[str, Any]: ...


class Answers(NamedTuple):
    """What workers said.

    Attributes
    ----------
    said
        By address, in the order they were asked in. An exception where asking failed.
    silent
        Addresses of those that said nothing in time.
    """

    said: dict[str, Any]
    silent: list[str]


async def ask(
    scheduler: Broadcaster, msg: dict[str, Any], workers: Iterable[str], deadline_s: float
) -> Answers:
    """Ask workers something, and wait for their answers no longer than so many seconds."""
    asked = {
        asyncio.ensure_future(scheduler.broadcast(msg=msg, workers=[one], on_error="return")): one
        for one in workers
    }
    try:
        if asked:
            await _until_late(asked, deadline_s)
    finally:
        # Also where nobody waits for the answers any more.
        late = {one: None for asking, one in asked.items() if asking.cancel()}
    said = {}
    for asking, one in asked.items():
        if one not in late:
            error = asking.exception()
            said[one] = asking.result()[one] if error is None else error
    return Answers(said, list(late))


async def _until_late(asked: Collection[asyncio.Future[Any]], deadline_s: float) -> None:
    await asyncio.wait(asked, timeout=deadline_s)
