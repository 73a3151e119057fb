"""Any task output as plain buffers, and back: how a value is kept outside of Python's objects.

`flatten` copies nothing where a value's memory is plain. What has no layout of its own goes by
pickle with its buffers apart, as Dask itself would. This module does no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy.typing as npt


@dataclass(frozen=True)
class Flat:
    """A value taken apart.

    Attributes
    ----------
    header
        What it takes to put it together again; small.
    buffers
        Its memory: one-dimensional, contiguous arrays of bytes.
    """

    header: bytes
    buffers: tuple[npt.NDArray[Any], ...]

    @cached_property
    def nbytes(self) -> int:
        return len(self.header) + sum(buffer.nbytes for buffer in self.buffers)
