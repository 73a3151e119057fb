"""The faster of two ways to write values: through the page cache or past it. Pure, no clock.

Neither way is always faster. A copy into the cache is slow where the system has to find memory for
it first, and a local disk may take more than that. The disk of a virtual machine may take a tenth.
"""

from __future__ import annotations

from dataclasses import dataclass, field

#: Share that earlier bytes and seconds keep with each write: about the last five count.
_KEPT = 0.8


@dataclass
class _Recent:
    """Bytes and seconds of recent writes, older ones with less weight."""

    nbytes: float = 0.0
    seconds: float = 0.0

    def record(self, nbytes: int, seconds: float) -> None:
        self.nbytes = _KEPT * self.nbytes + nbytes
        self.seconds = _KEPT * self.seconds + seconds


@dataclass
class WriteSpeeds:
    """The speeds of recent writes, each way."""

    _direct: _Recent = field(default_factory=_Recent)
    _cached: _Recent = field(default_factory=_Recent)

    def record(self, is_direct: bool, nbytes: int, seconds: float) -> None:
        """Count a write of a value, past the cache (direct) or through it."""
        (self._direct if is_direct else self._cached).record(nbytes, seconds)

    @property
    def prefers_cache(self) -> bool:
        """Whether the cache is faster. A way that is not known is tried, the disk first.

        The disk is measured again whenever the cache has no room, so a disk that became slow is
        noticed. The cache is not measured again while the disk is faster than it was.
        """
        if not self._direct.nbytes or not self._cached.nbytes:
            return bool(self._direct.nbytes)
        direct, cached = self._direct, self._cached
        return cached.nbytes * direct.seconds > direct.nbytes * cached.seconds
