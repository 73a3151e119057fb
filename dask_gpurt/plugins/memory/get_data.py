"""Answers to peers that ask for spilled values: read off the event loop, and left spilled.

Stock Dask reads such values on the event loop, one after the other. If there is no memory for one,
the peer gets an error that it keeps to itself, and waits for ever (dask/distributed#6705). Here the
peer is told to ask again, for as long as memory may become free. Nothing is read for a message that
stock would not send now, because the worker is paused or already sends enough.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterable
from typing import TYPE_CHECKING, Any

from dask_gpurt.devices.device import Priority
from dask_gpurt.devices.lanes import Lane
from dask_gpurt.memory.carrier import NotRestoredError
from dask_gpurt.memory.store import TieredStore
from dask_gpurt.plugins.patches import gather_dep, worker_memory

if TYPE_CHECKING:
    from distributed import Worker


class _OutOfMemory(Exception):
    """There is no memory, or no file descriptor, to read a value now."""


class DataServer:
    """The handler `get_data` of one worker with our store, until `close`.

    Parameters
    ----------
    reads
        The lane in which values are read.
    digest
        Records a fine metric of Dask: context, label and unit, and amount.
    """

    def __init__(
        self,
        worker: Worker,
        store: TieredStore,
        reads: Lane,
        digest: Callable[[str, tuple[str, str], float], None],
    ) -> None:
        self._worker = worker
        self._store = store
        self._reads = reads
        self._digest = digest
        self._is_closed = False
        #: Messages that values are read for. Stock does not count them yet.
        self._n_reading = 0

    def close(self) -> None:
        """Stop reading values. Messages in flight take values from memory, or from the store that
        the worker has then."""
        self._is_closed = True

    async def get_data(
        self, stock: Callable[..., Awaitable[Any]], comm: Any, keys: Collection[Any], **kwargs: Any
    ) -> Any:
        """Answer in place of the worker's handler, which is `stock`.

        Raises
        ------
        MemoryError
            The read of a value was abandoned: nothing can free memory for it.
        """
        serials: list[int] = []
        try:
            if self._spilled(keys, serials):
                if worker_memory.would_answer_busy(self._worker, comm, self._n_reading):
                    return {"status": "busy"}
                self._n_reading += 1
                try:
                    keys = await self._read_spilled(keys, serials)
                finally:
                    self._n_reading -= 1
            return await stock(comm, keys, **kwargs)
        except _OutOfMemory:
            # Stock would try again on the event loop, and leave the peer waiting for ever.
            return {"status": "busy"}
        finally:
            for serial in serials:
                self._store.end_send(serial)

    async def _read_spilled(self, keys: Collection[Any], serials: list[int]) -> Collection[Any]:
        """Read the spilled ones of these keys, and add the serial numbers of what was read.

        Returns
        -------
        The keys that can be sent.

        Raises
        ------
        _OutOfMemory, MemoryError
            As `_read`.
        """
        # A loop, because values in memory may be spilled while others are read.
        while (spilled := self._spilled(keys, serials)) and not self._is_closed:
            for key, nbytes in spilled.items():
                if (serial := await self._read(key, nbytes)) is not None:
                    serials.append(serial)
        if spilled and self._worker.data is self._store:
            return [key for key in keys if key not in spilled]  # closed: nothing reads these
        return keys

    async def _read(self, key: Hashable, nbytes: int) -> int | None:
        """Read a value for a message, off the event loop; see `TieredStore.read_for_send`.

        Raises
        ------
        _OutOfMemory
            There is no memory for the value now.
        MemoryError
            The read was abandoned.
        Exception
            The error of the value's own unpickling.
        """
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            reading = asyncio.wrap_future(
                self._reads.submit(
                    self._store.read_for_send, key, priority=Priority.HIGH, path="lend"
                )
            )
        except RuntimeError:  # the lane is closed
            return None
        # `reading` itself is not awaited: a lane that closes cancels it, and the message goes on.
        await asyncio.wait([reading])
        if reading.cancelled():
            return None
        try:
            serial = reading.result()
        except (MemoryError, OSError) as error:
            if self._store.is_abandoned(key):
                raise gather_dep.of_peer(
                    f"worker {self._worker.address} has no memory to read {key!r} from its disk, "
                    f"and no running task that could free some: {error}"
                ) from error
            raise _OutOfMemory from error
        except NotRestoredError as error:
            assert error.__cause__ is not None
            raise error.__cause__ from None
        if serial is not None:
            self._digest("get-data", ("disk-read", "seconds"), loop.time() - began_s)
            self._digest("get-data", ("disk-read", "bytes"), nbytes)
            self._digest("get-data", ("disk-read", "count"), 1)
        return serial

    def _spilled(self, keys: Iterable[Hashable], serials: Collection[int]) -> dict[Hashable, int]:
        """Return the keys of spilled values that were not read yet, and their sizes in memory."""
        values = ((key, self._store.residency.values.get(key)) for key in keys)
        return {
            key: value.nbytes
            for key, value in values
            if value and not value.in_memory and value.serial not in serials
        }
