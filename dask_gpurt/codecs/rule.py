"""The rule for when compression pays: the break-even of one section on one link.

Encoding, sending and decoding overlap, so moving S bytes takes as long as the slowest of the three:
`max(S/Cc, S/(r*B), S/Cd)`. Cc and Cd are the rates in raw bytes a second, r is the ratio, and B the
bandwidth. Raw bytes take `S/B`. If this rule chooses every section of a shard, the shard is not
slower than a raw one. The sum of each stage is below the raw time. The functions are pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from dask_gpurt.codecs.codec import RAW

Mode = Literal["auto", "none", "lz4", "zstd"]


@dataclass(frozen=True)
class Trial:
    """The result of one codec on a sample of a section.

    Attributes
    ----------
    codec, name, coder
        The codec.
    ratio
        Raw bytes over encoded bytes; 1 if encoding did not shrink the sample.
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
        """Return the seconds to move raw bytes over a link of `bandwidth` bytes a second.

        `slowdown` is the codec's current time relative to its time on the sample.
        """
        return max(
            nbytes * slowdown / self.encode_rate,
            nbytes / (self.ratio * bandwidth),
            nbytes * slowdown / self.decode_rate,
        )


@dataclass(frozen=True)
class CodecEstimate:
    """A trial, with its prediction for a section on a link; None if the link is unknown."""

    codec: str
    ratio: float
    encode_rate: float
    decode_rate: float
    predicted_s: float | None


@dataclass(frozen=True)
class CodecDecision:
    """The choice for a section on a link, with the numbers behind it.

    Attributes
    ----------
    section, itemsize, nbytes
        The section, with its size at the time of the decision.
    link, bandwidth
        The link, and its bytes a second; None if unknown.
    slowdown
        Time of codecs on recent whole shards relative to samples.
    trials
        Results of all codecs that were tried.
    codec, choice
        Number and name of the chosen codec; `RAW` and `none` for no compression.
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
        """Predicted seconds without compression; None if the bandwidth is unknown."""
        return self.nbytes / self.bandwidth if self.bandwidth else None

    @property
    def candidates(self) -> tuple[CodecEstimate, ...]:
        """All codecs that were tried, with current rates and predictions."""
        # Computed on demand: decisions for each section are made every few shards.
        return tuple(
            CodecEstimate(
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
        """Return the decision as plain values."""
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
) -> CodecDecision:
    """Choose a codec for a section on a link.

    Parameters
    ----------
    mode
        `auto` for the rule. `lz4` or `zstd` for the codec with that coder that shrinks the section
        most, for any link. `none` for no compression.
    trials
        The result of each codec on a sample.
    section, itemsize, nbytes, link, bandwidth, slowdown
        As in `CodecDecision`.
    """
    chosen, reason = _choose(mode, trials, nbytes, bandwidth, slowdown)
    return CodecDecision(
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
