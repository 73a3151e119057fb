"""Messages to hand on are read as they were written, and no byte of a bad one is believed."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_gpurt.errors import DamagedError, ProtocolError
from dask_gpurt.shuffle import envelope
from dask_gpurt.shuffle.envelope import Forward

deterministic = settings(derandomize=True, max_examples=200)

forwards = st.lists(st.builds(Forward, st.text(max_size=30), st.binary(max_size=40)), max_size=5)
ONE = envelope.encode([Forward("tcp://10.0.0.1:1", b"header"), Forward("tcp://10.0.0.1:2", b"")])


def sealed_again(data):
    return data[:4] + zlib.crc32(data[8:]).to_bytes(4, "little") + data[8:]


@deterministic
@given(forwards)
def test_headers_survive_an_envelope(found):
    data = envelope.encode(found)
    assert envelope.is_envelope(data)
    assert envelope.decode(data) == found


@pytest.mark.parametrize("position", range(4, len(ONE)))
def test_a_flipped_bit_is_found(position):
    data = bytearray(ONE)
    data[position] ^= 1
    with pytest.raises(DamagedError):
        envelope.decode(bytes(data))


@pytest.mark.parametrize("length", range(len(ONE)))
def test_a_cut_message_is_refused(length):
    with pytest.raises((ProtocolError, DamagedError)):
        envelope.decode(ONE[:length])
    if length > 12:
        with pytest.raises(ProtocolError):
            envelope.decode(sealed_again(ONE[:length]))


def test_more_bytes_than_announced_are_refused():
    with pytest.raises(ProtocolError, match="1 bytes too many"):
        envelope.decode(sealed_again(ONE + b"x"))


def test_an_address_must_be_text():
    with pytest.raises(ProtocolError, match="names no address"):
        envelope.decode(sealed_again(ONE.replace(b"tcp://10.0.0.1:2", b"\xff" * 16)))


def test_a_header_of_shards_is_no_envelope():
    assert not envelope.is_envelope(b"GRT\x03")
    assert not envelope.is_envelope(b"")
