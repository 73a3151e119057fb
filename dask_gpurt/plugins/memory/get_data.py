"""Cold values that peers ask for: read beside the event loop, and not brought home.

Stock reads them on the loop, one after the other. If there is no memory for one there, its peer
learns of an error that it keeps to itself, and waits for ever (dask/distributed#6705). Here it is
told to ask again, for as long as there may be memory later. A message that stock would not send
now, since the worker is paused or sends enough as it is, has nothing read for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterable
from typing import TYPE_CHECKING, Any

from dask_gpurt.devices.device import Priority
from dask_gpurt.devices.lanes import Lane
from dask_gpurt.memory.carrier import NotRestoredError
from dask_gpurt.memory.store import TieredStore
from dask_gpurt.plugins.patches import worker_memory

if TYPE_CHECKING:
    from distributed import Worker


class _NotNow(Exception):
    """A value cannot be read for want of memory or descriptors."""


class DataServer:
    """What one worker sends of its store, until `close`.

    Parameters
    ----------
    reads
        Where values are read.
    tell
        Takes Dask's fine metrics: where, what and in which unit, and how much.
    """

    def __init__(
        self,
        worker: Worker,
        store: TieredStore,
        reads: Lane,
        tell: Callable[[str, tuple[str, str], float], None],
    ) -> None:
        self._worker = worker
        self._store = store
        self._reads = reads
        self._tell = tell
        self._is_closed = False
        #: Messages that values are read for. To stock they are none yet.
        self._n_reading = 0

    def close(self) -> None:
        """Nothing is read any more. Messages under way go out with what is in memory, or in the
        store that the worker has by then."""
        self._is_closed = True

    async def get_data(
        self, stock: Callable[..., Awaitable[Any]], comm: Any, keys: Collection[Any], **kwargs: Any
    ) -> Any:
        """In place of the worker's handler, which is `stock`.

        Raises
        ------
        MemoryError
            A value could not be read for long, and nothing is left that could make room for it.
        """
        loans: list[int] = []
        try:
            if self._cold(keys, loans):
                if worker_memory.sends_no_more(self._worker, comm, self._n_reading):
                    return {"status": "busy"}
                self._n_reading += 1
                try:
                    keys = await self._at_hand(keys, loans)
                finally:
                    self._n_reading -= 1
            return await stock(comm, keys, **kwargs)
        except _NotNow:
            # Stock would try once more, on the event loop, and have the peer wait for ever.
            return {"status": "busy"}
        finally:
            for loan in loans:
                self._store.end_send(loan)

    async def _at_hand(self, keys: Collection[Any], loans: list[int]) -> Collection[Any]:
        """Those of these keys that need no reading any more. What was read is added to the loans.

        Raises
        ------
        _NotNow, MemoryError
            As `_lend`.
        """
        # What is in memory may leave it while others are read.
        while (cold := self._cold(keys, loans)) and not self._is_closed:
            for key, nbytes in cold.items():
                if (loan := await self._lend(key, nbytes)) is not None:
                    loans.append(loan)
        if cold and self._worker.data is self._store:
            return [key for key in keys if key not in cold]  # they are not read any more
        return keys

    async def _lend(self, key: Hashable, nbytes: int) -> int | None:
        """Have a value read for a message, beside the loop; see `TieredStore.lend`.

        Raises
        ------
        _NotNow
            There is no room for it.
        MemoryError
            Nor will there be.
        Exception
            Whatever the value's own unpickling raises.
        """
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            reading = asyncio.wrap_future(
                self._reads.submit(
                    self._store.read_for_send, key, priority=Priority.HIGH, path="lend"
                )
            )
        except RuntimeError:
            return None  # the lane is closed
        # Not awaited itself: a lane that closes cancels it, and this message goes on.
        await asyncio.wait([reading])
        if reading.cancelled():
            return None
        try:
            loan = reading.result()
        except (MemoryError, OSError) as error:
            if self._store.is_abandoned(key):
                raise MemoryError(f"{key!r} cannot be read: {error}") from error
            raise _NotNow from error
        except NotRestoredError as error:
            assert error.__cause__ is not None
            raise error.__cause__ from None
        if loan is not None:
            self._tell("get-data", ("disk-read", "seconds"), loop.time() - began_s)
            self._tell("get-data", ("disk-read", "bytes"), nbytes)
            self._tell("get-data", ("disk-read", "count"), 1)
        return loan

    def _cold(self, keys: Iterable[Hashable], lent: Collection[int]) -> dict[Hashable, int]:
        """Which of these are here and not at hand, and what they take in memory."""
        values = ((key, self._store.residency.values.get(key)) for key in keys)
        return {
            key: value.nbytes
            for key, value in values
            if value and not value.in_memory and value.serial not in lent
        }
