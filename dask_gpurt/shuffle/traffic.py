"""Bytes that one worker moved: recent ones by link and path, all by path and kind of peer.

A link has a sender and a receiver; a path is the way of the bytes, such as shared memory. Sizes are
bounded. No clock: the caller says when bytes moved, and for how long.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
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
    """Bytes and number of messages that moved on a link."""

    nbytes: int
    messages: int


class Traffic:
    """Bytes and messages of the last `WINDOW_S` seconds, in one bucket for each second.

    For one thread.
    """

    def __init__(self) -> None:
        self._seconds: deque[tuple[int, dict[LinkPath, list[int]]]] = deque()

    def add(self, link: LinkPath, nbytes: int, now_s: float) -> None:
        """Count one message at `now_s`. If the clock was set back, begin anew."""
        second = int(now_s)
        if self._seconds and self._seconds[-1][0] > second + 1:
            self._seconds.clear()
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


#: Upper ends of the classes of message sizes.
MESSAGE_NBYTES = (2**12, 2**16, 2**18, 2**20, 2**22, 2**24, 2**26)


@dataclass
class SentSum:
    """Sums over all messages of one path and kind of peer.

    Attributes
    ----------
    of_size
        Number of messages in each class of `MESSAGE_NBYTES`, and of larger ones.
    """

    nbytes: int = 0
    seconds: float = 0.0
    of_size: list[int] = field(default_factory=lambda: [0] * (len(MESSAGE_NBYTES) + 1))


class SentTotals:
    """Sums over all messages that a worker sent, by path and kind of peer. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[tuple[str, str], SentSum] = {}

    def add(self, path: str, *, is_same_host: bool, nbytes: int, seconds: float) -> None:
        """Count a message that the peer acknowledged after `seconds`."""
        with self._lock:
            found = self._sums.setdefault(
                (path, "same-host" if is_same_host else "other-host"), SentSum()
            )
            found.nbytes += nbytes
            found.seconds += seconds
            found.of_size[bisect_left(MESSAGE_NBYTES, nbytes)] += 1

    def snapshot(self) -> dict[tuple[str, str], SentSum]:
        with self._lock:
            return {
                labels: SentSum(one.nbytes, one.seconds, [*one.of_size])
                for labels, one in self._sums.items()
            }
