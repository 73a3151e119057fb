"""Plans of probe transfers between workers, and conclusions from them. Pure: sends nothing.

A probe fetches a few short messages over Dask's own connections, one pair of workers at a time.
This is cheap, and transfers do not disturb each other. Between hosts, one worker represents each
host.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dask_gpurt.errors import ProtocolError

if TYPE_CHECKING:
    from dask_gpurt.topology.learned import End

#: Limits of a whole probe. It stops at the first one that it reaches.
MAX_PAIRS = 64
MAX_S = 5.0
#: Limits of one pair.
MAX_PAIR_S = 0.5
MAX_PAIR_NBYTES = 32 * 2**20
#: Message sizes of a pair: each is four times the one before, and the last one repeats.
SMALLEST_NBYTES = 128 * 2**10
LARGEST_NBYTES = 8 * 2**20
_GROWTH = 4
_REPEATS = 2
#: Most hosts of a cluster that is probed in mode `auto` although all speeds are reported.
AUTOMATIC_HOSTS = 16


class Measured(NamedTuple):
    """Rate and latency that a probe measured between two hosts."""

    nbytes_per_s: float
    latency_s: float


class ProbeTransfer(NamedTuple):
    """One message that was fetched."""

    nbytes: int
    seconds: float


#: The reason of `why_not` that passes by itself.
BUSY = "tasks were running"


def why_not(
    mode: str, *, n_hosts: int, is_described: bool, is_needed: bool, is_used: bool, is_busy: bool
) -> str | None:
    """Return why a cluster is not probed now, or None if it is.

    Parameters
    ----------
    mode
        `on`, `off`, or `auto`.
    is_described
        Whether a description of the links by a person is used.
    is_needed
        Whether placement waits for the speeds of links that workers could not report.
    is_used
        Whether any decision uses measured rates.
    is_busy
        Whether tasks run. A probe would delay them, and they would spoil its figures.
    """
    if mode == "off":
        return "gpurt.topology.probe is off"
    if mode == "auto" and is_described:
        return "machines are described"
    if mode == "auto" and not is_used:
        return "placement does not use measured links"
    if mode == "auto" and n_hosts > AUTOMATIC_HOSTS and not is_needed:
        return f"there are more than {AUTOMATIC_HOSTS} hosts"
    return BUSY if is_busy else None


def pairs(ends: Iterable[End], done: Collection[tuple[str, str]] = ()) -> list[tuple[End, End]]:
    """Return the pairs of workers to probe, source first, the most informative ones first.

    Parameters
    ----------
    done
        Pairs of hosts that were probed before.

    Returns
    -------
    list
        At most `MAX_PAIRS` pairs: every host to the next one; then the same pairs the other way;
        then pairs within each host; then hosts that are further apart.
    """
    by_host: dict[str, list[End]] = {}
    for end in sorted(ends):
        by_host.setdefault(end.host, []).append(end)
    found: list[tuple[End, End]] = []
    for pair in _all_pairs(list(by_host.values())):
        if len(found) + len(done) >= MAX_PAIRS:
            break
        if (pair[0].host, pair[1].host) not in done:
            found.append(pair)
    return found


def _all_pairs(hosts: Sequence[Sequence[End]]) -> Iterator[tuple[End, End]]:
    n_hosts = len(hosts)
    for distance in range(1, n_hosts // 2 + 1):
        ring = [(one[0], hosts[(i + distance) % n_hosts][0]) for i, one in enumerate(hosts)]
        yield from ring
        # Half-way round, each pair would come a second time from the other side.
        if 2 * distance != n_hosts:
            yield from ((other, one) for one, other in ring)
        if distance == 1:
            yield from _within(hosts)
    if n_hosts == 1:
        yield from _within(hosts)


def _within(hosts: Sequence[Sequence[End]]) -> Iterator[tuple[End, End]]:
    for one, *others in hosts:
        if others:
            yield one, others[0]


def next_nbytes(transfers: Sequence[ProbeTransfer]) -> int:
    """Return the size of the next message; 0 to stop.

    A busy process may delay a message that the link carried at once. So a size that seems too slow
    for a larger one is tried again first.
    """
    if not transfers:
        return SMALLEST_NBYTES
    nbytes = max(one.nbytes for one in transfers)
    times = [one.seconds for one in transfers if one.nbytes == nbytes]
    left_nbytes = MAX_PAIR_NBYTES - sum(one.nbytes for one in transfers)
    left_s = MAX_PAIR_S - sum(one.seconds for one in transfers)
    larger = nbytes * _GROWTH
    if larger <= min(LARGEST_NBYTES, left_nbytes) and _GROWTH * min(times) <= left_s:
        return larger
    if len(times) < _REPEATS and nbytes <= left_nbytes and min(times) <= left_s:
        return nbytes
    return 0


def conclude(answer: Any) -> Measured:
    """Return the rate and latency of a link from a worker's answer to a probe.

    The fastest of the largest messages counts. Its fixed costs weigh least, and chance delays of
    other messages say nothing about the link.

    Raises
    ------
    ProtocolError
        The answer is malformed or implausible.
    """
    if not isinstance(answer, Mapping) or not isinstance(answer.get("transfers"), list | tuple):
        raise ProtocolError("not an answer to a probe")
    try:
        transfers = [(float(nbytes), float(seconds)) for nbytes, seconds in answer["transfers"]]
        nbytes, seconds = max(transfers, key=lambda one: (one[0], -one[1]))
        latency_s = float(answer["latency_s"])
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"not an answer to a probe: {error!r}") from None
    # Keep the time positive, whatever the measured latency.
    taken_s = max(seconds - latency_s, seconds / 10)
    if not (0 < taken_s < math.inf and 0 <= latency_s < math.inf and 0 < nbytes < math.inf):
        raise ProtocolError(f"{nbytes:g} bytes in {seconds:g} s")
    return Measured(nbytes / taken_s, latency_s)
