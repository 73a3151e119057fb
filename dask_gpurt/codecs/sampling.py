"""Trials of codecs on a sample of a section: the ratio, and the current rates.

The sample itself gives the rates, not a benchmark of the process, because a codec's rate depends
mostly on the data. LZ4 writes the columns of one table at 300 MB/s to 3 GB/s. The ratio requires
encoding the sample anyway. `codecs.chooser` notices what slows down longer work than a sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from dask_gpurt.codecs.codec import Bytes, Codec
from dask_gpurt.codecs.rule import Trial

#: Returns seconds since any fixed point.
Clock = Callable[[], float]

#: Long enough that the fixed cost of a call hardly matters.
SAMPLE_NBYTES = 128 * 2**10

#: Size of the first, short trial of every codec.
LOOK_NBYTES = 16 * 2**10

#: Repetitions of the long trial. The fastest counts.
_REPEATS = 2

#: A codec is out if another one is better by this factor in ratio and both rates.
_BEATEN = 1.1


def middle(raw: Bytes, itemsize: int, nbytes: int) -> Bytes:
    """Return about `nbytes` of whole items from the middle, or all bytes if there are fewer."""
    if raw.nbytes <= nbytes:
        return raw
    start = (raw.nbytes - nbytes) // 2 // itemsize * itemsize
    return raw[start : start + max(1, nbytes // itemsize) * itemsize]


def try_codecs(raw: Bytes, itemsize: int, codecs: Iterable[Codec], clock: Clock) -> list[Trial]:
    """Try every codec that suits the items on a sample of `raw`.

    All codecs run on a short sample. Those that no other codec beats also run on a longer one. This
    takes a few milliseconds.
    """
    if not raw.nbytes:
        return []
    look, sample = (middle(raw, itemsize, nbytes) for nbytes in (LOOK_NBYTES, SAMPLE_NBYTES))
    suited = [codec for codec in codecs if codec.suits(itemsize)]
    trials = [_trial(codec, look, itemsize, clock, repeats=1) for codec in suited]
    return [
        trial
        if any(_beats(other, trial) for other in trials)
        else _trial(codec, sample, itemsize, clock, _REPEATS)
        for codec, trial in zip(suited, trials, strict=True)
    ]


def _beats(one: Trial, other: Trial) -> bool:
    return (
        one.ratio > other.ratio * _BEATEN
        and one.encode_rate > other.encode_rate * _BEATEN
        and one.decode_rate > other.decode_rate * _BEATEN
    )


def _trial(codec: Codec, sample: Bytes, itemsize: int, clock: Clock, repeats: int) -> Trial:
    nbytes, encode_s, decode_s = _timed(codec, sample, itemsize, clock, repeats)
    return Trial(
        codec.id,
        codec.name,
        codec.coder,
        sample.nbytes / nbytes,
        _rate(sample.nbytes, encode_s),
        _rate(sample.nbytes, decode_s),
    )


def _timed(
    codec: Codec, raw: Bytes, itemsize: int, clock: Clock, repeats: int
) -> tuple[int, float, float]:
    """Return the encoded length and the seconds to encode and to decode."""
    encode_s = decode_s = float("inf")
    pieces = None
    for _ in range(repeats):
        began = clock()
        pieces = codec.encode(raw, itemsize)
        encode_s = min(encode_s, clock() - began)
        if pieces is None:
            # The section would travel raw, but the time for trying still counts.
            return raw.nbytes, encode_s, 0.0
    assert pieces is not None
    payload = np.concatenate(pieces)
    out = np.empty_like(raw)
    for _ in range(repeats):
        began = clock()
        codec.decode_into(payload, out, itemsize)
        decode_s = min(decode_s, clock() - began)
    return payload.nbytes, encode_s, decode_s


def _rate(nbytes: int, seconds: float) -> float:
    return nbytes / seconds if seconds > 0 else float("inf")
