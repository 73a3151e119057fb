"""When to try again what failed, and when to say so. Takes the time, and never asks for it."""

from __future__ import annotations

from dataclasses import dataclass, field

FIRST_S = 1.0
LONGEST_S = 60.0
#: The same reason is not said again for this long.
SILENCE_S = 600.0


@dataclass(frozen=True)
class Backoff:
    """Waits twice as long after each failure in a row, up to a minute.

    Attributes
    ----------
    n_failures
        In a row.
    until_s
        Nothing is tried before.
    """

    n_failures: int = 0
    until_s: float = 0.0

    def is_waiting(self, now_s: float) -> bool:
        return bool(self.n_failures) and now_s < self.until_s

    def after_failure(self, now_s: float) -> Backoff:
        # Those that had begun before the first of them failed are not further failures.
        if self.is_waiting(now_s):
            return self
        wait_s = min(LONGEST_S, FIRST_S * 2.0 ** min(self.n_failures, 30))
        return Backoff(self.n_failures + 1, now_s + wait_s)


@dataclass
class LogThrottle:
    """What was said when, so that a reason is not said over and over."""

    said_s: dict[str, float] = field(default_factory=dict)

    def is_due(self, reason: str, now_s: float) -> bool:
        """Whether this reason is to be said now; if so, it counts as said."""
        said_s = self.said_s.get(reason)
        if said_s is not None and now_s - said_s < SILENCE_S:
            return False
        self.said_s[reason] = now_s
        return True
