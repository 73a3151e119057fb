"""The time in which stock Dask would have copied a value to workers, as far as that is known.

The unit is the time of the value over one network card. Stock Dask sends whole values:

- `replicate` works in rounds. In each, a worker that has the value gives it to two others, one
  after the other.
- Tasks that need the value fetch it from one worker, which serves ten at a time. Those that have it
  then serve others.

Copies inside a host use no card, and are not counted. Sources: `Scheduler.replicate` of distributed
2026.7 with its `branching_factor` of 2, and `distributed.worker.connections.incoming`.
"""

from __future__ import annotations

#: Workers to which one worker sends values at the same time.
N_SERVED = 10
#: Workers to which one worker gives a value in a round of `replicate`.
N_GIVEN = 2


def replicate_units(n_away: int) -> int:
    """Return the time of `replicate` to `n_away` workers on other hosts."""
    n_rounds, n_holders = 0, 1
    while n_holders <= n_away:
        n_holders += N_GIVEN * n_holders
        n_rounds += 1
    return N_GIVEN * n_rounds


def fetch_units(n_away: int) -> int:
    """Return the time until `n_away` workers on other hosts have fetched a value."""
    units, n_holders = 0, 1
    while n_holders <= n_away:
        served = min(N_SERVED, -(-(n_away + 1 - n_holders) // n_holders))
        n_holders += served * n_holders
        units += served
    return units


def card_seconds(seconds: float, n_hosts: int, n_slices: int) -> float | None:
    """Return the time of a value over one card, given the time of a chain; None for one host.

    A chain of H hosts sends the last of P slices after H + P - 2 others.
    """
    if n_hosts < 2:
        return None
    return seconds * n_slices / (n_hosts + n_slices - 2)
