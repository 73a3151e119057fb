"""Spilled values that were read for outgoing messages, kept in memory until the messages are sent.

A value is read once, however many messages want it. It stays spilled: it does not return to its
top level, but its bytes count as reserved there. The caller holds the store's lock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dask_gpurt.memory.decisions.levels import Level


@dataclass(eq=False)
class _Buffer:
    value: Any
    nbytes: int
    level: Level
    users: int = 1


class SendBuffers:
    """Values read for messages, by the serial numbers that the residency gave them."""

    def __init__(self) -> None:
        self._buffers: dict[int, _Buffer] = {}

    def __contains__(self, serial: int) -> bool:
        return serial in self._buffers

    def __getitem__(self, serial: int) -> Any:
        return self._buffers[serial].value

    def add(self, serial: int, value: Any, nbytes: int, level: Level) -> None:
        """Keep a value for one message and count its bytes at `level`."""
        self._buffers[serial] = _Buffer(value, nbytes, level)
        level.reserved_nbytes += nbytes

    def acquire(self, serial: int) -> bool:
        """Keep a value for one more message; return False if it is not here."""
        buffer = self._buffers.get(serial)
        if buffer is None:
            return False
        buffer.users += 1
        return True

    def release(self, serial: int) -> None:
        """End one message's use of a value; the last one frees it."""
        buffer = self._buffers[serial]
        buffer.users -= 1
        if not buffer.users:
            del self._buffers[serial]
            buffer.level.reserved_nbytes -= buffer.nbytes
