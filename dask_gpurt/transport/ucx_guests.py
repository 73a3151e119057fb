"""Who may come in: peers that were announced, each for a while.

Pure: times are handed in.
"""

from __future__ import annotations

from dask_gpurt.transport.ucx_door import Door

#: Most peers that are expected at once; the oldest gives way to a further one.
_N_GUESTS = 4096
#: After a link was made: UCX makes more connections for it, and the first may be ready before them.
_SETTLE_S = 1.0


class Guests:
    """Peers that are expected, by their token, and until when. The door is open for them alone."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self._until_s: dict[str, float] = {}
        door.close()

    @property
    def any_expected(self) -> bool:
        return bool(self._until_s)

    def expect(self, token: str, until_s: float) -> None:
        """Let a peer in until then."""
        self._until_s[token] = max(until_s, self._until_s.pop(token, until_s))
        if len(self._until_s) > _N_GUESTS:
            del self._until_s[next(iter(self._until_s))]
        self._door.open()

    def settle(self, token: str, now_s: float) -> None:
        """A peer is there, and needs the door no longer than for the rest of its connections."""
        if token in self._until_s:
            self._until_s[token] = min(self._until_s[token], now_s + _SETTLE_S)

    def look(self, now_s: float) -> bool:
        """Forget those who did not come in time; whether that was the last one."""
        late = [token for token, until_s in self._until_s.items() if until_s <= now_s]
        for token in late:
            del self._until_s[token]
        if self._until_s or not late:
            return False
        self._door.close()
        return True

    def wait_s(self, now_s: float) -> float | None:
        """How long nothing has to be looked at, unless UCX has news."""
        next_s = min(self._until_s.values(), default=None)
        return None if next_s is None else max(0.0, next_s - now_s) + 0.01
