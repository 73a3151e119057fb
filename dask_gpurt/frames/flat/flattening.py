"""What the modules that take values apart have in common: where nodes and buffers come and go.

A *node* describes one value in plain terms that msgpack can write: a scalar as itself, anything
else as a list that begins with its kind. Memory is not in it: a node says the number of a buffer.
`frames.flat.values` is what implements both ports.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

#: One-dimensional, contiguous bytes.
Buffer = npt.NDArray[np.uint8]
Node = Any

#: Longer strings are not for headers.
_LONGEST_TEXT = 256


def is_scalar(value: Any) -> bool:
    """Whether a value is its own node."""
    kind = type(value)
    if value is None or kind is bool or kind is float:
        return True
    if kind is int:
        return bool(-(1 << 63) <= value < 1 << 63)
    if kind is not str or len(value) > _LONGEST_TEXT:
        return False
    # Half a surrogate pair cannot be written as UTF-8.
    return bool(value.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in value))


class Into(Protocol):
    """A value that is being taken apart."""

    def add(self, buffer: Buffer) -> int:
        """Hand over memory; returns the number to ask for it again."""

    def node(self, value: Any) -> Node:
        """Node of a value inside of the value at hand."""

    def pickled(self, value: Any) -> Node:
        """Node of a value that has no layout of its own."""


class OutOf(Protocol):
    """A value that is being put together."""

    def buffer(self, number: int) -> Buffer:
        """The memory that was handed over under this number."""

    def value(self, node: Node) -> Any:
        """The value that a node describes."""
