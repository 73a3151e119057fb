"""How large the output of a task will be, by what others of its group were. Pure.

Admission reserves room before a task runs, so the estimate leans to the high side: too little
costs memory that was not planned for, too much only a wait. A group is a name: what the keys of
similar tasks have in common. Not thread-safe; the owner's lock covers it.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

#: Share of a new size in the mean: what the last ten or twenty outputs were decides.
_GAIN = 1 / 8
#: Mean deviations added to the mean. Where sizes spread as a bell does, 2.3 % are larger. Mean
#: deviations, as for TCP's timeouts, forget an outlier twice as fast as standard deviations (V.
#: Jacobson, Congestion Avoidance and Control, SIGCOMM 1988).
_SPREAD = 2.5


@dataclass(slots=True)
class _Group:
    mean: float
    deviation: float
    largest: int
    top_level: int


class GroupSizes:
    """Sizes learnt from outputs, per group of tasks.

    Parameters
    ----------
    max_groups
        Groups remembered. Beyond it the one that was longest neither learnt nor asked is
        forgotten: a worker that lives for months sees names without end.
    """

    def __init__(self, max_groups: int = 1000) -> None:
        if max_groups < 1:
            raise ValueError(f"max_groups must be at least 1, not {max_groups}")
        self._max_groups = max_groups
        self._groups: OrderedDict[str, _Group] = OrderedDict()

    def __len__(self) -> int:
        return len(self._groups)

    def learn(self, group: str, nbytes: int, top_level: int = 0) -> None:
        """Take in that a task of this group made an output of `nbytes`, and which home it has.

        What was learnt of outputs with another home is forgotten.

        Raises
        ------
        ValueError
            `nbytes` is negative.
        """
        if nbytes < 0:
            raise ValueError(f"an output of {nbytes} bytes")
        known = self._groups.get(group)
        if known is None or known.top_level != top_level:
            self._groups[group] = _Group(nbytes, 0.0, nbytes, top_level)
            if len(self._groups) > self._max_groups:
                self._groups.popitem(last=False)
            return
        self._groups.move_to_end(group)
        off = nbytes - known.mean
        known.mean += _GAIN * off
        known.deviation += _GAIN * (abs(off) - known.deviation)
        known.largest = max(known.largest, nbytes)

    def top_level(self, group: str) -> int:
        """Where the next output of a group will be; 0 if none was seen yet."""
        known = self._groups.get(group)
        return 0 if known is None else known.top_level

    def expected(self, group: str) -> int | None:
        """Bytes to reserve for the next output of a group; None if none was seen yet.

        Outputs of one size are expected at exactly that size. Where sizes vary it is their mean
        and two and a half mean deviations, but never more than was ever seen.
        """
        known = self._groups.get(group)
        if known is None:
            return None
        self._groups.move_to_end(group)
        return min(known.largest, math.ceil(known.mean + _SPREAD * known.deviation))
