"""Samples of a process's memory: how much has no owner, and for how long it is too much. Pure.

A monitor takes samples at its own interval, by default a tenth of a second. `plugins.memory`
releases and evicts. A release returns idle memory to the system and spills shards, but no values.
"""

from __future__ import annotations

from collections import deque
from statistics import median

#: Least interval between releases of idle memory.
RELEASE_INTERVAL_S = 0.5
#: Samples whose median counts, because each task changes the memory for a while. A process that is
#: over its limit for as many samples stays there.
SAMPLES = 5
#: Share of the least room for values that is left to them in a process without room.
CROWDED_SHARE = 0.2
#: Most values that leave at once because the process is over its limit: some 10 ms of the event
#: loop.
MOST_LEAVING = 1_000


class ProcessSamples:
    """The last samples of a process whose memory has a limit.

    Parameters
    ----------
    now
        Start time. The first release comes more than `RELEASE_INTERVAL_S` later.

    Attributes
    ----------
    over_nbytes
        Bytes over the limit at the last sample; negative below it.
    n_over
        Samples in a row at which the process was over the limit.
    """

    def __init__(self, limit_nbytes: int, now: float) -> None:
        self.limit_nbytes = limit_nbytes
        self.over_nbytes = -limit_nbytes
        self.n_over = 0
        self._is_crowded = False
        self._unmanaged: deque[int] = deque(maxlen=SAMPLES)
        self._sampled_at = self._released_at = now

    def take(
        self, now: float, process_nbytes: int, managed_nbytes: int, *, is_releasing: bool
    ) -> bool:
        """Take a sample; return whether to release idle memory now.

        Parameters
        ----------
        managed_nbytes
            Part of `process_nbytes` that has an owner: values, shards and pinned memory.
        is_releasing
            Whether the last release has not ended yet.
        """
        self.over_nbytes = process_nbytes - self.limit_nbytes
        is_due = not is_releasing and now - self._released_at > RELEASE_INTERVAL_S
        releases = self.over_nbytes > 0 and is_due
        # A sample that causes a release contains idle memory, so it does not count. It counts right
        # after a release: where samples are far apart, each of them causes one.
        if not releases or self._released_at == self._sampled_at:
            self._unmanaged.append(process_nbytes - managed_nbytes)
            self.n_over = self.n_over + 1 if self.over_nbytes > 0 else 0
        self._sampled_at = now
        if releases:
            self._released_at = now
        return releases

    @property
    def unmanaged_nbytes(self) -> int:
        """Bytes without an owner: the median of the last samples."""
        return max(0, int(median(self._unmanaged))) if self._unmanaged else 0

    @property
    def is_over_for_long(self) -> bool:
        """Whether the process was over its limit at the last `SAMPLES` samples."""
        return self.n_over >= SAMPLES

    def capacity_nbytes(self, room_nbytes: int, least_nbytes: int) -> int:
        """Return how much values may take where `room_nbytes` are left for them.

        They get `least_nbytes` even if less is left, since tasks may free their own memory soon.
        Once the process has been over its limit for long, values get what is left, until that is
        enough again. Otherwise the process would be over its limit again after each eviction.
        """
        if room_nbytes >= least_nbytes:
            self._is_crowded = False
        elif self.is_over_for_long:
            self._is_crowded = True
        share = CROWDED_SHARE if self._is_crowded else 1.0
        return max(room_nbytes, int(share * least_nbytes))

    def n_leaving(self, n_values: int) -> int:
        """Return how many of `n_values` take as much as the process is over its limit.

        They may be larger than their measured sizes, so each has an equal share of the process.
        The number is limited, so that the event loop is not blocked.
        """
        process_nbytes = self.limit_nbytes + self.over_nbytes
        return min(MOST_LEAVING, -(-n_values * self.over_nbytes // process_nbytes))
