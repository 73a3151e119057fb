"""The protocol of two UCX engines: descriptors, greetings, tags and envelopes.

A message is a list of buffers under a number. It travels as parcels, in order and under one tag;
each is one UCX message. The first parcel is the envelope, with the lengths of all buffers and the
bytes of the small ones. Then follow the large buffers, one parcel each and not copied. Both sides
derive the lengths of the parcels from those of the buffers. So a receiver knows what must arrive,
and refuses a parcel of another length before a byte of it is written.

::

    greeting    magic "GUX\\x01" (the last byte is the version), verdict u32, token of who speaks
                16 bytes, key of who listens 16 bytes, channel u32
    tag         channel u32, is-retraction 1 bit, number 31 bits
    envelope    number u64, number of buffers u64, length of each buffer u64, small buffers

All of it is little-endian. Bytes in, values out: no UCX, no thread.
"""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dask_gpurt.errors import ProtocolError

#: Bytes of a message. Large buffers may also be in device memory: objects with a length and a
#: `__cuda_array_interface__`.
Buffer = npt.NDArray[np.uint8]

VERSION = 1
TOKEN_NBYTES = 16
#: Message numbers are below this.
N_NUMBERS = 1 << 31
#: Smaller buffers travel in the envelope. From this size on, as `ucxx` configures it, UCX sends a
#: buffer in place instead of copying it.
SMALL_NBYTES = 8 << 10
#: Minimum size of buffers in device memory, because an envelope is in host memory.
LEAST_DEVICE_NBYTES = SMALL_NBYTES

ACCEPTED, REFUSED = 0, 1

_GREETING = struct.Struct("<3sBI16s16sI")
_ENVELOPE = struct.Struct("<QQ")
GREETING_NBYTES = _GREETING.size
_MAGIC = b"GUX"


@dataclass(frozen=True)
class Descriptor:
    """An engine's address, and the secrets that verify it.

    Attributes
    ----------
    token
        Names the engine. The engine answers a greeting with its token, and no greeting to it
        contains the token. So an answer with the token proves the engine's identity.
    key
        Must be in a greeting to the engine; it proves that the caller was given the descriptor.
    """

    host: str
    port: int
    token: str
    key: str

    def to_plain(self) -> dict[str, str | int]:
        return {
            "version": VERSION,
            "host": self.host,
            "port": self.port,
            "token": self.token,
            "key": self.key,
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, object]) -> Descriptor:
        """Parse the result of a peer's `to_plain`.

        Raises
        ------
        ProtocolError
            It is malformed or of another version.
        """
        if not isinstance(plain, Mapping):
            raise ProtocolError("a UCX descriptor is a mapping")
        version = plain.get("version")
        if version != VERSION:
            raise ProtocolError(
                f"UCX descriptor of version {version!r}, this worker speaks {VERSION}: "
                "install the same dask-gpurt on every worker"
            )
        host, port = plain.get("host"), plain.get("port")
        token, key = plain.get("token"), plain.get("key")
        try:
            # Addresses only: a name lookup would block the thread that serves all links.
            address = str(ipaddress.ip_address(str(host)))
        except ValueError as error:
            raise ProtocolError(f"UCX descriptor with host {host!r}") from error
        if type(port) is not int or not 0 < port < 1 << 16:
            raise ProtocolError(f"UCX descriptor with port {port!r}")
        for name, secret in (("token", token), ("key", key)):
            if not isinstance(secret, str) or len(secret) != 2 * TOKEN_NBYTES:
                raise ProtocolError(f"UCX descriptor without a {name}")
            try:
                bytes.fromhex(secret)
            except ValueError as error:
                raise ProtocolError(f"UCX descriptor without a {name}") from error
        return cls(address, port, str(token), str(key))


@dataclass(frozen=True)
class Greeting:
    """The first message of either side of a new link, on the link's own stream.

    Attributes
    ----------
    channel
        Upper half of the tags that the receiver of this greeting must use on this link.
    """

    token: str
    key: str
    channel: int
    verdict: int = ACCEPTED

    def encode(self) -> bytes:
        return _GREETING.pack(
            _MAGIC,
            VERSION,
            self.verdict,
            bytes.fromhex(self.token),
            bytes.fromhex(self.key),
            self.channel,
        )

    @classmethod
    def decode(cls, raw: bytes) -> Greeting:
        """Parse a greeting.

        Raises
        ------
        ProtocolError
            It is malformed or of another version.
        """
        if len(raw) != GREETING_NBYTES:
            raise ProtocolError("greeting of the wrong length")
        magic, version, verdict, token, key, channel = _GREETING.unpack(raw)
        if magic != _MAGIC:
            raise ProtocolError("the peer does not speak the protocol of dask_gpurt")
        if version != VERSION:
            raise ProtocolError(
                f"greeting of version {version}, this worker speaks {VERSION}: "
                "install the same dask-gpurt on every worker"
            )
        return cls(token.hex(), key.hex(), channel, verdict)


def make_tag(channel: int, number: int, *, is_retraction: bool = False) -> int:
    return channel << 32 | int(is_retraction) << 31 | number


def read_tag(tag: int) -> tuple[int, int, bool]:
    """Return the channel, the number, and whether the tag retracts that message."""
    return tag >> 32, tag & (N_NUMBERS - 1), bool(tag & N_NUMBERS)


def parcel_lengths(lengths: Sequence[int]) -> list[int]:
    """Return the length of each parcel of a message whose buffers have these lengths."""
    small = sum(length for length in lengths if length < SMALL_NBYTES)
    large = [length for length in lengths if length >= SMALL_NBYTES]
    return [_ENVELOPE.size + 8 * len(lengths) + small, *large]


def seal(number: int, buffers: Sequence[Buffer]) -> Buffer:
    """Return the envelope of a message."""
    head = _ENVELOPE.pack(number, len(buffers))
    lengths = np.array([len(buffer) for buffer in buffers], dtype="<u8")
    small = [buffer for buffer in buffers if len(buffer) < SMALL_NBYTES]
    return np.concatenate([np.frombuffer(head, np.uint8), lengths.view(np.uint8), *small])


def unseal(envelope: Buffer, number: int, buffers: Sequence[Buffer]) -> None:
    """Check an envelope against the announcement, and fill the small buffers from it.

    Raises
    ------
    ProtocolError
        It is of another message, or its buffers have other lengths. No buffer was written.
    """
    position = _ENVELOPE.size + 8 * len(buffers)
    found, n_buffers = _ENVELOPE.unpack(envelope[: _ENVELOPE.size].tobytes())
    if (found, n_buffers) != (number, len(buffers)):
        raise ProtocolError(
            f"{n_buffers} buffers of message {found} instead of {len(buffers)} of {number}"
        )
    lengths = envelope[_ENVELOPE.size : position].view("<u8").tolist()
    if lengths != [len(buffer) for buffer in buffers]:
        raise ProtocolError(f"buffers of message {number} do not have the announced lengths")
    for buffer in buffers:
        if len(buffer) < SMALL_NBYTES:
            buffer[:] = envelope[position : position + len(buffer)]
            position += len(buffer)
