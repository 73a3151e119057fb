"""Host tiers pass the conformance suite, count bytes correctly, and refuse unsuitable values."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from dask_gpurt.codecs.coders import compress
from dask_gpurt.devices.host_memory.pinned import PinnedPool, plain
from dask_gpurt.errors import DamagedValueError, TierFullError, ValueRefusedError
from dask_gpurt.frames.flat.values import Flat
from dask_gpurt.memory import host_tiers
from dask_gpurt.memory.host_tiers import CompressedTier, PinnedTier
from tests.conformance.tier_suite import TierSuite

PATIENCE_S = 20.0
MANY = 64 << 20


def compressible(nbytes, seed=0):
    """Return bytes of which every fourth one is noise."""
    values = np.zeros(nbytes, dtype=np.uint8)
    values[::4] = noise(values[::4].nbytes, seed)
    return values


def with_zeros_in_the_middle(buffer):
    """Return a buffer whose sampled middle compresses better than the rest."""
    middle = buffer.nbytes // 2
    buffer[middle - (128 << 10) : middle + (128 << 10)] = 0
    return buffer


def noise(nbytes, seed=0):
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def flat(*buffers, header=b"header"):
    return Flat(header, tuple(buffers))


def assert_equal(got, expected):
    assert got.header == expected.header
    assert len(got.buffers) == len(expected.buffers)
    for mine, theirs in zip(got.buffers, expected.buffers, strict=True):
        np.testing.assert_array_equal(mine, theirs)


class TestPinned(TierSuite):
    def make_tier(self, capacity_nbytes=None):
        return PinnedTier(PinnedPool(capacity_nbytes or 300 << 20, 1 << 16))


class TestLz4(TierSuite):
    is_choosy = True
    coder = "lz4"

    def make_tier(self, capacity_nbytes=None):
        return CompressedTier(capacity_nbytes or 300 << 20, self.coder)


class TestZstd(TestLz4):
    coder = "zstd"


@pytest.fixture(params=["pinned", "lz4", "zstd"])
def tier(request):
    if request.param == "pinned":
        return PinnedTier(PinnedPool(MANY, 1 << 16))
    return CompressedTier(MANY, request.param)


@pytest.mark.parametrize("ends", ["drop", "close"])
def test_read_in_flight_survives_a_drop(monkeypatch, tier, ends):
    """Its memory is not reused before the read ends."""
    values = [compressible(100_000, 1), compressible(100_000, 2)]
    place = tier.put(flat(*values))
    entered, go_on = threading.Event(), threading.Event()

    def empty(nbytes):
        if entered.is_set():
            assert go_on.wait(PATIENCE_S)
        entered.set()
        return plain(nbytes)

    monkeypatch.setattr(host_tiers, "plain", empty)
    got = []
    thread = threading.Thread(target=lambda: got.append(tier.get(place)), daemon=True)
    thread.start()
    assert entered.wait(PATIENCE_S)
    if ends == "drop":
        tier.drop(place)
        tier.drop(place)
        for n in range(3, 6):
            tier.put(flat(compressible(300_000, n)))
    else:
        tier.close()
    go_on.set()
    thread.join(PATIENCE_S)
    assert_equal(got[0], flat(*values))
    if ends == "close":
        assert tier.used_nbytes == 0


# ------------------------------------------------------------------ pinned


@pytest.mark.parametrize(
    ("nbytes", "header_nbytes", "counted"),
    [(150, 6, 200), (200, 99, 200), (150, 100, 300), (200, 250, 400)],
)
def test_pinned_tier_counts_whole_blocks(nbytes, header_nbytes, counted):
    """A header counts if it is as large as a block, and rounded down."""
    pool = PinnedPool(1000, 100)
    tier = PinnedTier(pool)
    place = tier.put(flat(noise(nbytes - 45), noise(45), header=b"h" * header_nbytes))
    assert place.nbytes == tier.used_nbytes == pool.used_nbytes == counted


def test_pinned_tier_keeps_empty_values():
    tier = PinnedTier(PinnedPool(1000, 100))
    for value in (flat(header=b""), flat(noise(0), header=b""), flat(noise(0), noise(0))):
        assert_equal(tier.get(tier.put(value)), value)


def test_pinned_tier_shares_its_pool():
    pool = PinnedPool(1000, 100)
    tier = PinnedTier(pool)
    staging = pool.take(600)
    tier.put(flat(noise(300)))
    assert (tier.used_nbytes, tier.capacity_nbytes) == (300, 1000)
    tier.put(flat(noise(100)))
    with pytest.raises(TierFullError, match="no pinned memory for 1 bytes"):
        tier.put(flat(noise(1)))
    pool.give_back(staging)
    tier.put(flat(noise(1)))


def test_refused_value_leaves_nothing_in_the_pinned_tier():
    pool = PinnedPool(1000, 100)
    tier = PinnedTier(pool)
    with pytest.raises(TierFullError):
        tier.put(flat(noise(1001)))
    assert pool.used_nbytes == tier.used_nbytes == 0


def test_failed_copy_leaves_nothing():
    pool = PinnedPool(1000, 100)
    tier = PinnedTier(pool)
    with pytest.raises(TypeError):
        tier.put(flat(np.array(["a"] * 10, dtype=object)))
    assert pool.used_nbytes == tier.used_nbytes == 0


def test_warm_pinned_tier_allocates_nothing():
    pool = PinnedPool(1 << 20, 1 << 12)
    tier = PinnedTier(pool)
    rng = np.random.default_rng(0)
    tier.drop(tier.put(flat(noise(300_000))))
    for n in range(300):
        value = flat(noise(int(rng.integers(0, 250_000)), n))
        place = tier.put(value)
        assert_equal(tier.get(place), value)
        tier.drop(place)
    assert pool.n_allocations == 1


# ------------------------------------------------------------------ compressed


@pytest.fixture(params=["lz4", "zstd"])
def coder(request):
    return request.param


def test_compressed_tier_counts_its_bytes(coder):
    tier = CompressedTier(MANY, coder)
    value = flat(np.zeros(3 << 20, dtype=np.uint8), compressible(2 << 20))
    place = tier.put(value)
    held = sum(piece.payload.nbytes for pieces in place.buffers for piece in pieces)
    assert tier.used_nbytes == place.nbytes == held + len(value.header)
    assert place.nbytes < 0.3 * value.nbytes
    assert place.raw_nbytes == value.nbytes


def test_compressed_tier_holds_no_more_than_it_counts(coder):
    place = CompressedTier(MANY, coder).put(flat(compressible(3 << 20)))
    for pieces in place.buffers:
        assert all(piece.payload.base is None for piece in pieces)


@pytest.mark.parametrize("size", [2000, 100_000, 3 << 20])
def test_incompressible_value_goes_to_the_next_tier(coder, size):
    tier = CompressedTier(MANY, coder)
    with pytest.raises(TierFullError):
        tier.put(flat(noise(size)))
    assert tier.used_nbytes == 0


def test_incompressible_value_costs_one_sample(coder, monkeypatch):
    tried = []

    def counting(coder, raw):
        tried.append(raw.nbytes)
        return compress(coder, raw)

    monkeypatch.setattr(host_tiers, "compress", counting)
    with pytest.raises(TierFullError):
        CompressedTier(MANY, coder).put(flat(noise(8 << 20)))
    assert sum(tried) <= 64 << 10


def test_value_compressible_only_in_the_middle_is_refused(coder):
    buffer = with_zeros_in_the_middle(noise(4 << 20))
    tier = CompressedTier(MANY, coder)
    with pytest.raises(TierFullError, match="do not shrink"):
        tier.put(flat(buffer))
    assert tier.used_nbytes == 0


def test_incompressible_buffer_of_a_value_is_kept_raw(coder):
    value = flat(np.zeros(4 << 20, dtype=np.uint8), noise(1 << 20))
    tier = CompressedTier(MANY, coder)
    place = tier.put(value)
    assert [piece.is_raw for piece in place.buffers[1]] == [True]
    assert_equal(tier.get(place), value)


def test_a_value_that_does_not_fit_is_refused(coder):
    value = flat(compressible(1 << 20))
    needed = CompressedTier(MANY, coder).put(value).nbytes
    tier = CompressedTier(2 * needed + needed // 2, coder)
    places = [tier.put(value), tier.put(value)]
    with pytest.raises(TierFullError, match="no room"):
        tier.put(value)
    assert tier.used_nbytes == 2 * needed
    tier.drop(places[0])
    tier.put(value)


def test_value_too_large_after_compression_is_refused(coder):
    """The sampled middle compresses better than the rest of the value."""
    buffer = with_zeros_in_the_middle(compressible(4 << 20))
    value = flat(buffer)
    needed = CompressedTier(MANY, coder).put(value).nbytes
    tier = CompressedTier(2 * needed - 1, coder)
    tier.put(value)
    with pytest.raises(TierFullError, match="no room"):
        tier.put(value)
    assert tier.used_nbytes == needed


@pytest.mark.parametrize("promises_more", [False, True])
def test_value_larger_than_the_tier_is_never_tried_again(coder, promises_more):
    buffer = compressible(4 << 20)
    if promises_more:
        buffer = with_zeros_in_the_middle(buffer)
    value = flat(buffer)
    needed = CompressedTier(MANY, coder).put(value).nbytes
    tier = CompressedTier(needed - 1, coder)
    with pytest.raises(ValueRefusedError):
        tier.put(value)
    assert tier.used_nbytes == 0


def test_damage_is_an_error(coder):
    tier = CompressedTier(MANY, coder)
    place = tier.put(flat(compressible(1 << 20)))
    piece = place.buffers[0][0]
    piece.payload[:] = 0xFF
    with pytest.raises(DamagedValueError):
        tier.get(place)


# ------------------------------------------------------------------ buffers on a device


class OnDevice:
    """A buffer on a device that can only be copied to pieces of host memory."""

    def __init__(self, data):
        self._data = data
        self.nbytes = data.nbytes
        self.targets = []

    def copy_into(self, parts):
        start = 0
        for part in parts:
            part[:] = self._data[start : start + part.nbytes]
            start += part.nbytes
            self.targets.append(part)
        assert start == self.nbytes


class Pinning:
    """Allocates the memory of a pool, and says which memory is of the pool."""

    def __init__(self):
        self.memory = []

    def __call__(self, nbytes):
        self.memory.append(plain(nbytes))
        return self.memory[-1]

    def has(self, part):
        return any(np.shares_memory(part, one) for one in self.memory)


@pytest.fixture
def pinning():
    return Pinning()


@pytest.fixture
def pinned(pinning):
    return PinnedTier(PinnedPool(1 << 20, 1 << 10, pin=pinning))


def test_device_buffers_are_copied_into_blocks_directly(pinned, pinning):
    device = OnDevice(noise(5000))
    place = pinned.put(flat(noise(100, 1), device, OnDevice(noise(0))))
    assert len(device.targets) == 1, "adjacent blocks"
    assert all(map(pinning.has, device.targets))
    assert_equal(pinned.get(place), flat(noise(100, 1), noise(5000), noise(0)))
    assert not any(map(pinning.has, pinned.get(place).buffers))


def test_lent_device_buffers_stay_in_their_blocks(pinned, pinning):
    place = pinned.put(flat(noise(100, 1), OnDevice(noise(5000))))
    with pinned.lent(place) as (header, (host, device)):
        assert header == b"header"
        assert isinstance(host, np.ndarray) and not pinning.has(host)
        np.testing.assert_array_equal(host, noise(100, 1))
        assert all(map(pinning.has, device.parts))
        np.testing.assert_array_equal(np.concatenate(device.parts), noise(5000))
        pinned.drop(place)
        assert pinned.used_nbytes, "its memory is reused only when nobody reads it"
    assert not pinned.used_nbytes
    with pytest.raises(KeyError), pinned.lent(place):
        pass


def test_failed_copy_from_a_device_frees_its_blocks(pinned):
    class Lost(OnDevice):
        def copy_into(self, parts):
            raise RuntimeError("the device is lost")

    with pytest.raises(RuntimeError, match="lost"):
        pinned.put(flat(Lost(noise(5000))))
    assert not pinned.used_nbytes


def test_value_on_a_device_is_copied_to_the_host_once():
    host, device = noise(10), OnDevice(noise(5000))
    value = flat(host, device)
    with pytest.raises(TypeError, match="on a device"):
        _ = value.arrays
    found = value.on_host()
    assert found.arrays[0] is host
    assert len(device.targets) == 1
    assert_equal(found, flat(host, noise(5000)))
    assert found.on_host().arrays == found.arrays
