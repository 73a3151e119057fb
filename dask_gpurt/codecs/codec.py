"""The port a codec implements, and what is said about the bytes it gets.

A codec turns the bytes of one *section* of a packed shard (one column, one Arrow buffer, a pickle)
into fewer bytes and back. Which codec a section gets is `codecs.chooser`'s business, how a whole
shard is encoded that of `codecs.encoded_shards`. `tests/conformance/codec_suite.py` is the suite
that every codec has to pass.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

#: Plain bytes, contiguous.
Bytes = npt.NDArray[np.uint8]

#: What stands in a table for bytes that are passed on as they are.
RAW = 0


class Section(NamedTuple):
    """Neighbouring bytes of a packed shard that are alike.

    Sections of a shard are in order and cover it. Frames describe them as plain tuples of these
    four, so that neither room has to know the other.

    Attributes
    ----------
    name
        What it is, for whoever asks why it was compressed as it was. The same in every shard of
        one layout.
    offset, nbytes
        Where it lies in the shard's buffer.
    itemsize
        Bytes of one item. A section may end with a few bytes of padding that are no whole item.
    """

    name: str
    offset: int
    nbytes: int
    itemsize: int


class Codec(Protocol):
    """One way to encode the bytes of a section.

    Codecs keep no state between calls and may be called from any thread. Heavy work runs without
    the interpreter lock.
    """

    @property
    def id(self) -> int:
        """What it is called on the wire: 1 to 255, never given to anything else."""

    @property
    def name(self) -> str:
        """What people call it."""

    @property
    def coder(self) -> str:
        """Entropy coder inside: `none`, `lz4`, `zstd`; a setting can ask for one of them."""

    def suits(self, itemsize: int) -> bool:
        """Whether it is worth a try on items of this many bytes."""

    def encode(self, raw: Bytes, itemsize: int) -> list[Bytes] | None:
        """Payload, in pieces that belong one after the other; None if it would not be smaller."""

    def decode_into(self, payload: Any, out: Bytes, itemsize: int) -> None:
        """Fill `out`, which has exactly the length of what was encoded.

        Allocates no more than a small multiple of `out`, whatever the payload says.

        Raises
        ------
        ProtocolError
            The payload is not one of this codec, or does not decode to these many bytes, or is
            damaged. What `out` holds then is undefined.
        """
