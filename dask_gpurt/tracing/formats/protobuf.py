"""Perfetto's own trace format: packets of protocol buffers. Needs the package `perfetto`.

A file is one message, whose fields are packets. Ours come in compressed groups, which Perfetto
reads as they are. Names are written once. Times are differences to the packet before.
`packet_writer` and `packet_reader` know the content of packets.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import IO, Any

from dask_gpurt.errors import TraceFileError

#: The most bytes that a group of packets may have. In a damaged file it could have any length.
LONGEST_NBYTES = 1 << 28

#: Numbers of tracks. Rows of the trace have larger ones, processes those in between.
ABOUT, FIRST_PROCESS, FIRST_ROW = 1, 2, 1 << 32


def protos() -> Any:
    """Return the module with Perfetto's classes.

    Raises
    ------
    TraceFileError
        The package is missing.
    """
    try:
        from perfetto.protos.perfetto.trace import perfetto_trace_pb2
    except ImportError as error:
        raise TraceFileError(
            "this needs the package perfetto: run `pip install perfetto`. Files that end with"
            " .json.gz need nothing"
        ) from error
    return perfetto_trace_pb2


def packets(file: IO[bytes]) -> Iterator[Any]:
    """Yield the packets of a file in Perfetto's format, out of their groups."""
    from google.protobuf.message import DecodeError

    classes = protos()
    try:
        for data in _frames(file):
            packet = classes.TracePacket.FromString(data)
            if not packet.HasField("compressed_packets"):
                yield packet
                continue
            unpacker = zlib.decompressobj()
            unpacked = unpacker.decompress(packet.compressed_packets, LONGEST_NBYTES)
            if not unpacker.eof:
                raise TraceFileError("a group of packets is damaged")
            yield from classes.Trace.FromString(unpacked).packet
    except (DecodeError, zlib.error) as error:
        raise TraceFileError(f"it is damaged, or has another format: {error}") from error


def _frames(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the fields of the outermost message, which are packets."""
    while tag := file.read(1):
        if tag != b"\x0a":
            raise TraceFileError("it is damaged, or has another format")
        length = shift = 0
        while True:
            (byte,) = file.read(1) or (0x80,)
            length |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
            if shift > 35:
                raise TraceFileError("it is damaged, or its end is missing")
        if length > LONGEST_NBYTES:
            raise TraceFileError("it is damaged, or has another format")
        data = file.read(length)
        if len(data) < length:
            raise TraceFileError("its end is missing")
        yield data
