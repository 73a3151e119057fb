"""The CPU's codecs restore all bytes, and refuse damaged or forged payloads."""

from __future__ import annotations

import struct
import sys
import threading
import warnings
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_gpurt.codecs import coders, planes
from dask_gpurt.codecs.cpu import HOST_CODECS
from dask_gpurt.errors import ProtocolError
from tests.conformance.codec_suite import CodecSuite, kinds_of_data

BY_NAME = {codec.name: codec for codec in HOST_CODECS.values()}

_ALWAYS = ("constant", "small range", "string offsets")


class TestLz4(CodecSuite):
    codec = BY_NAME["lz4"]
    compressible = ("constant", "small range", "text", "padding at the end")


class TestZstd(CodecSuite):
    codec = BY_NAME["zstd"]
    compressible = (*_ALWAYS, "text", "booleans", "days")


class TestShuffleLz4(CodecSuite):
    codec = BY_NAME["shuffle+lz4"]
    compressible = (*_ALWAYS, "complex", "three bytes", "padding at the end")


class TestShuffleZstd(CodecSuite):
    codec = BY_NAME["shuffle+zstd"]
    compressible = (*_ALWAYS, "complex", "three bytes", "padding at the end")


_NARROW = (
    *_ALWAYS,
    "counting",
    "counting down",
    "sorted keys",
    "two bytes",
    "days",
    "prices, divided",
    "prices, multiplied",
    "tenths and zeros",
    "padding at the end",
)


class TestNarrow(CodecSuite):
    codec = BY_NAME["narrow"]
    compressible = _NARROW


class TestNarrowLz4(CodecSuite):
    codec = BY_NAME["narrow+lz4"]
    compressible = _NARROW


class TestNarrowZstd(CodecSuite):
    codec = BY_NAME["narrow+zstd"]
    compressible = _NARROW


def test_numbers_on_the_wire_never_change():
    assert {codec.id: codec.name for codec in HOST_CODECS.values()} == {
        1: "lz4",
        2: "zstd",
        3: "shuffle+lz4",
        4: "shuffle+zstd",
        5: "narrow",
        6: "narrow+lz4",
        7: "narrow+zstd",
    }


@pytest.mark.parametrize(
    ("name", "at_least"),
    [
        ("constant", 500),
        ("counting", 500),
        ("sorted keys", 1.9),
        ("small range", 7.9),
        ("days", 3.9),
        ("string offsets", 3.9),
        ("prices, divided", 1.9),
        ("prices, multiplied", 1.9),
        ("tenths and zeros", 7.9),
    ],
)
def test_narrow_chooses_the_narrowest_type(name, at_least):
    raw, itemsize = kinds_of_data()[name]
    payload = np.concatenate(BY_NAME["narrow"].encode(raw, itemsize))
    assert raw.nbytes / payload.nbytes > at_least


@pytest.mark.parametrize("name", ["infinities", "negative zeros", "noise", "prices with gaps"])
def test_narrow_refuses_doubles_that_are_not_decimal(name):
    raw, itemsize = kinds_of_data()[name]
    assert BY_NAME["narrow"].encode(raw, itemsize) is None


def test_one_item_that_is_not_a_decimal_is_found_anywhere():
    values = np.arange(1000) / 100
    codec = BY_NAME["narrow"]
    assert codec.encode(values.view(np.uint8), 8) is not None
    values[777] = np.pi
    assert codec.encode(values.view(np.uint8), 8) is None


def test_one_item_off_the_common_step_is_found_anywhere():
    values = np.arange(1000) % 200 * 86_400_000_000
    codec = BY_NAME["narrow"]
    assert sum(p.nbytes for p in codec.encode(values.view(np.uint8), 8)) < 1100
    values[777] += 1
    assert codec.encode(values.view(np.uint8), 8) is None


@pytest.mark.parametrize("itemsize", [1, 2, 3, 4, 8, 16])
def test_planes_are_split_and_joined(itemsize):
    raw = np.random.default_rng(0).integers(0, 256, 30 * itemsize).astype(np.uint8)
    split = planes.split(raw, itemsize)
    np.testing.assert_array_equal(split, raw.reshape(-1, itemsize).T.reshape(-1))
    out = np.empty_like(raw)
    planes.merge(split, itemsize, out)
    np.testing.assert_array_equal(out, raw)


@pytest.mark.parametrize("coder", ["lz4", "zstd"])
def test_a_payload_that_decodes_to_less_is_refused(coder):
    """pyarrow does not report it, and leaves the rest of its output undefined."""
    codec = BY_NAME[coder]
    raw = np.tile(np.arange(256, dtype=np.uint8), 16)
    payload = np.concatenate(codec.encode(raw, 1))
    with pytest.raises(ProtocolError):
        codec.decode_into(payload, np.empty(raw.nbytes + 64, np.uint8), 1)


@settings(derandomize=True, max_examples=400)
@given(
    st.sampled_from(sorted(HOST_CODECS)),
    st.sampled_from([1, 2, 3, 4, 8, 16]),
    st.integers(0, 300),
    # Parameters in the form of `narrow`, some within bounds, then arbitrary bytes.
    st.tuples(st.integers(0, 5), st.sampled_from([0, 1, 2, 3, 4, 8]), st.integers(0, 6)).map(bytes),
    st.binary(max_size=300),
    st.integers(0, 300),
)
def test_a_forged_payload_is_decoded_or_refused(
    number, itemsize, nbytes, parameters, rest, n_zeros
):
    """An attacker can forge the CRC, but must not write beyond `out`."""
    body = parameters + rest + b"\0" * n_zeros
    crc = zlib.crc32(body, zlib.crc32(struct.pack("<BBQ", number, itemsize, nbytes)))
    surroundings = np.full(nbytes + 64, 0xA5, dtype=np.uint8)
    out = surroundings[32 : 32 + nbytes]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            HOST_CODECS[number].decode_into(struct.pack("<I", crc) + body, out, itemsize)
        except ProtocolError:
            pass
    assert set(surroundings[:32]) | set(surroundings[32 + nbytes :]) == {0xA5}


def test_lack_of_memory_is_not_reported_as_damage():
    payload = coders.compress("zstd", np.zeros(1_000, np.uint8))
    with pytest.raises(MemoryError):
        coders.decompress("zstd", payload, 1 << 60)


def test_coder_refuses_bytes_of_another_format():
    with pytest.raises(ProtocolError, match="zstd"):
        coders.decompress("zstd", np.zeros(9, np.uint8), 100)


@pytest.mark.parametrize("name", BY_NAME)
def test_threads_do_not_disturb_each_other(name):
    codec = BY_NAME[name]
    columns = [np.arange(20_000) * step for step in (1, 7, 1000, 86_400)]
    failures = []
    gate = threading.Barrier(len(columns))

    def work(column):
        raw = column.view(np.uint8)
        gate.wait()
        for _ in range(10):
            out = np.empty_like(raw)
            codec.decode_into(np.concatenate(codec.encode(raw, 8)), out, 8)
            if not np.array_equal(out, raw):
                failures.append(name)

    threads = [threading.Thread(target=work, args=(column,)) for column in columns]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def runs_meanwhile(work, tries: int = 5000) -> bool:
    """Return whether another thread runs Python code during one of many calls of `work`.

    The interpreter never preempts a thread here. So the other thread runs only if `work` releases
    the lock, however long it takes, and only if a core is free at that moment.
    """
    gate = threading.Lock()
    gate.acquire()
    ran = []

    def other():
        with gate:
            ran.append(True)

    before = sys.getswitchinterval()
    thread = threading.Thread(target=other)
    thread.start()
    sys.setswitchinterval(3600)
    try:
        gate.release()
        for _ in range(tries):
            if ran:
                break
            work()
        meanwhile = bool(ran)
    finally:
        sys.setswitchinterval(before)
    thread.join()
    return meanwhile


def test_the_lock_check_itself_does_not_release_the_lock():
    assert not runs_meanwhile(lambda: [number * number for number in range(10_000)], tries=50)


@pytest.mark.parametrize("name", BY_NAME)
def test_codecs_run_without_the_interpreter_lock(name):
    codec = BY_NAME[name]
    raw = (np.arange(500_000) % 1000 * 11).view(np.uint8)
    payload = np.concatenate(codec.encode(raw, 8))
    out = np.empty_like(raw)
    assert runs_meanwhile(lambda: codec.encode(raw, 8))
    assert runs_meanwhile(lambda: codec.decode_into(payload, out, 8))


@pytest.mark.parametrize("name", [name for name in BY_NAME if "lz4" in name])
def test_sections_too_large_for_lz4_are_not_encoded(name, monkeypatch):
    codec = BY_NAME[name]
    raw = np.random.default_rng(1).integers(0, 1 << 30, 10_000).view(np.uint8)
    payload = np.concatenate(codec.encode(raw, 8))
    monkeypatch.setattr(coders, "LZ4_MOST_NBYTES", 1000)
    assert codec.encode(raw, 8) is None
    with pytest.raises(ProtocolError, match="more than lz4 encodes at once"):
        codec.decode_into(payload, np.empty_like(raw), 8)
    with pytest.raises(ValueError, match="80000 bytes are more than lz4"):
        coders.compress("lz4", raw)
