"""Compression ratio and speed of each codec on TPC-H lineitem, and the choices of `auto`.

The benchmark makes one shard as a shuffle makes it: rows of one file that go to one worker, packed
by the pandas adapter. First it measures every codec on every section of the shard: the ratio, and
raw bytes a second of one thread with warm memory. Then it asks the rule `auto` to choose codecs for
links of several bandwidths. It encodes and decodes the whole shard with these choices, and compares
the time with that of sending raw bytes.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.harness import arguments, write_json
from dask_gpurt.codecs.chooser import Chooser
from dask_gpurt.codecs.codec import RAW, Bytes, Section
from dask_gpurt.codecs.cpu import HOST_CODECS
from dask_gpurt.codecs.encoded_shards import Encoded, decode_shard, encode_shard, joined
from dask_gpurt.demo.tpch_data import make_tpch
from dask_gpurt.devices.host_memory.malloc import PageKeeper
from dask_gpurt.frames.adapter import Packed, Selection
from dask_gpurt.frames.pandas_ import PandasFrames

#: Bytes a second of an ordinary cloud network, of a fast one, and of loopback or InfiniBand.
LINKS = {"100 MB/s": 100e6, "1 GB/s": 1e9, "5 GB/s": 5e9}


def make_shard(lineitem: Path, one_in: int) -> tuple[Packed, list[Section], bytes]:
    """One shard of the first file, its sections and its layout."""
    frame = pd.read_parquet(sorted(lineitem.iterdir())[0])
    slots = pd.util.hash_array(frame["l_orderkey"].to_numpy()) % one_in
    frame = frame.assign(slot=slots.astype(np.int64))
    adapter = PandasFrames(frame.iloc[:0], "slot", drop_column=True)
    opened = adapter.open(frame)
    (packed,) = opened.gather([Selection(np.flatnonzero(slots == 0), True)])
    assert isinstance(packed, Packed)
    return packed, joined(adapter.sections(opened.layout_key, packed)), opened.layout_key


def seconds(work: Any, repeats: int) -> float:
    taken = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


def measure(raw: Bytes, itemsize: int, repeats: int) -> dict[str, dict[str, float]]:
    """Return ratio and rates of each codec that makes these bytes smaller."""
    found = {}
    out = np.empty_like(raw)
    for codec in HOST_CODECS.values():
        pieces = codec.encode(raw, itemsize) if codec.suits(itemsize) else None
        if pieces is None:
            continue
        payload = np.concatenate(pieces)
        encode_s = seconds(lambda c=codec: c.encode(raw, itemsize), repeats)  # type: ignore[misc]
        decode_s = seconds(
            lambda c=codec, p=payload: c.decode_into(p, out, itemsize),  # type: ignore[misc]
            repeats,
        )
        found[codec.name] = {
            "ratio": raw.nbytes / payload.nbytes,
            "encode_rate": raw.nbytes / encode_s,
            "decode_rate": raw.nbytes / decode_s,
        }
    return found


def whole_shard(
    packed: Packed, sections: list[Section], choices: list[int], bandwidth: float, repeats: int
) -> dict[str, float]:
    """Encode and decode a shard with these codecs, and compare with sending it raw."""
    buffer = packed.buffer
    out = np.empty_like(buffer)
    encoded: Encoded = encode_shard(buffer, sections, choices)
    encode_s = seconds(lambda: encode_shard(buffer, sections, choices), repeats)
    decode_s = seconds(lambda: decode_shard(encoded.parts, encoded.table, out), repeats)
    assert np.array_equal(out, buffer)
    wire_s = encoded.nbytes / bandwidth
    # The receiver copies raw bytes once, too, into memory of its own.
    copy_s = seconds(lambda: np.copyto(out, buffer), repeats)
    raw_s = max(buffer.nbytes / bandwidth, copy_s)
    return {
        "ratio": buffer.nbytes / encoded.nbytes,
        "encode_rate": buffer.nbytes / encode_s,
        "decode_rate": buffer.nbytes / decode_s,
        "raw_s": raw_s,
        "encoded_s": max(encode_s, wire_s, decode_s),
        "speedup": raw_s / max(encode_s, wire_s, decode_s),
    }


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--cache", help="folder in which data sets are kept")
    parser.add_argument(
        "--one-in", type=int, default=12, help="the shard has one of this many rows of a file"
    )
    options = parser.parse_args()
    # A worker that shuffles keeps freed pages, so that its buffers do not come from fresh ones.
    PageKeeper(2**30).acquire()
    lineitem = make_tpch(options.scale, options.cache, print) / "lineitem"
    packed, sections, key = make_shard(lineitem, options.one_in)
    print(f"a shard of {packed.n_rows} rows, {packed.buffer.nbytes / 1e6:.1f} MB")
    names = [codec.name for codec in HOST_CODECS.values()]
    print("ratio, encode MB/s, decode MB/s")
    print(" ".join([f"{'section':32}", f"{'KB':>6}", *(f"{name:>17}" for name in names)]))
    report: dict[str, Any] = {"n_rows": packed.n_rows, "nbytes": packed.buffer.nbytes}
    table: dict[str, Any] = {}
    for section in sections:
        raw = packed.buffer[section.offset : section.offset + section.nbytes]
        found = measure(raw, section.itemsize, options.repeats)
        table[section.name] = {
            "nbytes": section.nbytes,
            "itemsize": section.itemsize,
            "codecs": found,
        }
        cells = [
            "{ratio:5.1f}{0:6.0f}{1:6.0f}".format(
                found[name]["encode_rate"] / 1e6, found[name]["decode_rate"] / 1e6, **found[name]
            )
            if name in found
            else "-"
            for name in names
        ]
        print(
            f"{section.name[:32]:32} {section.nbytes / 1e3:6.0f}",
            *(f"{cell:>17}" for cell in cells),
        )
    report["sections"] = table
    report["links"] = {}
    for link, bandwidth in LINKS.items():
        chooser = Chooser("auto")
        began = time.perf_counter()
        choices = chooser.choose(key, sections, packed.buffer, link, bandwidth)
        first_s = time.perf_counter() - began
        again_s = seconds(
            lambda c=chooser, a=(link, bandwidth): c.choose(key, sections, packed.buffer, *a),  # type: ignore[misc]
            options.repeats,
        )
        measured = whole_shard(packed, sections, choices, bandwidth, options.repeats)
        named = {
            section.name: HOST_CODECS[choice].name if choice != RAW else "none"
            for section, choice in zip(sections, choices, strict=True)
        }
        report["links"][link] = {
            "bandwidth": bandwidth,
            "choices": named,
            "first_choice_s": first_s,
            "next_choice_s": again_s,
            **measured,
        }
        print(
            f"\n{link}: ratio {measured['ratio']:.2f}, encode {measured['encode_rate'] / 1e6:.0f}"
            f" MB/s, decode {measured['decode_rate'] / 1e6:.0f} MB/s, the shard in"
            f" {measured['encoded_s'] * 1e3:.2f} ms against {measured['raw_s'] * 1e3:.2f} ms raw"
            f" ({measured['speedup']:.2f} times); chosen in {first_s * 1e3:.0f} ms,"
            f" then {again_s * 1e6:.0f} us"
        )
        print("  " + ", ".join(f"{name}: {codec}" for name, codec in named.items()))
    write_json(options.json, [], codecs=report)


if __name__ == "__main__":
    main()
