"""Retry delays after failures, and rate limits for log messages.

Callers pass the time in; nothing here reads a clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

FIRST_S = 1.0
LONGEST_S = 60.0
#: A reason is not logged again for this long.
SILENCE_S = 600.0


@dataclass(frozen=True)
class Backoff:
    """An exponential back-off: each failure in a row doubles the delay, up to a minute.

    Attributes
    ----------
    n_failures
        Failures in a row.
    until_s
        Time of the next attempt.
    """

    n_failures: int = 0
    until_s: float = 0.0

    def is_waiting(self, now_s: float) -> bool:
        return bool(self.n_failures) and now_s < self.until_s

    def after_failure(self, now_s: float) -> Backoff:
        # Attempts that began before the first failure do not count as further failures.
        if self.is_waiting(now_s):
            return self
        wait_s = min(LONGEST_S, FIRST_S * 2.0 ** min(self.n_failures, 30))
        return Backoff(self.n_failures + 1, now_s + wait_s)


@dataclass
class LogThrottle:
    """A filter that lets each reason be logged once in a while."""

    logged_s: dict[str, float] = field(default_factory=dict)

    def is_due(self, reason: str, now_s: float) -> bool:
        """Return whether to log this reason now; if so, count it as logged."""
        logged_s = self.logged_s.get(reason)
        if logged_s is not None and now_s - logged_s < SILENCE_S:
            return False
        self.logged_s[reason] = now_s
        return True
