"""The scheduler's record of one worker in a trace, and the file of a worker that has left."""

from __future__ import annotations

import asyncio
import os
import tempfile
from typing import IO, Any

from dask_gpurt.errors import ProtocolError
from dask_gpurt.metrics import MEANING
from dask_gpurt.plugins.tracing.traced_worker import PART_NBYTES
from dask_gpurt.system_calls import write_all
from dask_gpurt.tracing.clocks import ClockExchange

#: Begins the reason why a worker's events are missing, or are not all there.
LOST = "lost"
#: Larger numbers in a description are not believed.
_MOST = 1 << 60


class WorkerTrace:
    """One worker in a trace.

    Parameters
    ----------
    state
        The scheduler's state of the worker.
    limit_nbytes
        Most bytes of its file.
    """

    def __init__(self, state: Any, limit_nbytes: int) -> None:
        self.address: str = state.address
        self.name, self.host = str(state.name), str(state.host)
        self.n_threads: int = state.nthreads
        self.memory_limit_nbytes = int(state.memory_limit or 0)
        self.exchanges: list[ClockExchange] = []
        #: Why it records nothing.
        self.problem: str | None = None
        #: Whether it has answered at all.
        self.has_begun = False
        #: When it came, if that was during the trace, and when it left the cluster.
        self.joined_s: float | None = None
        self.left_s: float | None = None
        #: Whether all that it recorded is known.
        self.is_whole = False
        self.ended = ""
        self.n_dropped = 0
        #: Size of its file, as the worker says.
        self.nbytes = 0
        self.counters: dict[str, int] = {}
        self.pid = 0
        self._taken_nbytes = 0
        self._limit_nbytes = limit_nbytes
        self._file: IO[bytes] | None = None

    def describe(self, described: Any) -> None:
        """Take what the worker says of its recording. Raises `ProtocolError`."""
        if not isinstance(described, dict) or not isinstance(described.get("counters"), dict):
            raise ProtocolError("not a description of a recording")
        ended = described.get("ended")
        counters = {name: described["counters"].get(name, 0) for name in MEANING}
        numbers = [described.get(name) for name in ("n_dropped", "nbytes", "pid")]
        numbers += counters.values()
        if not all(type(one) is int and 0 <= one < _MOST for one in numbers):
            raise ProtocolError("a recording without its counts")
        if not isinstance(ended, str) or len(ended) > 1000:
            raise ProtocolError("a recording without its end")
        self.ended, self.counters = ended, counters
        self.n_dropped, self.nbytes, self.pid = (
            described["n_dropped"],
            described["nbytes"],
            described["pid"],
        )
        self.is_whole = True

    async def take(self, offset: int, part: Any, described: Any) -> None:
        """Take a part of the file, or at the end the description. Raises `ProtocolError`."""
        if type(part) is not bytes or len(part) > PART_NBYTES or offset != self._taken_nbytes:
            raise ProtocolError("not the next part of a trace")
        if self._taken_nbytes + len(part) > self._limit_nbytes:
            raise ProtocolError("more of a trace than was to be recorded")
        if part:
            self._taken_nbytes += len(part)
            await asyncio.to_thread(self._write, part, offset)
        else:
            self.describe(described)

    def _write(self, part: bytes, offset: int) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        write_all(self._file.fileno(), part, offset)

    async def read(self, offset: int, nbytes: int) -> bytes:
        """Return a part of the file that the worker has handed over."""
        if self._file is None:
            return b""
        return await asyncio.to_thread(os.pread, self._file.fileno(), nbytes, offset)

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def plain(self) -> dict[str, Any]:
        """Return all but the events, as plain values."""
        ended = self.ended
        if not ended and self.problem is not None:
            ended = f"no events: {self.problem}"
        elif not ended and not self.has_begun:
            ended = "no events: it did not answer"
        elif not ended and not self.is_whole:
            ended = f"{LOST}: it left without handing over its events"
        return {
            "address": self.address,
            "name": self.name,
            "host": self.host,
            "n_threads": self.n_threads,
            "exchanges": [tuple(one) for one in self.exchanges],
            "nbytes": self.nbytes,
            "n_dropped": self.n_dropped,
            "ended": ended,
            "counters": self.counters,
            "joined_s": self.joined_s,
            "left_s": self.left_s,
        }
