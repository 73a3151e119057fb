"""Values in slices: cut them, and combine slice by slice, with the same bits as whole values.

Values are arrays, or dicts of arrays: what the steps of Dask's reductions return. An element of a
result depends on the elements at the same place in the values alone, so slices of results are
results of slices. Whether they have the same bits depends on how NumPy walks through memory. Two
rules keep that way the same:

- A slice begins at a multiple of `ALIGNMENT` elements and is at least as wide. So vector
  instructions take the same elements together, and no axis of one element appears.
- A slice has the memory order of its value.

Tasks carry the text of this module to workers, which may lack this package. So it imports NumPy
alone. `plugins` decide what is cut.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import numpy as np

#: Multiple of all bounds of slices, in elements: no vector instruction takes more at once.
ALIGNMENT = 64
#: Bytes of each value that `Piecewise` combines at once: four of them fit into a core's cache.
PIECE_NBYTES = 1 << 18


def bounds(width: int, n_slices: int) -> list[int]:
    """Return where slices of about equal width begin, the first at 0.

    There are fewer slices than wanted if they would be narrower than `ALIGNMENT`.
    """
    n_slices = max(1, min(n_slices, width // ALIGNMENT))
    return [number * width // n_slices // ALIGNMENT * ALIGNMENT for number in range(n_slices)]


class Cut:
    """Cuts a slice from a value.

    Parameters
    ----------
    stop
        None stands for the end, wherever it is: some programs announce wrong shapes.
    """

    def __init__(self, axis: int, start: int, stop: int | None) -> None:
        self._index = _index(axis, start, stop)

    def __call__(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: self(one) for name, one in value.items()}
        if np.ndim(value) < len(self._index):
            # Dask's `nanmin` returns such an array for an empty chunk. It raises its own error.
            return value
        part = value[self._index]
        if type(part) is np.ndarray and not part.flags.forc and 0 not in part.strides:
            # Dask sends such a view in C order, so NumPy would walk through it in another order.
            # An array that repeats one number has strides of 0, and is sent as that number.
            return part.copy(order="K")
        return part


class Piecewise:
    """Combines values piece by piece, so that no copy of all of them is made.

    Parameters
    ----------
    combine
        Combines a nested list of values. An element of the result depends on the same elements.
    axis, out_axis
        The axis that is cut, in the values and in the result.
    """

    def __init__(self, combine: Callable[[Any], Any], axis: int, out_axis: int) -> None:
        self._combine, self._axis, self._out_axis = combine, axis, out_axis

    def __call__(self, values: Any) -> Any:
        arrays = list(_arrays(values))
        widths = {_width(one, self._axis) for one in arrays}
        width = max(widths, default=0)
        n_pieces = max(one.nbytes for one in arrays) // PIECE_NBYTES if width else 0
        starts = bounds(width, n_pieces)
        if len(widths) > 1 or len(starts) < 2:
            return self._combine(values)
        result = None
        for start, stop in zip(starts, [*starts[1:], width], strict=True):
            part = self._combine(_mapped(values, itemgetter(_index(self._axis, start, stop))))
            if result is None:
                if {_width(one, self._out_axis) for one in _arrays(part)} != {stop}:
                    return self._combine(values)
                result = _mapped(part, lambda one: self._empty_like(one, width))
                if isinstance(part, dict) and _are_repeated(values):
                    result["n"] = np.broadcast_to(part["n"].flat[0], result["n"].shape)
            for whole, one in zip(_arrays(result), _arrays(part), strict=True):
                if whole.flags.writeable:
                    whole[_index(self._out_axis, start, stop)] = one
        return result

    def _empty_like(self, part: Any, width: int) -> Any:
        shape = list(part.shape)
        shape[self._out_axis] = width
        return np.empty_like(part, shape=shape)


def _are_repeated(values: Any) -> bool:
    """Return whether the counts in each value are one number, repeated by strides of 0.

    So are the counts of chunks without missing values. Stock Dask makes full arrays of them, and
    then sends these as well.
    """
    if isinstance(values, list):
        return all(map(_are_repeated, values))
    counts = values["n"]
    return not any(step for step, n in zip(counts.strides, counts.shape, strict=True) if n > 1)


def _index(axis: int, start: int, stop: int | None) -> tuple[slice, ...]:
    return (slice(None),) * axis + (slice(start, stop),)


def _width(array: Any, axis: int) -> int:
    """Return the elements along an axis; 0 if this is not an array of NumPy with that axis."""
    return array.shape[axis] if type(array) is np.ndarray and array.ndim > axis else 0


def _arrays(values: Any) -> Any:
    """Yield the arrays of nested lists and dicts."""
    if isinstance(values, (list, dict)):
        for one in values if isinstance(values, list) else values.values():
            yield from _arrays(one)
    else:
        yield values


def _mapped(values: Any, function: Callable[[Any], Any]) -> Any:
    """Return nested lists and dicts with a function applied to their arrays."""
    if isinstance(values, list):
        return [_mapped(one, function) for one in values]
    if isinstance(values, dict):
        return {name: _mapped(one, function) for name, one in values.items()}
    return function(values)
