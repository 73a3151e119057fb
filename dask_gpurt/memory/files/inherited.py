"""The values that a worker had on disk before the runtime, as a read-only tier."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, MutableMapping
from typing import Any, NamedTuple

from dask_gpurt.errors import ValueRefusedError
from dask_gpurt.frames.flat.values import Flat


class Inherited(NamedTuple):
    """The place of a value in the mapping of the previous store."""

    key: Hashable
    nbytes: int


class InheritedTier:
    """The spilled part of a worker's previous store, as a tier that accepts no values.

    Parameters
    ----------
    values
        Mapping that reads a value when it is asked for one.
    flatten
        As in `frames.flat.values`.
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
        raise ValueRefusedError("this tier accepts no values")

    def get(self, place: Inherited) -> Flat:
        return self._flatten(self._values[place.key])

    def drop(self, place: Inherited) -> None:
        # After `close`, the key may belong to a later value.
        with self._lock, contextlib.suppress(KeyError, OSError):
            if not self._is_closed:
                del self._values[place.key]

    def close(self) -> None:
        """Leave the mapping as it is from here on."""
        with self._lock:
            self._is_closed = True
