"""The port that a codec implements, and the description of the bytes it encodes.

A codec encodes one *section* of a packed shard (one column, one Arrow buffer, a pickle) in fewer
bytes. `codecs.chooser` chooses the codec of a section. `codecs.encoded_shards` encodes whole
shards. Every codec must pass `tests/conformance/codec_suite.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

#: Contiguous bytes.
Bytes = npt.NDArray[np.uint8]

#: Codec number of bytes that are not encoded.
RAW = 0


class Section(NamedTuple):
    """A range of bytes of one kind in a packed shard.

    The sections of a shard are in order and cover it. Frames describe sections as plain tuples of
    these four fields, so the two packages do not depend on each other.

    Attributes
    ----------
    name
        Name in reports about compression. The same in every shard of one layout.
    offset, nbytes
        Place in the shard's buffer.
    itemsize
        Bytes of one item. A section may end with padding shorter than an item.
    """

    name: str
    offset: int
    nbytes: int
    itemsize: int


class Codec(Protocol):
    """An encoding of the bytes of a section.

    Codecs keep no state between calls, and any thread may call them. Heavy work runs without the
    interpreter lock.
    """

    @property
    def id(self) -> int:
        """Number on the wire: 1 to 255, never reused."""

    @property
    def name(self) -> str:
        """Name for people."""

    @property
    def coder(self) -> str:
        """The entropy coder: `none`, `lz4` or `zstd`. A setting can select one."""

    def suits(self, itemsize: int) -> bool:
        """Return whether the codec is worth trying on items of this many bytes."""

    def encode(self, raw: Bytes, itemsize: int) -> list[Bytes] | None:
        """Return the payload in pieces, in order; None if it would not be smaller."""

    def decode_into(self, payload: Any, out: Bytes, itemsize: int) -> None:
        """Decode a payload into `out`, which has the exact length of the raw bytes.

        Even for a damaged payload, this allocates at most a small multiple of `out`.

        Raises
        ------
        ProtocolError
            The payload is damaged, belongs to another codec, or decodes to another length. The
            content of `out` is undefined then.
        """
