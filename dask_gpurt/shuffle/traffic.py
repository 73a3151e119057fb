"""Bytes that one worker moved lately, by link and path.

A link has a sender and a receiver; a path is the way of the bytes, such as shared memory. The size
is bounded, and old seconds are dropped. No clock and no lock: the caller says when bytes moved,
and uses one thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

#: Period that counts as "lately".
WINDOW_S = 30
#: Most links for each second. Bytes of further links are summed under `OTHERS`.
MAX_LINKS = 1024
#: Stands for the workers of links that are not listed.
OTHERS = ""


class LinkPath(NamedTuple):
    """A pair of workers by address, and the way of the bytes between them."""

    sender: str
    receiver: str
    path: str


class Moved(NamedTuple):
    """What moved on a link."""

    nbytes: int
    messages: int


class Traffic:
    """Bytes and messages of the last `WINDOW_S` seconds, in one bucket for each second."""

    def __init__(self) -> None:
        self._seconds: deque[tuple[int, dict[LinkPath, list[int]]]] = deque()

    def add(self, link: LinkPath, nbytes: int, now_s: float) -> None:
        """Count one message that arrived at `now_s`. Times may not decrease by a second or more."""
        second = int(now_s)
        if not self._seconds or self._seconds[-1][0] < second:
            self._drop_old(second)
            self._seconds.append((second, {}))
        moved = self._seconds[-1][1]
        if link not in moved and len(moved) >= MAX_LINKS:
            link = LinkPath(OTHERS, OTHERS, link.path)
        found = moved.setdefault(link, [0, 0])
        found[0] += nbytes
        found[1] += 1

    def _drop_old(self, now_s: float) -> None:
        while self._seconds and self._seconds[0][0] <= now_s - WINDOW_S:
            self._seconds.popleft()

    def lately(self, now_s: float) -> dict[LinkPath, Moved]:
        """Return what moved on each link in the last `WINDOW_S` seconds, the busiest first."""
        self._drop_old(now_s)
        return summed(
            (link, Moved(nbytes, n))
            for _, moved in self._seconds
            for link, (nbytes, n) in moved.items()
        )


def summed(found: Iterable[tuple[LinkPath, Moved]]) -> dict[LinkPath, Moved]:
    """Return the sum for each link, the busiest first."""
    sums: dict[LinkPath, Moved] = {}
    for link, moved in found:
        before = sums.get(link, Moved(0, 0))
        sums[link] = Moved(before.nbytes + moved.nbytes, before.messages + moved.messages)
    return dict(sorted(sums.items(), key=lambda one: (-one[1].nbytes, one[0])))
