"""The payload of a received message: the buffers themselves, or their places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dask_gpurt.errors import ProtocolError


def is_inline(payload: Any) -> bool:
    """Return whether a payload is inside the control message."""
    return not isinstance(payload, Mapping)


def pairs(parts: Sequence[Any], lengths: Sequence[int]) -> list[tuple[Any, int]]:
    """Return each part of a payload with its announced length.

    Raises
    ------
    ProtocolError
        Parts are missing, or there are too many.
    """
    if len(parts) != len(lengths):
        raise ProtocolError(f"received {len(parts)} of {len(lengths)} buffers")
    return list(zip(parts, lengths, strict=True))


def view_of(part: Any, nbytes: int) -> npt.NDArray[np.uint8]:
    """Return the bytes of a part, without a copy.

    Raises
    ------
    ProtocolError
        The part does not have the announced length.
    """
    found = np.frombuffer(part, dtype=np.uint8)
    if found.nbytes != nbytes:
        raise ProtocolError(f"received {found.nbytes} of {nbytes} bytes")
    return found
