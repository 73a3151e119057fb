"""Sizes of values and their bytes, as Dask measures and serializes them.

| what | why | taken back by |
|---|---|---|
| `distributed.protocol.cuda` | which values are on a GPU, and the memory they consist of: GPU
libraries register there how to send values from one GPU to another | |
| `distributed.protocol.serialize` | a type's own serializer, registered with Dask, flattens its
values, as when stock spills them | |

Contract tests in `tests/plugins/patches/test_value_bytes.py` fail when distributed changes any of
these names.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgpack
from distributed.protocol.compression import decompress
from distributed.protocol.cuda import cuda_dumps as take_apart_on_device
from distributed.protocol.cuda import cuda_loads as put_together_on_device
from distributed.protocol.cuda import cuda_serialize
from distributed.protocol.pickle import dumps, loads
from distributed.protocol.serialize import (
    check_dask_serializable,
    dask_serialize,
    merge_and_deserialize,
    serialize_and_split,
)
from distributed.sizeof import safe_sizeof as stock_sizeof
from distributed.utils import ensure_memoryview

__all__ = [
    "dumps",
    "is_on_device",
    "loads",
    "put_together_on_device",
    "rebuild",
    "safe_sizeof",
    "take_apart",
    "take_apart_on_device",
    "whole_nbytes",
]

#: Size of a value that cannot be measured.
_ASSUMED_NBYTES = 1_000_000


def safe_sizeof(value: Any) -> int:
    """Return the size of a value as Dask measures it, in whole bytes."""
    return whole_nbytes(stock_sizeof(value))


def whole_nbytes(size: Any) -> int:
    """Return a size as a whole number of bytes, at least 0.

    Dask returns whatever a type's registered `sizeof` returns: a NumPy number, a negative number,
    nan. If it is no number, the result is the size that Dask assumes when it cannot measure.
    """
    try:
        return max(0, int(size))
    except (TypeError, ValueError, OverflowError):
        return _ASSUMED_NBYTES


def is_on_device(value: Any) -> bool:
    """Return whether Dask would send a value directly from GPU memory.

    This imports only what the value's own library registers with Dask. If that import fails, the
    answer is False.
    """
    try:
        cuda_serialize.dispatch(type(value))
    except (TypeError, ImportError):
        return False
    return True


#: Packages whose types have a layout of ours, or are pickled without a loss. The pickle of a
#: memoryview is bytes, without its format and shape.
_NOT_FOR_SERIALIZERS = frozenset({"builtins", "array", "numpy", "pandas", "pyarrow"})
#: Large enough that frames are never split.
_NO_SPLIT_NBYTES = 1 << 62
#: Most levels of containers to look into: a container may hold itself.
_DEEPEST = 32


def take_apart(value: Any) -> tuple[bytes, list[memoryview]] | None:
    """Serialize a value as stock does if a serializer is registered for its type.

    Returns
    -------
    A header and memory, for `rebuild`. None if the value is to be pickled.

    Raises
    ------
    TypeError
        The serializer failed.
    """
    if not _has_serializer(value):
        return None
    try:
        header, frames = serialize_and_split(value, on_error="raise", size=_NO_SPLIT_NBYTES)
    except TypeError as error:
        if isinstance(error.__cause__, MemoryError):
            raise error.__cause__ from None
        # Dask's own message contains the whole value.
        raise TypeError(
            f"the serializer that Dask has for {type(value).__qualname__} failed: "
            f"{error.__cause__ or error.args[0]!r}"
        ) from error
    return msgpack.dumps(header, use_bin_type=True), [ensure_memoryview(one) for one in frames]


def _has_serializer(value: Any) -> bool:
    """Return whether a serializer is registered for a value, or for a container's first item."""
    inner = value
    for _ in range(_DEEPEST):
        if type(inner) not in (list, tuple, set, dict) or not inner:
            break
        # Dask, too, looks at the first item only.
        inner = next(iter(inner.values() if type(inner) is dict else inner))
    package = type(inner).__module__.partition(".")[0]
    if package in _NOT_FOR_SERIALIZERS and type(inner) is not memoryview:
        return False
    try:
        dask_serialize.dispatch(type(inner))
    except (TypeError, ImportError):
        return False
    return inner is value or check_dask_serializable(value)


def rebuild(header: bytes, frames: Collection[memoryview]) -> Any:
    """Restore a value from the result of `take_apart`."""
    read = msgpack.loads(header, raw=False, use_list=False)
    return merge_and_deserialize(read, decompress(read, list(frames)))
