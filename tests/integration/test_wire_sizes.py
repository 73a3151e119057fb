"""Incompressible shards do not grow on the wire, headers included."""

from __future__ import annotations

import itertools

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import dask_gpurt
from dask_gpurt.plugins.shuffle.transports import CommTransport
from dask_gpurt.shuffle import messages
from tests.integration.comparing import partitions

N_INPUTS = 4
#: Rows for shards of some MiB, the usual size, and for small ones.
ROWS, FEW_ROWS = 1 << 18, 100
VALUE_NBYTES = 4096


def random_bytes(rng, rows):
    """Return long random values, whose offsets take few bytes in comparison."""
    values = [rng.bytes(VALUE_NBYTES) for _ in range(rows)]
    return pd.Series(values, dtype=pd.ArrowDtype(pa.binary()))


KINDS = {
    # Random floats have equal bits only at their start.
    "floats": lambda rng, rows: rng.random(rows),
    "words": lambda rng, rows: rng.integers(0, 1 << 64, rows, dtype="u8"),
    "bytes": random_bytes,
}


def frame(kind, rows, number):
    """Return a frame of random data only, so that nothing compresses."""
    rng = np.random.default_rng(number)
    if kind == "bytes":
        rows = rows * 8 // VALUE_NBYTES + 8
    key, index = rng.integers(0, 1 << 63, (2, rows))
    return pd.DataFrame({"key": key, "x": KINDS[kind](rng, rows)}).set_axis(index)


@pytest.fixture
def headers(monkeypatch):
    """Return the headers of all messages that were sent."""
    sent = []
    remote_message = messages.remote_message

    def noted(*args):
        message = remote_message(*args)
        sent.append(message.header)
        return message

    monkeypatch.setattr(messages, "remote_message", noted)
    return sent


def shuffled(client, monkeypatch, mode, kind, rows):
    """Return the status of a shuffle between hosts over links so slow that any codec pays."""
    monkeypatch.setattr(CommTransport, "bandwidth", 1e6)
    with dask.config.set({"gpurt.shuffle.transport": "comm", "gpurt.shuffle.compression": mode}):
        dask_gpurt.enable(client)
    parts = [dask.delayed(frame)(kind, rows, number) for number in range(N_INPUTS)]
    lazy = dd.from_delayed(parts, meta=frame(kind, rows, 0).iloc[:0], verify_meta=False)
    partitions(client, lazy.shuffle("key", npartitions=4))
    found = dask_gpurt.status(client)
    assert all(worker["codecs"] for worker in found["workers"].values()), "no codec was tried"
    (one,) = found["shuffles"]
    return one


modes_and_kinds = pytest.mark.parametrize(
    ("mode", "kind"), list(itertools.product(["auto", "lz4", "zstd"], KINDS))
)


@pytest.mark.share(4)
@modes_and_kinds
def test_wire_size_exceeds_shards_by_one_percent_at_most(client, monkeypatch, mode, kind):
    one = shuffled(client, monkeypatch, mode, kind, ROWS)
    assert one["sent_nbytes"] > 1 << 20
    assert one["sent_nbytes"] / 2 < one["wire_nbytes"] <= 1.01 * one["sent_nbytes"]


@modes_and_kinds
def test_small_shards_add_only_their_headers(client, monkeypatch, headers, mode, kind):
    one = shuffled(client, monkeypatch, mode, kind, FEW_ROWS)
    assert one["messages"] == len(headers)
    assert one["wire_nbytes"] <= one["sent_nbytes"] + sum(map(len, headers))
    # A header has names and types of the columns, and some numbers for each shard.
    assert max(map(len, headers)) < 1 << 10
