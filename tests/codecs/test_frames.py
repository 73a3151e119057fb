"""Shards of real frames pass through sections and codecs, and back."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from dask_gpurt.codecs.chooser import Chooser
from dask_gpurt.codecs.codec import RAW
from dask_gpurt.codecs.encoded_shards import (
    decode_shard,
    encode_shard,
    joined,
    pack_table,
    unpack_table,
)
from dask_gpurt.frames.adapter import Packed, Piece, Selection
from dask_gpurt.frames.pandas_ import PandasFrames

ROWS = 3000


def frame() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "slot": 0,
            "key": rng.integers(0, 10_000, ROWS),
            "price": rng.integers(1, 10**6, ROWS) / 100,
            "noise": rng.random(ROWS),
            "when": pd.Timestamp("2020-01-01") + pd.to_timedelta(rng.integers(0, 999, ROWS), "D"),
            "line": rng.integers(1, 8, ROWS).astype("i4"),
            "maybe": pd.array(np.where(rng.random(ROWS) > 0.5, 7, None), dtype="Int16"),
            "kind": pd.Categorical(rng.choice(["a", "b", "c"], ROWS)),
            "text": pd.array(rng.choice(["MAIL", "TRUCK", None], ROWS), dtype="str"),
            "thing": pd.Series([{"n": i % 5} for i in range(ROWS)], dtype=object),
        },
        index=pd.Index(np.arange(ROWS)),
    )


def wide_frame() -> pd.DataFrame:
    columns = {f"c{n}": np.arange(200) * n for n in range(300)}
    return pd.DataFrame({"slot": 0, **columns}, index=pd.Index(np.arange(200)))


@pytest.mark.parametrize("make", [frame, wide_frame])
@pytest.mark.parametrize("mode", ["auto", "none", "lz4", "zstd"])
def test_a_frame_comes_back(mode, make):
    expected = make()
    adapter = PandasFrames(expected.iloc[:0], "slot", drop_column=True)
    opened = adapter.open(expected)
    n_rows = len(expected)
    (packed,) = opened.gather([Selection(np.arange(n_rows), True)])
    sections = joined(adapter.sections(opened.layout_key, packed))
    # The link is so slow that the rates of the machine do not matter.
    choices = Chooser(mode).choose(opened.layout_key, sections, packed.buffer, "link", 1e3)
    encoded = encode_shard(packed.buffer, sections, choices)
    if mode == "none":
        assert set(choices) == {RAW}
        assert encoded.parts == (packed.buffer,)
    else:
        assert encoded.nbytes < packed.buffer.nbytes / 2

    table = unpack_table(pack_table(encoded.table))
    out = np.empty_like(packed.buffer)
    decode_shard([part.tobytes() for part in encoded.parts], table, out)
    received = Packed(out, n_rows, packed.arrow_nbytes, packed.pickle_nbytes)
    body = adapter.unpack(opened.layout_key, received)
    got = adapter.concatenate([Piece(body, 0, n_rows)])
    pd.testing.assert_frame_equal(got, expected.drop(columns="slot"))


def test_a_wide_frame_is_encoded_in_few_calls():
    frame = wide_frame()
    adapter = PandasFrames(frame.iloc[:0], "slot", drop_column=True)
    opened = adapter.open(frame)
    (packed,) = opened.gather([Selection(np.arange(len(frame)), True)])
    assert len(joined(adapter.sections(opened.layout_key, packed))) < 30
