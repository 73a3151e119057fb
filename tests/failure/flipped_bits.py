"""A program that flips single bits in files and messages, and checks that readers notice.

A reader has to raise an error or return the same rows. The files are on a real disk, and the
messages are those that workers send. The seed determines the bits. A flip may crash the process, so
tests start this as a program; its last line tells the position.

    python -m tests.failure.flipped_bits --flips 100000 --seed 7
"""

from __future__ import annotations

import argparse
import asyncio
import os
import pickle
import random
import resource
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from dask.array.core import concatenate3

from dask_gpurt.codecs.cpu import HOST_CODECS
from dask_gpurt.codecs.encoded_shards import Encoded, encode_shard, joined
from dask_gpurt.devices.host_memory.pages import SharedPages
from dask_gpurt.devices.host_memory.pool import HostPool
from dask_gpurt.errors import (
    DamagedError,
    DamagedValueError,
    ProtocolError,
    ShardStorageError,
    TransportError,
)
from dask_gpurt.frames.adapter import Packed, Piece, Selection
from dask_gpurt.frames.chunks.arrays import Arrays
from dask_gpurt.frames.chunks.rechunking import Rechunking
from dask_gpurt.frames.flat.values import flatten, restore
from dask_gpurt.frames.pandas_ import PandasFrames
from dask_gpurt.memory.files.disk_tier import DiskTier
from dask_gpurt.metrics import Counters
from dask_gpurt.shuffle import messages
from dask_gpurt.shuffle.budget import Budget
from dask_gpurt.shuffle.messages import Outgoing, shard_of
from dask_gpurt.shuffle.shards import ShardStore
from dask_gpurt.transport import wire
from dask_gpurt.transport.shared import Borrower, Lender, seal

N_ROWS = 300
#: Errors that a reader may raise. The package handles each by a restart, a retry or computing
#: again. None is an error of a library.
NOTICED = (ProtocolError, TransportError, DamagedValueError, ShardStorageError)
#: Limit of the process's memory: readers must not trust a length that a flip made large.
MOST_NBYTES = 6 << 30


def frame() -> pd.DataFrame:
    n = N_ROWS
    return pd.DataFrame(
        {
            "slot": np.zeros(n, np.int64),
            "float": np.linspace(0, 1, n),
            "small": np.arange(n, dtype="i2"),
            "bool": np.arange(n) % 2 == 0,
            "time": pd.date_range("2020", periods=n, freq="h", tz="Europe/Berlin"),
            "masked": pd.array([None if k % 7 == 0 else k for k in range(n)], dtype="Int32"),
            "category": pd.Categorical([f"c{k % 5}" for k in range(n)]),
            "text": pd.array([f"text {k}" for k in range(n)], dtype="string[pyarrow]"),
            "objects": [k if k % 3 else (k, "x") for k in range(n)],
            "list": pd.array([[k, k + 1] for k in range(n)], pd.ArrowDtype(pa.list_(pa.int64()))),
        }
    )


@dataclass
class Shards:
    """A packed shard, and a function that makes rows of its bytes."""

    adapter: Any
    layout_key: bytes
    packed: Packed
    join: Callable[[list[Piece]], Any]

    @property
    def header(self) -> wire.ShardHeader:
        return wire.ShardHeader(
            self.layout_key, 0, 5, 0, 1, 0, wire.pack_rows([self.packed.n_rows])
        )

    def rows(self, layout_key: bytes, packed: Packed) -> Any:
        body = self.adapter.unpack(layout_key, packed)
        return self.join([Piece(body, 0, packed.n_rows)])


def shards_of_a_frame() -> Shards:
    source = frame()
    adapter = PandasFrames(source.iloc[:0], "slot", True)
    opened = adapter.open(source)
    (packed,) = opened.gather([Selection(np.arange(N_ROWS, dtype=np.intp), True)])
    assert isinstance(packed, Packed)
    return Shards(adapter, opened.layout_key, packed, adapter.concatenate)


def shards_of_an_array() -> Shards:
    arrays = Arrays(Rechunking(((40,), (50,)), ((40,), (50,))), concatenate3)
    opened = arrays.open(np.random.default_rng(0).random((40, 50)), (0, 0))
    packed = opened.cut(opened.parts, True)
    assert isinstance(packed, Packed)
    return Shards(arrays, opened.layout_key, packed, partial(arrays.concatenate, (0, 0)))


@dataclass
class Kind:
    """Bytes of one kind: their number, and the outcomes of flips so far."""

    name: str
    nbytes: int
    read: Callable[[int, int], Any]
    expected: Any
    outcomes: Counter[str] = field(default_factory=Counter)


@contextmanager
def flipped(fd: int, position: int, bit: int) -> Iterator[None]:
    """Flip one bit of a file inside the block."""
    (byte,) = good = os.pread(fd, 1, position)
    os.pwrite(fd, bytes([byte ^ 1 << bit]), position)
    try:
        yield
    finally:
        os.pwrite(fd, good, position)


def spilled(name: str, shards: Shards, directory: Path) -> Kind:
    store = ShardStore(shards.adapter, (0, 1), str(directory / name), Budget(0), Counters())
    store.add([shard_of(shards.header, packed=shards.packed)])
    store.make_room()
    store.seal()
    (file,) = store._files

    def read(position: int, bit: int) -> Any:
        try:
            with flipped(file._fd, position, bit):
                return shards.join(store.pieces(0))
        finally:
            store.make_room()

    return Kind(f"spilled {name}", file.nbytes, read, shards.rows(shards.layout_key, shards.packed))


def value(name: str, value: Any, compression: str | None, directory: Path) -> Kind:
    tier = DiskTier(str(directory), None, compression)
    place = tier.put(flatten(value))
    fd = os.open(place.path, os.O_RDWR | os.O_CLOEXEC)

    def read(position: int, bit: int) -> Any:
        with flipped(fd, position, bit):
            flat = tier.get(place)
        return restore(flat.header, flat.buffers)

    return Kind(f"value {name}, {compression}", os.fstat(fd).st_size, read, value)


def message(name: str, shards: Shards, codec: int | None) -> Kind:
    def encode(outgoing: Outgoing) -> Encoded:
        packed = outgoing.packed
        sections = joined(shards.adapter.sections(shards.layout_key, packed))
        known = HOST_CODECS.get(codec or 0)
        choices = [known.id if known and known.suits(one.itemsize) else 0 for one in sections]
        return encode_shard(packed.buffer, sections, choices)

    sent = messages.remote_message([Outgoing(shards.header, shards.packed)], encode)
    whole = sent.header + b"".join(buffer.tobytes() for buffer in sent.buffers)

    def read(position: int, bit: int) -> Any:
        came = np.frombuffer(whole, np.uint8).copy()
        came[position] ^= 1 << bit
        headers = wire.decode(came[: len(sent.header)].tobytes())
        lengths = messages.buffer_lengths(headers, 1 << 30)
        ends = np.cumsum([len(sent.header), *lengths])
        buffers = [came[a:b] for a, b in pairwise(ends)]
        (shard,) = messages.decode_shards(
            headers, buffers, lambda header: np.empty(header.buffer_nbytes, np.uint8)
        )
        assert shard.packed is not None
        return shards.rows(shard.layout_key, shard.packed)

    how = HOST_CODECS[codec].name if codec else "as it is"
    return Kind(
        f"message {name}, {how}", len(whole), read, shards.rows(shards.layout_key, shards.packed)
    )


def within_a_host(shards: Shards) -> Kind:
    """Return the bytes of a message whose shard is in memory that the receiver can read."""
    memory = SharedPages()
    lent = HostPool(0, source=memory).empty(shards.packed.buffer.nbytes)
    lent[:] = shards.packed.buffer
    lender, borrower = Lender(memory), Borrower(asyncio.new_event_loop())
    token = borrower.open(lender.descriptor)
    packed = replace(shards.packed, buffer=lent)
    sent = messages.local_message([Outgoing(shards.header, packed)])
    extents = lender.place(lent)
    assert extents is not None
    # The message itself carries a second buffer, as it does with small ones.
    carried = b"small"
    places = b"".join(position.to_bytes(8, "little") for place in extents for position in place)
    whole = token + places + carried + seal(token, [extents, carried]).to_bytes(4, "little")
    n = len(token), len(token) + len(places), len(whole) - 4

    def read(position: int, bit: int) -> Any:
        came = bytearray(sent.header + whole)
        came[position] ^= 1 << bit
        headers = wire.decode(bytes(came[: len(sent.header)]))
        payload = bytes(came[len(sent.header) :])
        numbers = np.frombuffer(payload[n[0] : n[1]], "<u8").reshape(-1, 2).tolist()
        by, small = payload[: n[0]], payload[n[1] : n[2]]
        if seal(by, [numbers, small]) != int.from_bytes(payload[n[2] :], "little"):
            raise DamagedError("places in shared memory were damaged on their way")
        (nbytes,) = messages.buffer_lengths(headers, 1 << 30)
        out = np.empty(nbytes, np.uint8)
        borrower.read(by, [(borrower.checked(by, numbers, nbytes), out)])
        (shard,) = messages.decode_shards(headers, [out], lambda header: out)
        assert shard.packed is not None
        return [shards.rows(shard.layout_key, shard.packed), small]

    expected = [shards.rows(shards.layout_key, shards.packed), carried]
    return Kind("message within a host", len(sent.header) + len(whole), read, expected)


def kinds(directory: Path) -> list[Kind]:
    of_frame, of_array = shards_of_a_frame(), shards_of_an_array()
    found = [spilled("frame", of_frame, directory), spilled("array", of_array, directory)]
    noise = np.random.default_rng(1)
    values = {
        "frame": frame(),
        "array": noise.integers(0, 99, 40_000),
        "table": pa.table({"text": [f"text {k % 99}" for k in range(20_000)]}),
        "objects": {"a": noise.random(10_000), "b": [frame(), {1, 2}, "text"] * 3},
    }
    for compression in (None, "lz4", "zstd"):
        found += [value(name, one, compression, directory) for name, one in values.items()]
    for codec in (None, *HOST_CODECS):
        found += [message("frame", of_frame, codec), message("array", of_array, codec)]
    return [*found, within_a_host(of_frame)]


def is_same(got: Any, expected: Any) -> bool:
    return type(got) is type(expected) and pickle.dumps(plain(got)) == pickle.dumps(plain(expected))


def plain(value: Any) -> Any:
    """Convert a value to types whose pickles are equal if the values are."""
    if isinstance(value, pd.DataFrame):
        return [str(value.dtypes), value.index.tolist(), [repr(value[c].tolist()) for c in value]]
    if isinstance(value, np.ndarray):
        return [value.shape, str(value.dtype), value.tobytes()]
    if isinstance(value, pa.Table):
        return [str(value.schema), repr(value.to_pylist())]
    if isinstance(value, dict):
        return [[key, plain(one)] for key, one in value.items()]
    if isinstance(value, list):
        return [plain(one) for one in value]
    return repr(value)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MOST_NBYTES, MOST_NBYTES))
    chosen = random.Random(options.seed)
    n_bad = 0
    with tempfile.TemporaryDirectory() as directory:
        found = kinds(Path(directory))
        for number in range(options.flips):
            kind = found[number % len(found)]
            # Half of all flips are at the beginning, where headers and other small parts are.
            end = min(kind.nbytes, 400) if chosen.random() < 0.5 else kind.nbytes
            position, bit = chosen.randrange(end), chosen.randrange(8)
            where = f"flip {number}: {kind.name}, byte {position}, bit {bit}"
            print(where, end="\r", flush=True)
            try:
                got = kind.read(position, bit)
            except NOTICED:
                kind.outcomes["noticed"] += 1
                continue
            except Exception as error:
                print(f"{where}: ERROR {error!r}")
                n_bad += 1
                continue
            is_right = is_same(got, kind.expected)
            kind.outcomes["same"] += is_right
            if not is_right:
                print(f"{where}: WRONG ROWS")
                n_bad += 1
    for kind in found:
        print(f"{kind.name:40} {kind.nbytes:9,} bytes: {dict(kind.outcomes)}")
    print(f"{options.flips:,} flips, {n_bad} wrong or unexpected")
    return 1 if n_bad else 0


if __name__ == "__main__":
    sys.exit(main())
