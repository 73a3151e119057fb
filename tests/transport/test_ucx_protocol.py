"""The protocol between UCX engines has exact bytes and lengths, and refuses invalid input."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.errors import ProtocolError
from dask_gpurt.transport.ucx.protocol import (
    GREETING_NBYTES,
    N_NUMBERS,
    SMALL_NBYTES,
    Descriptor,
    Greeting,
    make_tag,
    parcel_lengths,
    read_tag,
    seal,
    unseal,
)

DESCRIPTOR = Descriptor("10.0.0.1", 4711, "ab" * 16, "cd" * 16)

lengths = st.lists(st.sampled_from([0, 1, 7, SMALL_NBYTES - 1, SMALL_NBYTES, 20_000]), max_size=8)


def fill(sizes):
    return [np.full(size, place + 1, dtype=np.uint8) for place, size in enumerate(sizes)]


def test_descriptor_survives_serialization():
    assert Descriptor.from_plain(DESCRIPTOR.to_plain()) == DESCRIPTOR


@pytest.mark.parametrize(
    "wrong",
    [
        {"version": 2},
        {"version": None},
        {"host": "worker.example"},
        {"host": "1.2.3.4\0"},
        {"host": b"1.2.3.4"},
        {"port": 0},
        {"port": 1 << 16},
        {"port": "80"},
        {"port": True},
        {"token": "ab"},
        {"token": "xy" * 16},
        {"token": b"ab" * 16},
        {"key": None},
    ],
)
def test_invalid_descriptor_is_refused(wrong):
    with pytest.raises(ProtocolError):
        Descriptor.from_plain({**DESCRIPTOR.to_plain(), **wrong})
    with pytest.raises(ProtocolError):
        Descriptor.from_plain("not a mapping")


def test_greeting_has_the_documented_bytes():
    raw = Greeting("ab" * 16, "cd" * 16, 0x01020304, 1).encode()
    assert raw == b"GUX\x01" + b"\1\0\0\0" + b"\xab" * 16 + b"\xcd" * 16 + b"\4\3\2\1"
    assert len(raw) == GREETING_NBYTES
    assert Greeting.decode(raw) == Greeting("ab" * 16, "cd" * 16, 0x01020304, 1)
    for wrong in (b"", raw[:-1], raw + b"\0", b"HTTP" + raw[4:], b"GUX\x02" + raw[4:]):
        with pytest.raises(ProtocolError):
            Greeting.decode(wrong)


@given(st.integers(0, 2**32 - 1), st.integers(0, N_NUMBERS - 1), st.booleans())
def test_tag_holds_all_its_fields(channel, number, is_retraction):
    tag = make_tag(channel, number, is_retraction=is_retraction)
    assert 0 <= tag < 1 << 64
    assert read_tag(tag) == (channel, number, is_retraction)


@given(lengths, st.integers(0, N_NUMBERS - 1))
def test_both_sides_know_the_lengths_of_the_parcels(sizes, number):
    sent = fill(sizes)
    envelope = seal(number, sent)
    large = [buffer for buffer in sent if len(buffer) >= SMALL_NBYTES]
    assert parcel_lengths(sizes) == [len(envelope), *(len(buffer) for buffer in large)]
    received = [np.zeros(size, dtype=np.uint8) for size in sizes]
    unseal(envelope, number, received)
    for before, after in zip(sent, received, strict=True):
        if len(before) < SMALL_NBYTES:
            assert np.array_equal(before, after)


@pytest.mark.parametrize(
    ("sizes", "announced"),
    [([1, 2], [2, 1]), ([20_000, 9_000], [9_000, 20_000]), ([3], [3, 0]), ([0, 3], [3])],
)
def test_envelope_of_other_buffers_is_refused_unwritten(sizes, announced):
    buffers = [np.zeros(size, dtype=np.uint8) for size in announced]
    envelope = seal(1, fill(sizes))
    envelope.resize(parcel_lengths(announced)[0], refcheck=False)
    with pytest.raises(ProtocolError):
        unseal(envelope, 1, buffers)
    assert not any(buffer.any() for buffer in buffers)


def test_an_envelope_of_another_message_is_refused():
    with pytest.raises(ProtocolError, match="of message 2"):
        unseal(seal(2, fill([3])), 1, [np.zeros(3, dtype=np.uint8)])
