"""Decoders of files that hold traces, for `decoders`: ours, and exports of Nsight Systems."""

from __future__ import annotations

import io
import pathlib
import tempfile
import zlib
from collections.abc import Iterable
from dataclasses import replace

from dask_gpurt.errors import TraceFileError
from dask_gpurt.tracing.events import Trace
from dask_gpurt.tracing.files import read
from dask_gpurt.tracing.formats import chrome, packet_writer
from dask_gpurt.tracing.nsight.nsys import read_nsys
from tests.tracing.nsight.exports import TABLES, write_export
from tests.tracing.shuffle_trace import shuffle_trace

#: The smallest pages of a database. The fuzzer's inputs have at most 4 KiB.
_PAGE_NBYTES = 512


def _small_trace() -> Trace:
    trace = shuffle_trace(1, 1)
    return replace(trace, work=trace.work[:3], tasks=trace.tasks[:2], samples=trace.samples[:1])


def _in_file(name: str, raw: bytes) -> None:
    """Read a file with this content. Raise errors of all kinds but the documented one."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / name
        path.write_bytes(raw)
        try:
            (read_nsys if name.endswith("sqlite") else read)(path)
        except TraceFileError as error:
            assert name in str(error)


def look_at_chrome(raw: bytes) -> None:
    _in_file("a.json", raw)


def chrome_seeds() -> Iterable[bytes]:
    text = io.StringIO()
    chrome.write(_small_trace(), text)
    yield text.getvalue().encode()


def look_at_perfetto(raw: bytes) -> None:
    """Read packets in a group. The fuzzer would never get through the compression."""
    packed = zlib.compress(raw)
    length = _varint(len(packed))
    # The field `compressed_packets` of a packet.
    packet = b"\x92\x03" + length + packed
    _in_file("a.pftrace", b"\x0a" + _varint(len(packet)) + packet)


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*encoded, number])


def perfetto_seeds() -> Iterable[bytes]:
    file = io.BytesIO()
    packet_writer.write(_small_trace(), file)
    content = file.getvalue()
    yield zlib.decompress(content[content.index(b"\x78\x9c") :])


def look_at_export(raw: bytes) -> None:
    _in_file("a.sqlite", raw)


def export_seeds() -> Iterable[bytes]:
    for kept in ("CUPTI_ACTIVITY_KIND_MEMCPY", "NVTX_EVENTS"):
        with tempfile.TemporaryDirectory() as folder:
            others = tuple(table for table in TABLES if table != kept)
            path = pathlib.Path(folder) / "a.sqlite"
            yield write_export(path, others, page_nbytes=_PAGE_NBYTES).read_bytes()
