"""The suite that every codec must pass. Subclass it and set `codec`.

The bytes are in host memory. A codec of a device copies them itself.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dask_gpurt.errors import ProtocolError
from tests.allocations import peak_nbytes

deterministic = settings(derandomize=True, deadline=None, max_examples=150)

ITEMSIZES = (1, 2, 4, 8, 16, 3)


def as_bytes(values) -> np.ndarray:
    return np.ascontiguousarray(values).view(np.uint8).reshape(-1)


def kinds_of_data(n: int = 4096) -> dict[str, tuple[np.ndarray, int]]:
    """Return bytes and item size for each kind of column."""
    rng = np.random.default_rng(0)
    prices = rng.integers(90_000, 10_000_000, n)
    days = rng.integers(8_000, 11_000, n) * 86_400_000_000
    with_gaps = (prices / 100).copy()
    with_gaps[::7] = np.nan
    text = b"".join(rng.choice([b"MAIL", b"REG AIR", b"TRUCK", b"FOB"], n))
    data = {
        "constant": (np.full(n, -7, "i8"), 8),
        "counting": (np.arange(n, dtype="i8") * 3 - 500, 8),
        "counting down": (np.arange(n, 0, -1, dtype="i4"), 4),
        "sorted keys": (np.sort(rng.integers(0, 10**12, n)), 8),
        "small range": (rng.integers(-100, 100, n), 8),
        "small range, big endian": (rng.integers(-100, 100, n).astype(">i8"), 8),
        "two bytes": (rng.integers(0, 10, n).astype("u2"), 2),
        "whole range": (rng.integers(-(2**63), 2**63 - 1, n), 8),
        "extremes": (np.array([-(2**63), 2**63 - 1] * (n // 2)), 8),
        "days": (days, 8),
        "days and missing": (np.where(days % 5 == 0, -(2**63), days), 8),
        "string offsets": (np.cumsum(rng.integers(3, 40, n)).astype("i4"), 4),
        "prices, divided": (prices / 100, 8),
        "prices, multiplied": (prices * 0.01, 8),
        "prices with gaps": (with_gaps, 8),
        "tenths and zeros": (rng.integers(-5, 5, n) / 10, 8),
        "negative zeros": (np.where(rng.random(n) < 0.5, -0.0, prices / 100), 8),
        "infinities": (np.where(rng.random(n) < 0.5, np.inf, prices / 100), 8),
        "noise": (rng.standard_normal(n), 8),
        "float32": (rng.integers(0, 50, n).astype("f4"), 4),
        "complex": (rng.integers(0, 9, n) + 1j, 16),
        "booleans": (rng.random(n) < 0.1, 1),
        "text": (np.frombuffer(text, np.uint8), 1),
        "random bytes": (rng.integers(0, 256, 8 * n).astype("u1"), 8),
        "three bytes": (np.tile(np.array([1, 2, 3], "u1"), n), 3),
        "padding at the end": (as_bytes(np.arange(n, dtype="i8"))[:-3], 8),
        "one item": (np.zeros(1, "i8"), 8),
        "nothing": (np.zeros(0, "i8"), 8),
    }
    return {name: (as_bytes(values), itemsize) for name, (values, itemsize) in data.items()}


def mostly_alike(itemsize: int) -> st.SearchStrategy[bytes]:
    """Draw bytes, some of which compress and some of which do not."""
    item = st.binary(min_size=itemsize, max_size=itemsize)
    repeated = st.tuples(st.lists(item, max_size=6), st.integers(0, 60))
    return st.one_of(
        st.binary(max_size=400),
        repeated.map(lambda pair: b"".join(pair[0]) * pair[1]),
        st.tuples(repeated, st.binary(max_size=itemsize)).map(
            lambda pair: b"".join(pair[0][0]) * pair[0][1] + pair[1]
        ),
    )


class CodecSuite:
    """The tests of a codec.

    Attributes
    ----------
    codec
        Set it in a subclass.
    compressible
        Names of data that the codec must shrink.
    sets_every_byte
        Whether equal bytes give equal payloads, or only payloads of one length.
    """

    codec: object
    compressible: tuple[str, ...] = ()
    sets_every_byte = True

    def encoded(self, raw, itemsize):
        pieces = self.codec.encode(raw, itemsize)
        return None if pieces is None else np.concatenate(pieces)

    def decoded(self, payload, nbytes, itemsize):
        # Outputs come from pools, so their old content must not matter.
        out = np.full(nbytes, 0xA5, dtype=np.uint8)
        self.codec.decode_into(payload, out, itemsize)
        return out

    def test_codec_number_fits_into_a_byte_of_the_wire(self):
        assert 1 <= self.codec.id <= 255
        assert self.codec.name
        assert self.codec.coder in ("none", "lz4", "zstd")

    @pytest.mark.parametrize("name", kinds_of_data())
    def test_every_kind_of_data_is_decoded(self, name):
        raw, itemsize = kinds_of_data()[name]
        before = raw.copy()
        payload = self.encoded(raw, itemsize)
        np.testing.assert_array_equal(raw, before)
        if payload is None:
            assert name not in self.compressible
            return
        assert payload.nbytes < raw.nbytes
        np.testing.assert_array_equal(self.decoded(payload, raw.nbytes, itemsize), raw)

    @pytest.mark.parametrize("itemsize", ITEMSIZES)
    def test_any_bytes_decode_to_themselves(self, itemsize):
        @deterministic
        @given(mostly_alike(itemsize))
        @example(b"")
        @example(b"\0" * 999)
        def check(data):
            raw = np.frombuffer(data, dtype=np.uint8)
            payload = self.encoded(raw, itemsize)
            if payload is not None:
                assert payload.nbytes < raw.nbytes
                np.testing.assert_array_equal(self.decoded(payload, raw.nbytes, itemsize), raw)

        check()

    def test_equal_bytes_give_equal_payloads(self):
        for raw, itemsize in kinds_of_data(512).values():
            first, second = (self.encoded(one, itemsize) for one in (raw, raw.copy()))
            assert (first is None) == (second is None)
            if first is None:
                continue
            assert first.nbytes == second.nbytes
            if self.sets_every_byte:
                np.testing.assert_array_equal(first, second)

    def test_bytes_at_any_address_are_taken(self):
        for raw, itemsize in kinds_of_data(512).values():
            shifted = np.empty(raw.nbytes + 1, dtype=np.uint8)[1:]
            shifted[:] = raw
            payload = self.encoded(shifted, itemsize)
            if payload is not None:
                moved = np.empty(payload.nbytes + 1, dtype=np.uint8)[1:]
                moved[:] = payload
                out = np.empty(raw.nbytes + 1, dtype=np.uint8)[1:]
                self.codec.decode_into(moved, out, itemsize)
                np.testing.assert_array_equal(out, raw)

    def test_payloads_may_be_any_read_only_buffer(self):
        raw, itemsize = kinds_of_data()[self.compressible[0]]
        raw.flags.writeable = False
        payload = self.encoded(raw, itemsize).tobytes()
        for kind in (bytes, bytearray, memoryview):
            np.testing.assert_array_equal(self.decoded(kind(payload), raw.nbytes, itemsize), raw)

    def test_decoding_to_another_length_is_refused(self):
        for name in self.compressible:
            raw, itemsize = kinds_of_data()[name]
            payload = self.encoded(raw, itemsize)
            for nbytes in (raw.nbytes - itemsize, raw.nbytes + itemsize, raw.nbytes - 1, 0):
                with pytest.raises(ProtocolError):
                    self.decoded(payload, nbytes, itemsize)

    def test_truncated_and_extended_payloads_are_refused(self):
        for name in self.compressible:
            raw, itemsize = kinds_of_data()[name]
            payload = self.encoded(raw, itemsize)
            for end in [*range(0, min(64, payload.nbytes)), payload.nbytes - 1]:
                with pytest.raises(ProtocolError):
                    self.decoded(payload[:end], raw.nbytes, itemsize)
            with pytest.raises(ProtocolError):
                self.decoded(np.append(payload, np.uint8(0)), raw.nbytes, itemsize)

    def test_damage_is_noticed(self):
        """Decoding gives the right bytes or an error, never other bytes."""
        for name in self.compressible:
            raw, itemsize = kinds_of_data()[name]
            payload = self.encoded(raw, itemsize)
            rng = np.random.default_rng(0)
            for position in {*range(min(48, payload.nbytes)), *rng.integers(0, payload.nbytes, 80)}:
                damaged = payload.copy()
                damaged[position] ^= 1 << int(rng.integers(8))
                self.right_or_refused(damaged, raw, itemsize)

    def right_or_refused(self, payload, raw, itemsize):
        try:
            got = self.decoded(payload, raw.nbytes, itemsize)
        except ProtocolError:
            return
        np.testing.assert_array_equal(got, raw)

    def test_any_bytes_as_a_payload_are_refused(self):
        @deterministic
        @given(st.sampled_from([0, *ITEMSIZES, 255]), st.binary(max_size=200), st.integers(1, 300))
        def check(itemsize, payload, nbytes):
            with pytest.raises(ProtocolError):
                self.decoded(payload, nbytes, itemsize)

        check()

    def test_no_payload_makes_decoding_allocate_more_than_its_output(self):
        raw, itemsize = kinds_of_data()[self.compressible[0]]
        payload = self.encoded(raw, itemsize)
        out = np.empty(64 * itemsize, dtype=np.uint8)

        def refuse():
            with pytest.raises(ProtocolError):
                self.codec.decode_into(payload, out, itemsize)

        assert peak_nbytes(refuse) < raw.nbytes
