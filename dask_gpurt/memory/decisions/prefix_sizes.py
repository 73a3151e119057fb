"""Estimates of a task's output size, from the outputs of other tasks of its prefix. Pure.

Admission reserves room before a task runs. The estimate is on the high side: too low an estimate
costs memory that was not planned for, too high a one only a wait. Similar tasks share the prefix of
their keys. Not thread-safe: the owner's lock covers it.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

#: Weight of a new size in the mean: the last ten or twenty outputs decide.
_GAIN = 1 / 8
#: Mean deviations added to the mean. Of normally distributed sizes, 2.3 % are larger. Like TCP's
#: timeouts, this uses mean deviations: they forget an outlier twice as fast as standard deviations
#: (V. Jacobson, Congestion Avoidance and Control, SIGCOMM 1988).
_SPREAD = 2.5


@dataclass(slots=True)
class _SizeStats:
    mean: float
    deviation: float
    largest: int
    top_level: int


class PrefixSizes:
    """Output sizes learnt by prefix of tasks' keys.

    Parameters
    ----------
    max_prefixes
        Most prefixes remembered; the least recently used one is forgotten. A worker that runs for
        months sees ever new names.
    """

    def __init__(self, max_prefixes: int = 1000) -> None:
        if max_prefixes < 1:
            raise ValueError(f"max_prefixes must be at least 1, not {max_prefixes}")
        self._max_prefixes = max_prefixes
        self._prefixes: OrderedDict[str, _SizeStats] = OrderedDict()

    def __len__(self) -> int:
        return len(self._prefixes)

    def learn(self, prefix: str, nbytes: int, top_level: int = 0) -> None:
        """Record that a task of this prefix made an output of `nbytes` at a top level.

        An output at another top level than before replaces everything learnt about the prefix.

        Raises
        ------
        ValueError
            `nbytes` is negative.
        """
        if nbytes < 0:
            raise ValueError(f"an output of {nbytes} bytes")
        known = self._prefixes.get(prefix)
        if known is None or known.top_level != top_level:
            self._prefixes[prefix] = _SizeStats(nbytes, 0.0, nbytes, top_level)
            if len(self._prefixes) > self._max_prefixes:
                self._prefixes.popitem(last=False)
            return
        self._prefixes.move_to_end(prefix)
        off = nbytes - known.mean
        known.mean += _GAIN * off
        known.deviation += _GAIN * (abs(off) - known.deviation)
        known.largest = max(known.largest, nbytes)

    def top_level(self, prefix: str) -> int:
        """Return the expected top level of a prefix's next output; 0 if none was seen yet."""
        known = self._prefixes.get(prefix)
        return 0 if known is None else known.top_level

    def expected(self, prefix: str) -> int | None:
        """Return the bytes to reserve for a prefix's next output; None if none was seen yet.

        Equal sizes are expected exactly. Sizes that vary are expected at their mean plus two and a
        half mean deviations, but never above the largest one seen.
        """
        known = self._prefixes.get(prefix)
        if known is None:
            return None
        self._prefixes.move_to_end(prefix)
        return min(known.largest, math.ceil(known.mean + _SPREAD * known.deviation))
