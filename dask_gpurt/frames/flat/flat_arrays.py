"""NumPy arrays as a node and a buffer.

The memory order of the axes is kept, so only arrays with gaps between elements are copied. Axes
along which all elements share memory (`numpy.broadcast_to`) are not written out.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from dask_gpurt.frames.flat.flattening import Into, Node, OutOf

#: Kinds of dtypes whose memory describes their elements completely.
_PLAIN_KINDS = "biufcmMSUV"


def is_plain(value: Any) -> bool:
    """Return whether memory, dtype and shape describe an array completely."""
    # Subclasses have a meaning beyond their memory.
    if type(value) is not np.ndarray:
        return False
    dtype = value.dtype
    return dtype.kind in _PLAIN_KINDS and not dtype.hasobject and dtype.itemsize > 0


def array_node(array: npt.NDArray[Any], into: Into, *, may_be_read_only: bool = True) -> Node:
    """Return the node of a plain array.

    Parameters
    ----------
    may_be_read_only
        Restore the read-only flag. False for pandas' arrays: pandas marks memory that it shares,
        and restored memory is not shared.
    """
    repeated = [
        axis
        for axis, (length, stride) in enumerate(zip(array.shape, array.strides, strict=True))
        if stride == 0 and length > 1 and array.size
    ]
    once = array
    if repeated:
        once = array[tuple(slice(1) if a in repeated else slice(None) for a in range(array.ndim))]
    axes = _axes_by_stride(once)
    dense = once.transpose(axes) if axes else once
    if not dense.flags.c_contiguous:
        dense = np.ascontiguousarray(dense)
    number = into.add(dense.reshape(-1).view(np.uint8))
    # Elements that share memory must not become writable.
    read_only = (may_be_read_only or bool(repeated)) and not array.flags.writeable
    return [
        "array",
        number,
        _dtype_node(array.dtype, into),
        list(array.shape),
        axes,
        repeated,
        read_only,
    ]


def array_of(node: Node, out_of: OutOf) -> npt.NDArray[Any]:
    _, number, dtype_node, shape, axes, repeated, read_only = node
    dtype = _dtype_of(dtype_node, out_of)
    raw = out_of.buffer(number)
    lengths = [1 if axis in repeated else length for axis, length in enumerate(shape)]
    if math.prod(lengths) * dtype.itemsize != raw.nbytes or any(n < 0 for n in shape):
        raise ValueError(f"{raw.nbytes} bytes do not match an array of {dtype} and {shape}")
    array: npt.NDArray[Any] = raw.view(dtype)
    if axes:
        dense = array.reshape([lengths[axis] for axis in axes])
        array = dense.transpose([axes.index(axis) for axis in range(len(axes))])
    else:
        array = array.reshape(lengths)
    if repeated:
        strides = [0 if axis in repeated else n for axis, n in enumerate(array.strides)]
        array = as_strided(array, shape, strides, writeable=array.flags.writeable)
    if read_only:
        array.flags.writeable = False
    return array


def _axes_by_stride(array: npt.NDArray[Any]) -> list[int]:
    """Return the axes from slowest to fastest in memory; empty if that is their order."""
    if array.flags.c_contiguous:
        return []
    axes = sorted(range(array.ndim), key=lambda axis: -abs(array.strides[axis]))
    return [] if axes == list(range(array.ndim)) else axes


def _dtype_node(dtype: np.dtype[Any], into: Into) -> Node:
    """Return a type string, or a pickle for fields, metadata and foreign types."""
    text = dtype.str
    if dtype.metadata is None and dtype.names is None and _is_named(text, dtype):
        return text
    return into.pickled(dtype)


def _is_named(text: str, dtype: np.dtype[Any]) -> bool:
    try:
        return np.dtype(text) == dtype
    except TypeError:
        return False


def _dtype_of(node: Node, out_of: OutOf) -> np.dtype[Any]:
    dtype = np.dtype(node) if isinstance(node, str) else out_of.value(node)
    if dtype.hasobject or not dtype.itemsize:
        raise ValueError(f"dtype {dtype} is not plain")
    return dtype  # type: ignore[no-any-return]
