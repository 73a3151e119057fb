"""What a worker had on disk when the runtime came: read from where it is, never written to."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, MutableMapping
from typing import Any, NamedTuple

from dask_gpurt.errors import ValueRefusedError
from dask_gpurt.frames.flat.values import Flat


class Inherited(NamedTuple):
    """A value in the mapping that was there before."""

    key: Hashable
    nbytes: int


class InheritedTier:
    """The cold part of the store that a worker had, as a tier that takes nothing.

    Parameters
    ----------
    values
        Reads a value when it is asked for one.
    flatten
        As `frames.flat.values` has it.
    """

    name = "inherited"
    #: Nothing is added, so there is nothing to limit.
    capacity_nbytes = None

    def __init__(self, values: MutableMapping[Any, Any], flatten: Callable[[Any], Flat]) -> None:
        self._values = values
        self._flatten = flatten
        self._is_closed = False
        self._lock = threading.Lock()

    @property
    def used_nbytes(self) -> int:
        return 0

    def put(self, flat: Flat) -> Inherited:
        raise ValueRefusedError("nothing is added to what was there before")

    def get(self, place: Inherited) -> Flat:
        return self._flatten(self._values[place.key])

    def drop(self, place: Inherited) -> None:
        # By now the key may be that of a value which came after.
        with self._lock, contextlib.suppress(KeyError, OSError):
            if not self._is_closed:
                del self._values[place.key]

    def close(self) -> None:
        """Leave what is there as it is."""
        with self._lock:
            self._is_closed = True
