"""When compression pays: the break-even of one section on one link. Pure.

Encoding, sending and decoding overlap, so moving S bytes takes as long as the slowest of the
three: `max(S/Cc, S/(r*B), S/Cd)`, with rates Cc and Cd in raw bytes a second, ratio r, and
bandwidth B. Left alone it takes `S/B`. If every section of a shard is chosen by this, the shard is
not slower than left alone either, since the sums of each stage are then all below it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from dask_gpurt.codecs.port import RAW

Mode = Literal["auto", "none", "lz4", "zstd"]


@dataclass(frozen=True)
class Trial:
    """What one codec did with a sample of a section.

    Attributes
    ----------
    codec, name, coder
        Which codec.
    ratio
        Raw bytes over encoded bytes; 1 where encoding did not make them fewer.
    encode_rate, decode_rate
        Raw bytes a second.
    """

    codec: int
    name: str
    coder: str
    ratio: float
    encode_rate: float
    decode_rate: float

    def predicted_s(self, nbytes: int, bandwidth: float) -> float:
        """Seconds to move so many raw bytes over a link of `bandwidth` bytes a second."""
        return max(
            nbytes / self.encode_rate,
            nbytes / (self.ratio * bandwidth),
            nbytes / self.decode_rate,
        )


@dataclass(frozen=True)
class Candidate:
    """A trial, and what it means for a section on a link; None if the link is not known."""

    codec: str
    ratio: float
    encode_rate: float
    decode_rate: float
    predicted_s: float | None


@dataclass(frozen=True)
class Decision:
    """What was chosen for a section on a link, and the numbers that led to it.

    Attributes
    ----------
    section, itemsize, nbytes
        What was decided on, at the size it had then.
    link, bandwidth
        Where it goes; bytes a second, None if not known.
    slowdown
        How many times slower than on samples codecs were on whole shards lately; rates of the
        candidates are divided by it.
    none_s
        Predicted seconds without compression, None if the bandwidth is not known.
    candidates
        Every codec that was tried.
    codec, choice
        Number and name of what was chosen; `RAW` and `none` for no compression.
    reason
        One sentence.
    """

    section: str
    itemsize: int
    nbytes: int
    link: str
    bandwidth: float | None
    none_s: float | None
    candidates: tuple[Candidate, ...]
    codec: int
    choice: str
    reason: str
    slowdown: float = 1.0

    def to_plain(self) -> dict[str, Any]:
        """The same as plain values."""
        return asdict(self)


def decide(
    mode: Mode,
    trials: Sequence[Trial],
    *,
    section: str,
    itemsize: int,
    nbytes: int,
    link: str,
    bandwidth: float | None,
    slowdown: float = 1.0,
) -> Decision:
    """Choose a codec for a section on a link.

    Parameters
    ----------
    mode
        `auto` for the rule; `lz4` or `zstd` for the codec with that coder that shrinks the
        section most, whatever the link; `none` for none.
    trials
        What each codec did with a sample.
    section, itemsize, nbytes, link, bandwidth, slowdown
        As in `Decision`.
    """
    trials = [
        replace(
            trial,
            encode_rate=trial.encode_rate / slowdown,
            decode_rate=trial.decode_rate / slowdown,
        )
        for trial in trials
    ]
    codec, choice = RAW, "none"
    shrinking = [t for t in trials if t.ratio > 1 and mode in ("auto", t.coder)]
    if mode == "none":
        reason = "compression is switched off"
    elif mode != "auto":
        reason = f"no codec with {mode} makes it smaller"
        if shrinking:
            best = max(shrinking, key=lambda t: t.ratio)
            codec, choice = best.codec, best.name
            reason = f"{mode} was asked for, and this is its smallest form"
    elif not bandwidth:
        reason = "the link has not been measured yet"
    else:
        none_s = nbytes / bandwidth
        paying = [t for t in shrinking if t.predicted_s(nbytes, bandwidth) < none_s]
        if paying:
            # Where the link is what takes longest, several may predict the same: then the one
            # that leaves most of the processor to others.
            best = min(
                paying,
                key=lambda t: (
                    t.predicted_s(nbytes, bandwidth),
                    1 / t.encode_rate + 1 / t.decode_rate,
                ),
            )
            codec, choice = best.codec, best.name
            share = best.predicted_s(nbytes, bandwidth) / none_s
            reason = f"predicted to take {share:.0%} of the time that raw bytes take"
        elif shrinking:
            reason = "every codec that makes it smaller takes longer than the link saves"
        else:
            reason = "no codec makes it smaller"
    candidates = tuple(
        Candidate(
            t.name,
            t.ratio,
            t.encode_rate,
            t.decode_rate,
            t.predicted_s(nbytes, bandwidth) if bandwidth else None,
        )
        for t in trials
    )
    return Decision(
        section=section,
        itemsize=itemsize,
        nbytes=nbytes,
        link=link,
        bandwidth=bandwidth,
        none_s=nbytes / bandwidth if bandwidth else None,
        candidates=candidates,
        codec=codec,
        choice=choice,
        reason=reason,
        slowdown=slowdown,
    )
