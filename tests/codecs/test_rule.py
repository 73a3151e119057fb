"""The break-even rule picks a codec only if it is faster than raw bytes on the link."""

from __future__ import annotations

import json

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dask_gpurt.codecs.codec import RAW
from dask_gpurt.codecs.rule import Trial, decide

rates = st.floats(1e6, 1e11)
trials = st.lists(
    st.builds(
        Trial,
        codec=st.integers(1, 255),
        name=st.sampled_from(["a", "b", "c"]),
        coder=st.sampled_from(["none", "lz4", "zstd"]),
        # Computed from real lengths, as in practice, not from floats next to one.
        ratio=st.integers(100, 101_000).map(lambda wire_nbytes: 100_000 / wire_nbytes),
        encode_rate=rates,
        decode_rate=rates,
    ),
    max_size=6,
    unique_by=lambda trial: trial.codec,
)
bandwidths = st.floats(1e6, 1e11)

FAST = Trial(1, "fast", "lz4", 2.0, 2e9, 4e9)
SMALL = Trial(2, "small", "zstd", 4.0, 300e6, 1e9)


def decided(tried, bandwidth, mode="auto", nbytes=2**20):
    return decide(
        mode,
        tried,
        section="x",
        itemsize=8,
        nbytes=nbytes,
        link="tcp://there",
        bandwidth=bandwidth,
    )


@given(trials, bandwidths, st.integers(1, 2**40))
def test_predicted_time_never_exceeds_the_time_of_raw_bytes(tried, bandwidth, nbytes):
    decision = decided(tried, bandwidth, nbytes=nbytes)
    assert decision.none_s == nbytes / bandwidth
    pairs = list(zip(tried, decision.candidates, strict=True))
    if decision.codec != RAW:
        ((chosen, candidate),) = [pair for pair in pairs if pair[0].codec == decision.codec]
        assert chosen.ratio > 1
        assert candidate.predicted_s < decision.none_s
        assert candidate.predicted_s == min(c.predicted_s for t, c in pairs if t.ratio > 1)
    else:
        assert all(c.predicted_s >= decision.none_s for c in decision.candidates if c.ratio > 1)


@given(trials, bandwidths, st.floats(1, 1000))
def test_a_codec_that_pays_also_pays_on_slower_links(tried, bandwidth, factor):
    assume(decided(tried, bandwidth).codec != RAW)
    assert decided(tried, bandwidth / factor).codec != RAW


@given(trials, bandwidths, st.integers(1, 2**40), st.integers(1, 2**40))
def test_the_choice_does_not_depend_on_the_length(tried, bandwidth, one, other):
    first, second = (decided(tried, bandwidth, nbytes=2**n) for n in (one % 40, other % 40))
    assert (first.codec, first.choice) == (second.codec, second.choice)


@given(trials, bandwidths)
def test_the_numbers_of_a_decision_are_consistent(tried, bandwidth):
    decision = decided(tried, bandwidth)
    for candidate in decision.candidates:
        assert candidate.predicted_s == max(
            decision.nbytes / candidate.encode_rate,
            decision.nbytes / (candidate.ratio * bandwidth),
            decision.nbytes / candidate.decode_rate,
        )
    plain = json.loads(json.dumps(decision.to_plain()))
    assert plain["choice"] == decision.choice
    assert len(plain["candidates"]) == len(tried)


@pytest.mark.parametrize(
    ("bandwidth", "choice"),
    [(50e6, "small"), (100e6, "small"), (1e9, "fast"), (1.9e9, "fast"), (2e9, "none")],
)
def test_slow_links_favour_ratio_and_fast_links_favour_speed(bandwidth, choice):
    assert decided([FAST, SMALL], bandwidth).choice == choice


def test_equal_predictions_choose_the_cheaper_codec():
    heavy = Trial(3, "heavy", "zstd", 2.0, 1e9, 1e9)
    assert decided([heavy, FAST], 100e6).choice == "fast"


@pytest.mark.parametrize(
    ("mode", "choice"), [("none", "none"), ("lz4", "fast"), ("zstd", "small"), ("auto", "none")]
)
def test_a_requested_coder_is_used_on_any_link(mode, choice):
    decision = decided([FAST, SMALL], 100e9, mode)
    assert decision.choice == choice
    assert decision.reason


def test_incompressible_sections_stay_raw_even_on_request():
    assert decided([Trial(1, "fast", "lz4", 1.0, 2e9, 4e9)], 1e6, "lz4").codec == RAW


@pytest.mark.parametrize("bandwidth", [None, 0.0])
def test_unknown_link_gets_raw_bytes(bandwidth):
    decision = decided([FAST], bandwidth)
    assert decision.codec == RAW
    assert "measured" in decision.reason
    assert json.loads(json.dumps(decision.to_plain(), allow_nan=False))["none_s"] is None


def test_a_codec_without_gain_is_not_chosen():
    """The codec is not chosen even if the share of the time rounds to slightly less than one."""
    for nbytes in range(1, 2000, 7):
        tie = Trial(1, "one", "lz4", ratio=2.0, encode_rate=7e6, decode_rate=1e9)
        assert decided([tie], 7e6, nbytes=nbytes).codec == RAW
