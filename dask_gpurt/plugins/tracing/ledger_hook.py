"""Entries that the runtime makes in a worker's ledger for the sake of traces.

`plugins.worker` and the shuffles import this module, so it imports nothing of the trace itself.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any

from distributed.worker import thread_state

from dask_gpurt.devices.ledger import COMMUNICATION, Ledger, LedgerEntry
from dask_gpurt.tracing.lane_names import PHASE, RECEIVE, UNSENT

if TYPE_CHECKING:
    from distributed import Worker

    from dask_gpurt.plugins.shuffle.transports import Transport
    from dask_gpurt.shuffle.messages import Message

    Compose = Callable[[Transport], Awaitable[Message]]

#: Name of the trace among the extensions of a worker, and of a scheduler.
TRACE = "gpurt-trace"
#: Numbers of messages: unique in this process, whatever worker and run they are of.
message_numbers = itertools.count(1)
#: Names of transports for users. A message over Dask's connections has the scheme of its address.
_WAYS = {"shared": "shared memory"}


def new_ledger(worker: Worker) -> Ledger:
    """Return a ledger for a worker. If a trace is on there, it gets all entries."""
    ledger = Ledger()
    if (trace := worker.extensions.get(TRACE)) is not None:
        trace.follow(ledger)
    return ledger


async def entered(
    ledger: Ledger | None,
    deliver: Callable[[Compose], Awaitable[Message]],
    compose: Compose,
    address: str,
    path: str,
    lane: str = COMMUNICATION,
    nbytes: int | None = None,
    run: int = 0,
    message: int = 0,
) -> Message:
    """Deliver a message and enter it into a ledger; return the message.

    Parameters
    ----------
    deliver
        Delivers what the function composes. Raises if that fails.
    nbytes
        Bytes of the entry; by default those of the message.
    """
    if ledger is None:
        return await deliver(compose)
    way, start_s = "", ledger.clock()

    async def noted(transport: Transport) -> Message:
        nonlocal way, start_s
        scheme = address.partition("://")[0]
        way = scheme if transport.name == "comm" else _WAYS.get(transport.name, transport.name)
        composed = await compose(transport)
        # The lane of codecs has the time before. A message that is sent again starts again.
        start_s = ledger.clock()
        return composed

    sent, encoded_nbytes = None, 0
    try:
        sent = await deliver(noted)
    finally:
        if sent is None:
            path, nbytes = UNSENT, 0
        else:
            on_link_nbytes = sum(buffer.nbytes for buffer in sent.buffers)
            if nbytes is None:
                nbytes = on_link_nbytes
            elif on_link_nbytes != nbytes:
                encoded_nbytes = on_link_nbytes
        times = start_s, ledger.clock()
        entry = LedgerEntry(lane, path, nbytes, *times, address, way, run, message)
        ledger.add(entry._replace(encoded_nbytes=encoded_nbytes) if encoded_nbytes else entry)
    return sent


def enter_phase(ledger: Ledger, phase: str, start_s: float, run: int = 0, key: Any = None) -> None:
    """Record what a task has just done or waited for. Only traces have these entries.

    Without a key, this runs in the thread of the task.
    """
    if (record := ledger.recorder) is not None:
        key = getattr(thread_state, "key", None) if key is None else key
        record(LedgerEntry(PHASE, phase, 0, start_s, ledger.clock(), run=run, key=key))


def enter_receipt(
    ledger: Ledger,
    nbytes: int,
    start_s: float,
    sender: str,
    run: int,
    message: int,
    lane: str = COMMUNICATION,
) -> None:
    """Enter a message that has arrived."""
    path = lane, RECEIVE, nbytes, start_s, ledger.clock()
    ledger.add(LedgerEntry(*path, peer=sender, run=run, message=message))


class DiskEntries:
    """Entries of a run's reads and writes of shards, with their bytes. Safe to use in any thread.

    Shards are read and written one by one. A block of many gets one entry.
    """

    def __init__(self, ledger: Ledger, run: int) -> None:
        self._ledger, self._run = ledger, run
        self._here = threading.local()

    def add(self, nbytes: int) -> None:
        """Count bytes that this thread read or wrote."""
        self._here.nbytes = getattr(self._here, "nbytes", 0) + nbytes

    @contextlib.contextmanager
    def timed(self, lane: str, path: str) -> Iterator[None]:
        """Enter the reads or writes in the body of a `with` statement, if there are any."""
        if self._ledger.recorder is None:
            yield
            return
        self._here.nbytes = 0
        start_s = self._ledger.clock()
        try:
            yield
        finally:
            nbytes, record = self._here.nbytes, self._ledger.recorder
            if nbytes and record is not None:
                key: Any = getattr(thread_state, "key", None)
                end_s = self._ledger.clock()
                record(LedgerEntry(lane, path, nbytes, start_s, end_s, run=self._run, key=key))
