"""Peers that may connect over UCX: each announced peer, for a limited time.

Pure: the caller passes the time.
"""

from __future__ import annotations

from dask_gpurt.transport.ucx.listening_sockets import ListeningSockets

#: Limit of expected peers; a further one replaces the oldest.
_MAX_INVITED = 4096
#: Grace period after a link was made: UCX makes more connections for it, maybe a little later.
_SETTLE_S = 1.0


class InvitedPeers:
    """The expected peers by token, with their deadlines.

    The listening sockets admit connections while there are any.
    """

    def __init__(self, sockets: ListeningSockets) -> None:
        self._sockets = sockets
        self._until_s: dict[str, float] = {}
        sockets.close()

    @property
    def any_expected(self) -> bool:
        return bool(self._until_s)

    def expect(self, token: str, until_s: float) -> None:
        """Admit a peer until then."""
        self._until_s[token] = max(until_s, self._until_s.pop(token, until_s))
        if len(self._until_s) > _MAX_INVITED:
            del self._until_s[next(iter(self._until_s))]
        self._sockets.open()

    def settle(self, token: str, now_s: float) -> None:
        """Shorten a connected peer's deadline to the grace period for its other connections."""
        if token in self._until_s:
            self._until_s[token] = min(self._until_s[token], now_s + _SETTLE_S)

    def poll(self, now_s: float) -> bool:
        """Forget peers whose deadline has passed; return whether that closed the sockets."""
        late = [token for token, until_s in self._until_s.items() if until_s <= now_s]
        for token in late:
            del self._until_s[token]
        if self._until_s or not late:
            return False
        self._sockets.close()
        return True

    def wait_s(self, now_s: float) -> float | None:
        """Return the time until the next deadline, None if there is none."""
        next_s = min(self._until_s.values(), default=None)
        return None if next_s is None else max(0.0, next_s - now_s) + 0.01
