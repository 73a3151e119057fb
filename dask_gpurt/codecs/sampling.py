"""What each codec makes of a sample of a section: its ratio, and its rates here and now.

Rates are taken from the sample itself and not from a benchmark of the process. A codec's rate
depends on the data more than on anything else: LZ4 writes from 300 MB/s to 3 GB/s of the columns
of one table. And the sample has to be encoded for its ratio anyhow. What slows down longer work
than a sample is `codecs.chooser`'s to notice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from dask_gpurt.codecs.codec import Bytes, Codec
from dask_gpurt.codecs.rule import Trial

#: Seconds, from any beginning.
Clock = Callable[[], float]

#: Long enough that what a call costs by itself does not count for much.
SAMPLE_NBYTES = 128 * 2**10

#: First, every codec has a short look.
LOOK_NBYTES = 16 * 2**10

#: Times the sample is encoded and decoded after that; the fastest counts.
_REPEATS = 2

#: A codec that another one beats by this factor in ratio and in both rates has lost.
_BEATEN = 1.1


def middle(raw: Bytes, itemsize: int, nbytes: int) -> Bytes:
    """About so many bytes of whole items in the middle; all if there are not more."""
    if raw.nbytes <= nbytes:
        return raw
    start = (raw.nbytes - nbytes) // 2 // itemsize * itemsize
    return raw[start : start + max(1, nbytes // itemsize) * itemsize]


def try_codecs(raw: Bytes, itemsize: int, codecs: Iterable[Codec], clock: Clock) -> list[Trial]:
    """Try every codec that suits the items on a sample of `raw`.

    All of them on a short stretch, and then those that nothing else beats on a longer one.
    Takes a few milliseconds.
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
    """Encoded length, and seconds to encode and to decode."""
    encode_s = decode_s = float("inf")
    pieces = None
    for _ in range(repeats):
        began = clock()
        pieces = codec.encode(raw, itemsize)
        encode_s = min(encode_s, clock() - began)
        if pieces is None:
            # It would travel as it is; what was spent on trying counts all the same.
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
