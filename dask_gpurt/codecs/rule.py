"""When compression pays: the break-even of one section on one link. Pure.

Encoding, sending and decoding overlap, so moving S bytes takes as long as the slowest of the
three: `max(S/Cc, S/(r*B), S/Cd)`, with rates Cc and Cd in raw bytes a second, ratio r, and
bandwidth B. Left alone it takes `S/B`. If every section of a shard is chosen by this, the shard is
not slower than left alone either, since the sums of each stage are then all below it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from dask_gpurt.codecs.codec import RAW

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

    def predicted_s(self, nbytes: int, bandwidth: float, slowdown: float) -> float:
        """Seconds to move so many raw bytes over a link of `bandwidth` bytes a second.

        `slowdown` is how many times longer than on the sample the codec takes.
        """
        return max(
            nbytes * slowdown / self.encode_rate,
            nbytes / (self.ratio * bandwidth),
            nbytes * slowdown / self.decode_rate,
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
        How many times slower than on samples codecs were on whole shards lately.
    trials
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
    trials: Sequence[Trial]
    codec: int
    choice: str
    reason: str
    slowdown: float = 1.0

    @property
    def none_s(self) -> float | None:
        """Predicted seconds without compression, None if the bandwidth is not known."""
        return self.nbytes / self.bandwidth if self.bandwidth else None

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Every codec that was tried, with its rates as they are now, and what they mean."""
        # Made for those who ask: decisions are made for each section every few shards.
        return tuple(
            Candidate(
                t.name,
                t.ratio,
                t.encode_rate / self.slowdown,
                t.decode_rate / self.slowdown,
                t.predicted_s(self.nbytes, self.bandwidth, self.slowdown)
                if self.bandwidth
                else None,
            )
            for t in self.trials
        )

    def to_plain(self) -> dict[str, Any]:
        """The same as plain values."""
        plain = {name: value for name, value in vars(self).items() if name != "trials"}
        candidates = [asdict(candidate) for candidate in self.candidates]
        return {**plain, "none_s": self.none_s, "candidates": candidates}


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
    chosen, reason = _choose(mode, trials, nbytes, bandwidth, slowdown)
    return Decision(
        section=section,
        itemsize=itemsize,
        nbytes=nbytes,
        link=link,
        bandwidth=bandwidth,
        trials=trials,
        codec=RAW if chosen is None else chosen.codec,
        choice="none" if chosen is None else chosen.name,
        reason=reason,
        slowdown=slowdown,
    )


def _choose(
    mode: Mode, trials: Sequence[Trial], nbytes: int, bandwidth: float | None, slowdown: float
) -> tuple[Trial | None, str]:
    """Return the trial of the codec to use, or None, and the reason."""
    if mode == "none":
        return None, "compression is switched off"
    shrinking = [t for t in trials if t.ratio > 1 and mode in ("auto", t.coder)]
    if mode != "auto":
        if not shrinking:
            return None, f"no codec with {mode} makes it smaller"
        best = max(shrinking, key=lambda t: t.ratio)
        return best, f"{mode} was asked for, and this is its smallest form"
    if not bandwidth:
        return None, "the link has not been measured yet"
    if not shrinking:
        return None, "no codec makes it smaller"
    # Where the link is the slowest stage, several codecs may predict the same time. Then the one
    # that takes the least processor time wins.
    best = min(
        shrinking,
        key=lambda t: (
            t.predicted_s(nbytes, bandwidth, slowdown),
            1 / t.encode_rate + 1 / t.decode_rate,
        ),
    )
    none_s = nbytes / bandwidth
    best_s = best.predicted_s(nbytes, bandwidth, slowdown)
    if best_s < none_s:
        return best, f"predicted to take {best_s / none_s:.0%} of the time that raw bytes take"
    return None, "every codec that makes it smaller takes longer than the link saves"
