"""The ports between the modules that decompose values: nodes and buffers.

A *node* describes one value in plain terms that msgpack can write. A scalar is its own node. Any
other node is a list that starts with its kind. A node does not contain memory, but the number of a
buffer. `frames.flat.values` implements both ports.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

#: A one-dimensional, contiguous array of bytes.
Buffer = npt.NDArray[np.uint8]
Node = Any

#: Longest string in a header.
_LONGEST_TEXT = 256


def is_scalar(value: Any) -> bool:
    """Return whether a value is its own node."""
    kind = type(value)
    if value is None or kind is bool or kind is float:
        return True
    if kind is int:
        return bool(-(1 << 63) <= value < 1 << 63)
    if kind is not str or len(value) > _LONGEST_TEXT:
        return False
    # UTF-8 cannot encode half a surrogate pair.
    return bool(value.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in value))


class Into(Protocol):
    """A value that is being decomposed."""

    def add(self, buffer: Buffer) -> int:
        """Add a buffer and return its number."""

    def node(self, value: Any) -> Node:
        """Return the node of a value inside the current value."""

    def pickled(self, value: Any) -> Node:
        """Return the node of a value without a layout of its own."""


class OutOf(Protocol):
    """A value that is being composed."""

    def buffer(self, number: int) -> Buffer:
        """Return the buffer with this number."""

    def value(self, node: Node) -> Any:
        """Return the value that a node describes."""


class LibraryNodes(NamedTuple):
    """The nodes of one library's values.

    Attributes
    ----------
    accepts
        Returns whether `node` takes a value of the library.
    node
        Returns the node of a value.
    makers
        For each kind of node, the function that composes its value.
    """

    accepts: Callable[[Any], bool]
    node: Callable[[Any, Into], Node]
    makers: Mapping[str, Callable[[Node, OutOf], Any]]
