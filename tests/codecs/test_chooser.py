"""The chooser picks codecs from short samples, and samples again when data or rates change."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field

import numpy as np
import pytest

from dask_gpurt.codecs import sampling
from dask_gpurt.codecs.chooser import AGAIN_NBYTES, Chooser
from dask_gpurt.codecs.codec import RAW, Section
from dask_gpurt.codecs.cpu import HOST_CODECS
from dask_gpurt.codecs.encoded_shards import decode_shard, encode_shard, joined
from dask_gpurt.codecs.sampling import middle, try_codecs


class Clock:
    """A clock that tests set forward."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@dataclass
class ScriptedCodec:
    """A codec that keeps the first of `ratio` bytes, at fixed rates on the test's clock."""

    clock: Clock
    id: int = 9
    name: str = "scripted"
    coder: str = "lz4"
    ratio: int = 4
    encode_rate: float = 1e9
    decode_rate: float = 2e9
    encoded: list[int] = field(default_factory=list)

    def suits(self, itemsize):
        return True

    def encode(self, raw, itemsize):
        self.clock.now += raw.nbytes / self.encode_rate
        self.encoded.append(raw.nbytes)
        return None if self.ratio == 1 else [raw[: raw.nbytes // self.ratio]]

    def decode_into(self, payload, out, itemsize):
        self.clock.now += out.nbytes / self.decode_rate
        out[:] = payload[0]


BUFFER = np.zeros(2**20, dtype=np.uint8)
SECTIONS = [Section("a", 0, 2**19, 8), Section("b", 2**19, 2**19, 8)]


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def codec(clock):
    return ScriptedCodec(clock)


@pytest.fixture
def chooser(clock, codec):
    return Chooser("auto", {codec.id: codec}, clock)


def test_a_trial_has_the_ratio_and_the_rates_of_the_codec(clock, codec):
    (trial,) = try_codecs(BUFFER, 8, [codec], clock)
    assert trial.ratio == pytest.approx(4)
    assert trial.encode_rate == pytest.approx(1e9)
    assert trial.decode_rate == pytest.approx(2e9)


def test_a_sample_is_short(clock, codec):
    try_codecs(BUFFER, 8, [codec], clock)
    assert codec.encoded[0] == sampling.LOOK_NBYTES
    assert set(codec.encoded[1:]) == {sampling.SAMPLE_NBYTES}


def test_a_beaten_codec_gets_only_the_short_trial(clock, codec):
    slow = ScriptedCodec(clock, id=8, ratio=2, encode_rate=1e8, decode_rate=1e8)
    small = ScriptedCodec(clock, id=7, ratio=9, encode_rate=1e8, decode_rate=1e8)
    trials = try_codecs(BUFFER, 8, [slow, codec, small], clock)
    assert [trial.codec for trial in trials] == [8, 9, 7]
    assert slow.encoded == [sampling.LOOK_NBYTES]
    assert len(small.encoded) > 1


def test_a_column_with_an_unusual_middle_still_gets_a_codec():
    """The short sample compares codecs. It does not decide whether one pays."""
    column = np.arange(100_000) % 50
    column[49_000:51_000] = np.random.default_rng(0).integers(0, 2**62, 2000)
    trials = try_codecs(column.view(np.uint8), 8, HOST_CODECS.values(), time.perf_counter)
    assert max(trial.ratio for trial in trials) > 2


@pytest.mark.parametrize("itemsize", [1, 3, 8, 16])
@pytest.mark.parametrize("nbytes", [0, 100, 16_384, 16_385, 10**6])
def test_sample_from_the_middle_holds_whole_items(nbytes, itemsize):
    raw = np.zeros(nbytes, dtype=np.uint8)
    stretch = middle(raw, itemsize, 16_384)
    offset = stretch.ctypes.data - raw.ctypes.data
    if nbytes <= 16_384:
        assert stretch is raw
    else:
        assert offset % itemsize == 0
        assert 16_384 - itemsize < stretch.nbytes <= 16_384
        assert abs(offset + stretch.nbytes / 2 - nbytes / 2) <= 2 * itemsize


def test_a_link_decides_by_its_bandwidth(chooser):
    assert chooser.choose(b"key", SECTIONS, BUFFER, "slow", 100e6) == [9, 9]
    assert chooser.choose(b"key", SECTIONS, BUFFER, "fast", 5e9) == [RAW, RAW]
    assert chooser.choose(b"key", SECTIONS, BUFFER, "new", None) == [RAW, RAW]


def test_a_section_is_sampled_once_for_all_links(chooser, codec):
    chooser.choose(b"key", SECTIONS, BUFFER, "one", 100e6)
    sampled = len(codec.encoded)
    chooser.choose(b"key", SECTIONS, BUFFER, "other", 5e9)
    assert len(codec.encoded) == sampled
    chooser.choose(b"another key", SECTIONS, BUFFER, "one", 100e6)
    assert len(codec.encoded) == 2 * sampled


def test_an_unknown_link_needs_no_sample(chooser, codec):
    chooser.choose(b"key", SECTIONS, BUFFER, "new", None)
    assert codec.encoded == []


def shards_until_sampled(chooser, codec):
    before = len(codec.encoded)
    count = 0
    while len(codec.encoded) == before:
        chooser.choose(b"key", SECTIONS[:1], BUFFER, "link", 100e6)
        count += 1
    return count


def test_intervals_between_samples_of_a_section_grow(chooser, codec):
    once = AGAIN_NBYTES // SECTIONS[0].nbytes
    counts = [shards_until_sampled(chooser, codec) for _ in range(4)]
    assert counts == [1, once, 2 * once, 4 * once]


def test_changed_data_is_sampled_more_often(chooser, codec):
    once = AGAIN_NBYTES // SECTIONS[0].nbytes
    for _ in range(3):
        shards_until_sampled(chooser, codec)
    codec.ratio = 1
    assert shards_until_sampled(chooser, codec) == 4 * once
    assert chooser.choose(b"key", SECTIONS[:1], BUFFER, "link", 100e6) == [RAW]
    assert shards_until_sampled(chooser, codec) == once - 1


def test_drifting_bandwidth_leads_to_a_new_decision(chooser):
    (decision,) = choose_one(chooser, 900e6)
    assert choose_one(chooser, 950e6) == [decision]
    (again,) = choose_one(chooser, 3e9)
    assert (decision.choice, again.choice) == ("scripted", "none")


def choose_one(chooser, bandwidth):
    chooser.choose(b"key", SECTIONS[:1], BUFFER, "link", bandwidth)
    return chooser.explain()


def test_decision_explains_itself(chooser):
    chooser.choose(b"key", SECTIONS, BUFFER, "link", 100e6)
    first, second = chooser.explain()
    assert (first.section, second.section) == ("a", "b")
    assert first.candidates[0].predicted_s == pytest.approx(2**19 / 4 / 100e6)
    assert json.dumps([first.to_plain()])


def test_short_sections_are_left_alone(chooser, codec):
    short = [Section("a", 0, 1000, 8)]
    assert chooser.choose(b"key", short, BUFFER[:1000], "link", 100e6) == [RAW]
    assert codec.encoded == []


def test_the_number_of_layouts_is_bounded(chooser):
    for number in range(200):
        chooser.choose(b"%d" % number, SECTIONS[:1], BUFFER, "link", 100e6)
    assert len(chooser.explain()) == 64


def encoded_until(chooser, done):
    """Encode shard after shard until a condition holds; return their number."""
    for count in range(1, 2000):
        encoded = chooser.encode(b"key", SECTIONS, BUFFER, "link", 500e6)
        if done(encoded):
            return count
    raise AssertionError("never")


def test_slow_codecs_are_unused_until_the_slowdown_decays(chooser, codec):
    assert chooser.encode(b"key", SECTIONS, BUFFER, "link", 500e6).table
    assert chooser.slowdown == pytest.approx(1)
    # The samples are unchanged: only whole shards show that everything takes five times as long.
    codec.encode_rate /= 5
    assert 1 < encoded_until(chooser, lambda encoded: not encoded.table) < 20
    assert chooser.slowdown > 2
    (decision, *_) = chooser.explain()
    assert decision.slowdown > 1
    assert decision.candidates[0].encode_rate == pytest.approx(1e9 / decision.slowdown)
    # Unused codecs give no measurements, so they get another chance.
    codec.encode_rate *= 5
    assert encoded_until(chooser, lambda encoded: encoded.table) < 100
    encoded_until(chooser, lambda encoded: chooser.slowdown < 1.01)


def test_one_delayed_shard_has_limited_weight(chooser, codec):
    chooser.encode(b"key", SECTIONS, BUFFER, "link", 100e6)
    codec.encode_rate /= 1e6
    chooser.encode(b"key", SECTIONS, BUFFER, "link", 100e6)
    assert chooser.slowdown < 2


@pytest.mark.parametrize("mode", ["none", "lz4", "zstd"])
def test_only_a_named_codec_is_used_on_an_unknown_link(mode, clock, codec):
    chooser = Chooser(mode, {codec.id: codec}, clock)
    expected = 9 if mode == "lz4" else RAW
    assert chooser.choose(b"key", SECTIONS[:1], BUFFER, "link", None) == [expected]
    assert bool(codec.encoded) == (mode == "lz4")


def test_threads_share_measurements(chooser, codec):
    # All threads advance one clock, so rates must not depend on it.
    codec.encode_rate = codec.decode_rate = 1e15
    gate = threading.Barrier(4)
    answers = []

    def work():
        gate.wait()
        for _ in range(50):
            answers.append(chooser.choose(b"key", SECTIONS, BUFFER, "link", 100e6))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [[9, 9]] * 200
    # At worst, every thread samples both sections first: a short sample and two longer ones each.
    # Later, only one thread samples.
    assert len(codec.encoded) <= 3 * 2 * (4 + 2)


def test_real_codecs_are_chosen_end_to_end():
    rng = np.random.default_rng(0)
    keys, noise = rng.integers(0, 1000, 20_000), rng.integers(-(2**63), 2**63 - 1, 20_000)
    buffer = np.concatenate([keys, noise]).view(np.uint8)
    sections = joined([("keys", 0, keys.nbytes, 8), ("noise", keys.nbytes, noise.nbytes, 8)])
    chooser = Chooser("auto")
    # The link is so slow that the rates of the machine do not matter.
    choices = chooser.choose(b"key", sections, buffer, "link", 1e3)
    assert choices[0] != RAW
    assert choices[1] == RAW
    encoded = encode_shard(buffer, sections, choices)
    assert encoded.nbytes < 0.7 * buffer.nbytes
    out = np.empty_like(buffer)
    decode_shard(encoded.parts, encoded.table, out)
    np.testing.assert_array_equal(out, buffer)
    # The link is so fast that nothing can pay.
    assert chooser.choose(b"key", sections, buffer, "memory", 1e15) == [RAW, RAW]


def test_shards_are_skipped_for_a_while_if_nothing_pays():
    clock = Clock()
    codec = ScriptedCodec(clock, ratio=1)
    chooser = Chooser("auto", {codec.id: codec}, clock)
    link = (b"key", BUFFER.nbytes, "link", 500e6)
    assert chooser.may_pay(*link)
    assert not chooser.encode(b"key", SECTIONS, BUFFER, "link", 500e6).table
    shards = AGAIN_NBYTES // BUFFER.nbytes
    assert [chooser.may_pay(*link) for _ in range(shards + 1)] == [False] * shards + [True]


def test_other_or_slower_links_and_other_layouts_are_tried():
    clock = Clock()
    codec = ScriptedCodec(clock, ratio=1)
    chooser = Chooser("auto", {codec.id: codec}, clock)
    chooser.encode(b"key", SECTIONS, BUFFER, "link", 500e6)
    assert not chooser.may_pay(b"key", 1, "link", 300e6)
    assert chooser.may_pay(b"key", 1, "link", 200e6)
    assert chooser.may_pay(b"key", 1, "other", 500e6)
    assert chooser.may_pay(b"another", 1, "link", 500e6)


def test_every_shard_is_encoded_if_something_pays():
    clock = Clock()
    codec = ScriptedCodec(clock)
    chooser = Chooser("auto", {codec.id: codec}, clock)
    assert chooser.encode(b"key", SECTIONS, BUFFER, "link", 100e6).table
    assert chooser.may_pay(b"key", 1, "link", 100e6)


@pytest.mark.parametrize(("mode", "may"), [("none", False), ("lz4", True), ("auto", False)])
def test_modes_on_an_unmeasured_link(mode, may):
    assert Chooser(mode).may_pay(b"key", 1, "link", None) == may
