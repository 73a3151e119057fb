"""Targets for a fuzzer: every decoder that reads bytes from a peer, a disk or a file.

A target takes bytes and calls one decoder on them. It returns for input that the decoder accepts
or refuses as documented; it raises for anything else. `python -m tests.fuzz` runs a coverage-guided
fuzzer over a target. `test_corpus.py` replays the inputs that such a run kept.

Checksums are corrected before the call, so that the fuzzer reaches the code behind them. Pickles
are not loaded, because an input with a pickle could run any code.
"""

from __future__ import annotations

import functools
import pathlib
import struct
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

import msgpack
import numpy as np
import pandas as pd

from dask_gpurt.codecs.cpu import HOST_CODECS
from dask_gpurt.codecs.encoded_shards import SectionEntry, decode_shard, pack_table, unpack_table
from dask_gpurt.errors import ConfigError, DamagedError, ProtocolError, WorkloadError
from dask_gpurt.frames.adapter import Packed, Piece, Selection, fresh
from dask_gpurt.frames.chunks.arrays import Arrays
from dask_gpurt.frames.chunks.chunk_layout import ChunkLayout
from dask_gpurt.frames.chunks.rechunking import Rechunking
from dask_gpurt.frames.flat import values
from dask_gpurt.frames.gather import group_rows
from dask_gpurt.frames.pandas_ import PandasFrames
from dask_gpurt.frames.pickling import Pickling
from dask_gpurt.memory.files import value_file
from dask_gpurt.shuffle import messages
from dask_gpurt.simulate.workload import StableStr, TaskModel, Workload
from dask_gpurt.topology import description, machine
from dask_gpurt.tracing import records
from dask_gpurt.tracing.clocks import ClockExchange
from dask_gpurt.tracing.merge import RecordedProcess, merged
from dask_gpurt.transport import wire
from dask_gpurt.transport.ucx import protocol
from tests.fuzz import files_of_traces

DATA = pathlib.Path(__file__).parents[1] / "data"
#: Most memory that a target lets a decoder fill.
MOST_NBYTES = 1 << 20


@dataclass(frozen=True)
class Target:
    """A decoder, and valid inputs from which a fuzzer starts.

    Attributes
    ----------
    look
        Calls the decoder. Raises only errors that the decoder does not document.
    seeds
        Valid inputs.
    """

    look: Callable[[bytes], None]
    seeds: Callable[[], Iterable[bytes]]


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise ValueError("a pickle, which no target opens")


# --------------------------------------------------------------------- messages


def _shard_headers() -> list[wire.ShardHeader]:
    entries = (SectionEntry(0, 1, 64, 64), SectionEntry(1, 8, 400, 36))
    return [
        wire.ShardHeader(
            b"layout", 0, 7, 0, 2, 3, wire.pack_rows((1, 0, 5)), 4096, 128, 64, 9, (4096,), b""
        ),
        wire.ShardHeader(
            b"", 5, 1, 0, 1, 0, wire.pack_rows((2,)), 464, 0, 0, 0, (64, 36), pack_table(entries)
        ),
    ]


def _look_at_header(raw: bytes) -> None:
    sealed = wire.MAGIC + bytes([wire.VERSION]) + struct.pack("<I", zlib.crc32(raw)) + raw
    try:
        headers = wire.decode(sealed)
        messages.buffer_lengths(headers, MOST_NBYTES)
    except (ProtocolError, DamagedError):
        return
    assert wire.decode(wire.encode(headers)) == headers


def _look_at_table(raw: bytes) -> None:
    length = int.from_bytes(raw[:2], "little")
    packed, payload = raw[2 : 2 + length], raw[2 + length :]
    try:
        table = unpack_table(packed)
        nbytes = sum(entry.raw_nbytes for entry in table)
        if nbytes > MOST_NBYTES:
            return
        decode_shard([payload], table, np.zeros(nbytes, np.uint8))
    except (ProtocolError, DamagedError):
        return


def _table_seeds() -> Iterable[bytes]:
    plain = np.arange(512, dtype="<i8").view(np.uint8)
    for codec in HOST_CODECS.values():
        if codec.suits(8) and (encoded := codec.encode(plain, 8)) is not None:
            payload = b"".join(piece.tobytes() for piece in encoded)
            entries = [
                SectionEntry(codec.id, 8, plain.nbytes, len(payload)),
                SectionEntry(0, 1, 3, 3),
            ]
            packed = pack_table(entries)
            yield len(packed).to_bytes(2, "little") + packed + payload + b"abc"


def _look_at_payload(raw: bytes) -> None:
    if len(raw) < 4:
        return
    codec = list(HOST_CODECS.values())[raw[0] % len(HOST_CODECS)]
    itemsize = 1 << raw[1] % 4
    out = np.zeros(int.from_bytes(raw[2:4], "little"), np.uint8)
    if not codec.suits(itemsize):
        return
    meant = zlib.crc32(struct.pack("<BBQ", codec.id, itemsize, out.nbytes))
    payload = struct.pack("<I", zlib.crc32(raw[4:], meant)) + raw[4:]
    try:
        codec.decode_into(payload, out, itemsize)
    except (ProtocolError, DamagedError):
        return


def _payload_seeds() -> Iterable[bytes]:
    for number, codec in enumerate(HOST_CODECS.values()):
        for power, dtype in enumerate(("<u1", "<i2", "<i4", "<i8")):
            plain = (np.arange(600, dtype=dtype) // 3).view(np.uint8)
            if codec.suits(1 << power):
                encoded = codec.encode(plain, 1 << power)
                if encoded is not None:
                    payload = b"".join(piece.tobytes() for piece in encoded)
                    head = bytes([number, power]) + plain.nbytes.to_bytes(2, "little")
                    yield head + payload[4:]


# ----------------------------------------------------------------------- shards


@functools.cache
def _frames() -> tuple[tuple[pd.DataFrame, bytes, Packed], ...]:
    """Return meta, layout and packed rows of frames without objects."""
    n = 40
    base = pd.DataFrame(
        {
            "p": np.arange(n) % 4,
            "f": np.linspace(0, 1, n),
            "tz": pd.date_range("2020", periods=n, freq="h", tz="Europe/Berlin"),
            "mask": pd.array([None if k % 7 == 0 else k for k in range(n)], dtype="Int32"),
            "cat": pd.Categorical([f"c{k % 5}" for k in range(n)]),
            "s": pd.array([f"text {k}" for k in range(n)], dtype="string[pyarrow]"),
            "iv": pd.interval_range(0, n),
        }
    )
    levels = pd.MultiIndex.from_arrays([base.p, base.s], names=["k", "t"])
    made = []
    for frame in (base, base[["p", "f"]], base[["p", "s"]], base[["p", "f"]].set_index(levels)):
        opened = PandasFrames(frame.iloc[:0], "p", True).open(frame)
        rows, _ = group_rows(frame["p"].to_numpy(), 4)
        (packed,) = opened.gather([Selection(rows, leaves=True, empty=fresh, ascending=False)])
        assert isinstance(packed, Packed)
        made.append((frame.iloc[:0], opened.layout_key, packed))
    return tuple(made)


def _look_at_frame_layout(raw: bytes) -> None:
    meta, _, packed = _frames()[raw[0] % len(_frames())] if raw else _frames()[0]
    adapter = PandasFrames(meta, "p", True, pickling=Pickling(loads=_refuse))
    try:
        body = adapter.unpack(raw[1:], packed)
        adapter.concatenate([Piece(body, 0, 10), Piece(body, 20, packed.n_rows)])
    except (ValueError, TypeError):
        # `concatenate` may get types that cannot be united, which a user would see, too.
        return


def _frame_layout_seeds() -> Iterable[bytes]:
    return [bytes([number]) + key for number, (_, key, _) in enumerate(_frames())]


def _look_at_chunk_layout(raw: bytes) -> None:
    rechunking = Rechunking(((10, 10), (10,)), ((20,), (5, 5)))
    arrays = Arrays(rechunking, lambda nested: nested, pickling=Pickling(loads=_refuse))
    try:
        arrays.unpack(raw, Packed(np.zeros(800, np.uint8), 100))
    except ValueError:
        return


def _chunk_layout_seeds() -> Iterable[bytes]:
    for dtype in ("<f8", ">i4", "M8[ns]", "S3", "U2", [("a", "<i4"), ("b", "<f4", (2,))]):
        layout = ChunkLayout.of(np.zeros((10, 10), dtype), {})
        if layout is not None:
            yield layout.key


# ----------------------------------------------------------------------- values


def _value_seeds() -> Iterable[bytes]:
    frame = pd.DataFrame({"a": np.arange(9), "s": pd.array(list("abcdefghi"), dtype="string")})
    for value in (frame, np.arange(50.0), {"a": np.arange(5), "b": [1, (2.5, None)]}, b"x" * 600):
        flat = values.flatten(value)
        nbytes = [buffer.nbytes for buffer in flat.buffers]
        head = msgpack.packb(nbytes)
        yield bytes([len(head)]) + head + flat.header[8:]


def _look_at_value(raw: bytes) -> None:
    if not raw:
        return
    try:
        nbytes = msgpack.unpackb(raw[1 : 1 + raw[0]])
        if not isinstance(nbytes, list) or sum(nbytes) > MOST_NBYTES or min(nbytes) < 0:
            return
        buffers = [np.zeros(length, np.uint8) for length in nbytes]
    except (ValueError, TypeError, msgpack.UnpackException):
        return
    rest = raw[1 + raw[0] :]
    header = values.MAGIC + bytes([values.VERSION]) + struct.pack("<I", zlib.crc32(rest)) + rest
    try:
        values.restore(header, buffers, loads=_refuse)
    except ValueError:
        return


def _look_at_lead(raw: bytes) -> None:
    lead = np.zeros(max(40, len(raw)), np.uint8)
    lead[: len(raw)] = np.frombuffer(raw, np.uint8)
    lead[:4] = np.frombuffer(value_file.MAGIC + bytes([value_file.VERSION]), np.uint8)
    lead[8:32] = np.array([lead.nbytes, lead.nbytes, 77], "<u8").view(np.uint8)
    lead[4:8] = np.frombuffer(struct.pack("<I", zlib.crc32(lead[8:].data)), np.uint8)
    try:
        value_file.read_lead(lead, lead.nbytes, 77)
    except ValueError:
        return


def _lead_seeds() -> Iterable[bytes]:
    for lengths in ((), (10, 70), (5000,)):
        layout = value_file.layout_of(6, lengths)
        lead = np.zeros(layout.lead_nbytes, np.uint8)
        stored = [np.ones(length, np.uint8) for length in lengths]
        entries = [
            value_file.BufferEntry(offset, length, length, 1, 0)
            for offset, length in zip(layout.offsets, lengths, strict=True)
        ]
        value_file.write_lead(lead, layout, 77, b"header", stored, entries)
        yield lead.tobytes()


# ---------------------------------------------------------------- other messages


def _look_at_greeting(raw: bytes) -> None:
    try:
        greeting = protocol.Greeting.decode(raw)
    except ProtocolError:
        return
    assert greeting.encode() == raw


def _look_at_envelope(raw: bytes) -> None:
    buffers = [np.zeros(5, np.uint8), np.zeros(9000, np.uint8), np.zeros(0, np.uint8)]
    nbytes = protocol.parcel_lengths([len(buffer) for buffer in buffers])[0]
    envelope = np.frombuffer(raw[:nbytes].ljust(nbytes, b"\0"), np.uint8)
    try:
        protocol.unseal(envelope, 3, buffers)
    except ProtocolError:
        return


def _envelope_seeds() -> Iterable[bytes]:
    buffers = [np.ones(5, np.uint8), np.ones(9000, np.uint8), np.ones(0, np.uint8)]
    return [protocol.seal(3, buffers).tobytes()]


def _plain(raw: bytes) -> Any:
    try:
        return msgpack.unpackb(raw, strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException):
        return None


def _look_at_report(raw: bytes) -> None:
    try:
        report = machine.MachineReport.from_plain(_plain(raw))
    except ProtocolError:
        return
    assert machine.MachineReport.from_plain(report.to_plain()) == report


def _report_seeds() -> Iterable[bytes]:
    place = machine.MachinePlace((machine.Hop("0000:07:00.0", 1e9),), 0)
    gpu = machine.Gpu(place, "GPU-1", 1 << 36, (machine.Bond(None, 4.5e11),))
    card = machine.Card("eth0", "ethernet", 1e9, ("10.0.0.1",), place)
    node = machine.NumaNode(0, 1 << 38)
    for one in (
        machine.Machine("host", "boot", (node,), (gpu,), (card,)),
        machine.Machine("host", "boot", (), (), ()),
    ):
        yield msgpack.packb(machine.MachineReport(one, "0").to_plain())


def _look_at_descriptor(raw: bytes) -> None:
    try:
        descriptor = protocol.Descriptor.from_plain(_plain(raw))
    except ProtocolError:
        return
    assert protocol.Descriptor.from_plain(descriptor.to_plain()) == descriptor


def _descriptor_seeds() -> Iterable[bytes]:
    for host in ("127.0.0.1", "::1"):
        plain = protocol.Descriptor(host, 7000, "ab" * 16, "cd" * 16).to_plain()
        yield msgpack.packb(plain)


# ------------------------------------------------------------------------ files


def _look_at_description(raw: bytes) -> None:
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return
    try:
        found = description.parse(text)
    except ConfigError:
        return
    assert description.parse(description.dump(found)) == found


def _description_seeds() -> Iterable[bytes]:
    return [path.read_bytes() for path in sorted((DATA / "topologies").glob("*.yaml"))]


def _look_at_trace(raw: bytes) -> None:
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return
    try:
        found = Workload.from_json(text)
    except WorkloadError:
        return
    assert Workload.from_json(found.to_json()) == found


def _trace_seeds() -> Iterable[bytes]:
    tasks = (
        TaskModel(StableStr("a"), (), 0.5, 10, produces_data=True),
        TaskModel(StableStr("b"), (0,), 0.25, 20),
    )
    yield Workload("two", tasks, (1,)).to_json().encode()


def _look_at_events(raw: bytes) -> None:
    if len(raw) >= 8:
        raw = raw[:4] + struct.pack("<I", zlib.crc32(raw[8:])) + raw[8:]
    found = records.decode(raw)
    assert found.problem or not raw or len(found.records) or len(found.names) > 1
    exact = [ClockExchange(0.0, 0.0, 0.0, 0.0)]
    one = RecordedProcess("tcp://a:1", "a", "a", raw, exchanges=exact)
    other = RecordedProcess("tcp://b:1", "b", "b", raw, exchanges=exact)
    trace = merged(one, [other], 0.0, 10.0)
    assert all(0 <= work.start_s <= work.end_s for work in trace.work)


def _events_seeds() -> Iterable[bytes]:
    encoder = records.RecordEncoder()
    encoder.key(1, 5, "a")
    encoder.task_run(1, 1.0, 1.5, 2.0)
    encoder.work("communication", "send", 9, 1.0, 2.0, "tcp://b:1", "tcp", 1, 1, 1, 7)
    encoder.work("communication", "receive", 9, 1.0, 2.0, "tcp://a:1", "", 1, 1)
    encoder.instant("eviction", 1.0, "x")
    encoder.sample("cpu", 1.0, 0.5)
    yield encoder.block()
    encoder.assigned(1, "a", "tcp://b:1", 0.5, 1.0, 3.0, 10)
    encoder.times(1, 5, 1.0, 1.5, 2.0, 7)
    encoder.needs(1, [1, 2, 3, 4, 5])
    yield encoder.block()


TARGETS: dict[str, Target] = {
    "message-header": Target(
        _look_at_header, lambda: [wire.encode(_shard_headers())[8:], wire.encode([])[8:]]
    ),
    "shard-table": Target(_look_at_table, _table_seeds),
    "codec-payload": Target(_look_at_payload, _payload_seeds),
    "frame-layout": Target(_look_at_frame_layout, _frame_layout_seeds),
    "chunk-layout": Target(_look_at_chunk_layout, _chunk_layout_seeds),
    "value-header": Target(_look_at_value, _value_seeds),
    "value-file-lead": Target(_look_at_lead, _lead_seeds),
    "ucx-greeting": Target(
        _look_at_greeting,
        lambda: [protocol.Greeting("ab" * 16, "cd" * 16, 5).encode()],
    ),
    "ucx-envelope": Target(_look_at_envelope, _envelope_seeds),
    "ucx-descriptor": Target(_look_at_descriptor, _descriptor_seeds),
    "machine-report": Target(_look_at_report, _report_seeds),
    "topology-file": Target(_look_at_description, _description_seeds),
    "trace-events": Target(_look_at_events, _events_seeds),
    "trace-file": Target(_look_at_trace, _trace_seeds),
    "chrome-trace": Target(files_of_traces.look_at_chrome, files_of_traces.chrome_seeds),
    "perfetto-trace": Target(files_of_traces.look_at_perfetto, files_of_traces.perfetto_seeds),
    "nsys-export": Target(files_of_traces.look_at_export, files_of_traces.export_seeds),
}
