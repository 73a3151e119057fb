"""The memory of one rank's value while an operation runs: its own slices, and those it receives.

The rank's own value is read in place and never written. Received and added slices are in memory of
the operation. Arrays are of NumPy or CuPy; received bytes are always in host memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dask_gpurt.collectives.reduction import Operation, add_up

Buffer = npt.NDArray[np.uint8]


class SliceMemory:
    """The slices of a rank.

    Parameters
    ----------
    bounds
        Where slices begin and end, in elements.
    own
        The rank's value in one dimension; None if it has none.
    result
        Memory for all slices; None if the rank needs few of them.
    dtype
        Type of the elements.
    held
        Slices that are in `result` already.
    """

    def __init__(
        self,
        bounds: Sequence[int],
        own: Any,
        result: Any,
        dtype: np.dtype[Any],
        held: Sequence[int] = (),
    ) -> None:
        self._bounds, self._own, self._result, self._dtype = bounds, own, result, dtype
        self._held = set(held)
        #: Memory of single slices, if there is none for all.
        self._parts: dict[int, Any] = {}
        self.is_on_host = isinstance(own if own is not None else result, np.ndarray)

    def nbytes(self, slices: range) -> int:
        return (self._bounds[slices.stop] - self._bounds[slices.start]) * self._dtype.itemsize

    def view(self, slices: range) -> Any:
        """Return the present values of slices, in one dimension."""
        if slices.start in self._held:
            return self.into(slices)
        return self._own[self._bounds[slices.start] : self._bounds[slices.stop]]

    def into(self, slices: range) -> Any:
        """Return the memory for new values of slices, in one dimension."""
        if self._result is not None:
            return self._result[self._bounds[slices.start] : self._bounds[slices.stop]]
        found = self._parts.get(slices.start)
        if found is None:
            length = self._bounds[slices.stop] - self._bounds[slices.start]
            found = self._parts[slices.start] = empty_like(self._own, length, self._dtype)
        return found

    def has(self, slices: range) -> None:
        """Note that the memory of slices has their values."""
        self._held.update(slices)

    def put(self, slices: range, found: Buffer) -> None:
        """Write received bytes into the memory of slices, unless they are there already."""
        target = self.into(slices)
        values = found.view(self._dtype)
        if not isinstance(target, np.ndarray):
            target[...] = module_of(target).asarray(values)
        elif not np.may_share_memory(target, values):
            np.copyto(target, values)
        self.has(slices)

    def add(self, operation: Operation, slices: range, rank: int, found: dict[int, Buffer]) -> None:
        """Add the values of other ranks to those here, in the order of ranks."""
        out = self.into(slices)
        values: dict[int, Any] = {peer: one.view(self._dtype) for peer, one in found.items()}
        if not isinstance(out, np.ndarray):
            values = {peer: module_of(out).asarray(one) for peer, one in values.items()}
        values[rank] = self.view(slices)
        add_up(operation, [values[one] for one in sorted(values)], out)
        self.has(slices)

    def finish(self) -> None:
        """Copy the rank's own value to the result, as far as nothing was received in its place."""
        for number in range(len(self._bounds) - 1):
            if self._result is not None and number not in self._held and self._own is not None:
                one = range(number, number + 1)
                self.into(one)[...] = self.view(one)
                self.has(one)


def bytes_of(view: Any) -> Buffer:
    """Return the bytes of values in host memory, without a copy unless they are on a device."""
    found: Buffer = (view if isinstance(view, np.ndarray) else view.get()).view(np.uint8)
    return found


def module_of(array: Any) -> Any:
    """Return the library of an array, which is loaded: `numpy` or `cupy`."""
    return sys.modules[type(array).__module__.partition(".")[0]]


def empty_like(
    like: Any,
    length: int,
    dtype: np.dtype[Any],
    host: Callable[[int], Buffer] | None = None,
) -> Any:
    """Return memory in one dimension, where another array is.

    Parameters
    ----------
    host
        Allocates bytes in host memory; NumPy by default.
    """
    if not isinstance(like, np.ndarray):
        return module_of(like).empty(length, dtype)
    if host is None:
        return np.empty(length, dtype)
    return host(length * dtype.itemsize).view(dtype)
