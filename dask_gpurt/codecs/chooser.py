"""The choice of a codec for each section of a shard, with memory and explanations.

A new section is sampled at once, and later ever more rarely. Samples do not depend on the link, so
for another link only the rule runs again. Do not call this module on an event loop: the first
samples of a wide shard take tens of milliseconds.

Some causes slow down longer work alone, such as threads that hold the interpreter lock for
milliseconds. Samples are too short to show them. So the chooser also times whole shards. If they
take longer than the samples predict, the rule slows down all codecs by this factor.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dask_gpurt.codecs.codec import RAW, Bytes, Codec, Section
from dask_gpurt.codecs.cpu import HOST_CODECS
from dask_gpurt.codecs.encoded_shards import LEAST_NBYTES, Encoded, encode_shard
from dask_gpurt.codecs.rule import CodecDecision, Mode, Trial, decide
from dask_gpurt.codecs.sampling import Clock, try_codecs

#: Raw bytes of a section until it is sampled again. The number doubles after each equal result, so
#: that sampling costs less and less of a long shuffle.
AGAIN_NBYTES = 64 * 2**20
_AGAIN_AT_MOST_NBYTES = 4 * 2**30

#: A decision is valid while the link's bandwidth and the slowdown stay within this factor.
_DRIFT = 1.25

#: Weight of the latest shard in the slowdown.
_LATEST = 0.2

#: Factor of the slowdown for each raw shard. Raw shards give no measurement, so the slowdown
#: decays, and codecs are tried again after some dozens of shards.
_FORGOTTEN = 0.98
_MAX_SLOWDOWN = 100.0

#: Number of layouts to remember. Growing categories create a new layout for each partition.
_MAX_LAYOUTS = 64
#: Number of pairs of layout and link without gain to remember.
_MAX_SKIPPING = 4096


@dataclass
class _Sampled:
    """Measurements of one section, for all links."""

    trials: list[Trial]
    wait_nbytes: int
    seen_nbytes: int = 0


@dataclass
class _Learnt:
    """Measurements and decisions of one layout's sections."""

    sampled: dict[str, _Sampled] = field(default_factory=dict)
    decisions: dict[tuple[str, str], CodecDecision] = field(default_factory=dict)


class Chooser:
    """A chooser of codecs for the sections of shards. Safe to use from any thread.

    Parameters
    ----------
    mode
        The setting: `auto`, `none`, `lz4` or `zstd`.
    codecs
        The codecs to choose from, by number.
    clock
        Returns seconds. Used to time codecs.
    """

    def __init__(
        self,
        mode: Mode,
        codecs: Mapping[int, Codec] = HOST_CODECS,
        clock: Clock = time.perf_counter,
    ) -> None:
        self._mode: Mode = mode
        self._by_number = codecs
        self._codecs = [c for c in codecs.values() if mode in ("auto", c.coder)]
        self._clock = clock
        self._lock = threading.Lock()
        #: By the hash of a layout: a layout may have all categories of a column.
        self._layouts: OrderedDict[int, _Learnt] = OrderedDict()
        self._slowdown = 1.0
        #: By layout, likewise, and link: the bandwidth at which nothing paid, and bytes to skip.
        self._skipping: OrderedDict[tuple[int, str], tuple[float, int]] = OrderedDict()

    def encode(
        self,
        layout_key: bytes,
        sections: Sequence[Section],
        buffer: Bytes,
        link: str,
        bandwidth: float | None,
    ) -> Encoded:
        """Choose codecs for a shard, encode it, and learn from the time it took.

        The parameters are those of `choose`.
        """
        choices = self.choose(layout_key, sections, buffer, link, bandwidth)
        began = self._clock()
        encoded = encode_shard(buffer, sections, choices, self._by_number)
        self._learn(layout_key, sections, choices, self._clock() - began)
        if bandwidth:
            with self._lock:
                nothing_pays = all(choice == RAW for choice in choices)
                skip_nbytes = AGAIN_NBYTES if nothing_pays else 0
                self._skipping[hash(layout_key), link] = (bandwidth, skip_nbytes)
                if len(self._skipping) > _MAX_SKIPPING:
                    self._skipping.popitem(last=False)
        return encoded

    @property
    def slowdown(self) -> float:
        """Time of recent shards relative to the prediction from samples; at least 1."""
        return self._slowdown

    def may_pay(self, layout_key: bytes, nbytes: int, link: str, bandwidth: float | None) -> bool:
        """Return whether compression of a shard may pay, so that `encode` is worth calling.

        If nothing paid for one shard, the next ones are sent raw, until many bytes have passed or
        the link has become much slower.
        """
        if self._mode != "auto":
            return self._mode != "none"
        if not bandwidth:
            return False
        with self._lock:
            then, left_nbytes = self._skipping.get((hash(layout_key), link), (0.0, 0))
            if left_nbytes <= 0 or bandwidth < then / 2:
                return True
            self._skipping[hash(layout_key), link] = (then, left_nbytes - nbytes)
            return False

    def choose(
        self,
        layout_key: bytes,
        sections: Sequence[Section],
        buffer: Bytes,
        link: str,
        bandwidth: float | None,
    ) -> list[int]:
        """Choose the codec of each section, for `encoded_shards.encode_shard`.

        Parameters
        ----------
        layout_key
            Shards with one key have sections of equal names, with the same kind of data.
        sections, buffer
            The shard, with sections from `encoded_shards.joined`.
        link
            Any text that identifies the link, such as the peer's address.
        bandwidth
            Raw bytes a second on that link; None if unknown.
        """
        if self._mode == "none" or (self._mode == "auto" and not bandwidth):
            return [RAW] * len(sections)
        choices = []
        for section in sections:
            if section.nbytes < LEAST_NBYTES:
                choices.append(RAW)
                continue
            trials = self._trials(layout_key, section, buffer)
            choices.append(self._decide(layout_key, section, trials, link, bandwidth).codec)
        return choices

    def explain(self) -> list[CodecDecision]:
        """Return all valid decisions with their numbers. The latest layouts come last."""
        with self._lock:
            return [d for learnt in self._layouts.values() for d in learnt.decisions.values()]

    def _learnt(self, layout_key: bytes) -> _Learnt:
        number = hash(layout_key)
        learnt = self._layouts.get(number)
        if learnt is None:
            learnt = self._layouts[number] = _Learnt()
            if len(self._layouts) > _MAX_LAYOUTS:
                self._layouts.popitem(last=False)
        self._layouts.move_to_end(number)
        return learnt

    def _trials(self, layout_key: bytes, section: Section, buffer: Bytes) -> list[Trial]:
        with self._lock:
            sampled = self._learnt(layout_key).sampled.get(section.name)
            if sampled is not None:
                sampled.seen_nbytes += section.nbytes
                if sampled.seen_nbytes < sampled.wait_nbytes:
                    return sampled.trials
                # Other threads use the old trials while this thread samples again.
                sampled.seen_nbytes = 0
        # Without the lock. Two threads may sample a new section at the same time, which is better
        # than one waiting for the other.
        raw = buffer[section.offset : section.offset + section.nbytes]
        trials = try_codecs(raw, section.itemsize, self._codecs, self._clock)
        wait_nbytes = AGAIN_NBYTES
        if sampled is not None and _alike(sampled.trials, trials):
            wait_nbytes = min(2 * sampled.wait_nbytes, _AGAIN_AT_MOST_NBYTES)
        with self._lock:
            learnt = self._learnt(layout_key)
            learnt.sampled[section.name] = _Sampled(trials, wait_nbytes)
            for key in [key for key in learnt.decisions if key[0] == section.name]:
                del learnt.decisions[key]
        return trials

    def _decide(
        self,
        layout_key: bytes,
        section: Section,
        trials: list[Trial],
        link: str,
        bandwidth: float | None,
    ) -> CodecDecision:
        key = (section.name, link)
        with self._lock:
            decisions = self._learnt(layout_key).decisions
            known = decisions.get(key)
            if (
                known is None
                or _drifted(known.bandwidth, bandwidth)
                or _drifted(known.slowdown, self._slowdown)
            ):
                known = decisions[key] = decide(
                    self._mode,
                    trials,
                    section=section.name,
                    itemsize=section.itemsize,
                    nbytes=section.nbytes,
                    link=link,
                    bandwidth=bandwidth,
                    slowdown=self._slowdown,
                )
            return known

    def _learn(
        self, layout_key: bytes, sections: Sequence[Section], choices: list[int], encode_s: float
    ) -> None:
        with self._lock:
            sampled = self._learnt(layout_key).sampled
            expected_s = 0.0
            for section, choice in zip(sections, choices, strict=True):
                known = sampled.get(section.name)
                for trial in known.trials if known is not None else ():
                    if trial.codec == choice:
                        expected_s += section.nbytes / trial.encode_rate
            if expected_s > 0:
                # Limit the effect of a single delayed shard.
                seen = min(encode_s / expected_s, 4 * self._slowdown)
                slowdown = (1 - _LATEST) * self._slowdown + _LATEST * seen
            else:
                slowdown = self._slowdown * _FORGOTTEN
            self._slowdown = min(max(slowdown, 1.0), _MAX_SLOWDOWN)


def _drifted(then: float | None, now: float | None) -> bool:
    if not then or not now:
        return then != now
    return not 1 / _DRIFT < now / then < _DRIFT


def _alike(before: list[Trial], after: list[Trial]) -> bool:
    """Return whether two samples agree on how far a section shrinks."""

    def best(trials: list[Trial]) -> float:
        return max((trial.ratio for trial in trials), default=1.0)

    return 0.8 < best(after) / best(before) < 1.25
