"""Transfers that share links, each at its fair rate.

Rates are max-min fair: no transfer can get more without taking from one that has as little or less.
They are recomputed when a transfer starts or ends, once for all changes at one instant. The
recomputation covers only the transfers that a change can affect. It does not spread through a link
that its transfers cannot fill, even if each runs at the speed of its other links. Nor does it
spread through a link whose transfers all share a narrower one.

Among many transfers, a change waits a little for others. The wait is a small share of the time
that its own transfer takes. So a recomputation serves many changes, and the cost of a transfer does
not grow with the number of others.

Not modelled: TCP slow start, protocol overhead, loss. A link has one capacity; the opposite
direction is another link.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from dask_gpurt.simulate.clock import ClockEvent, VirtualClock

#: With more transfers than this in progress, changes wait for others.
MANY = 64
#: The longest wait, as a share of the time of the transfer that started or ended.
WAIT_SHARE = 0.03


def fair_rates(
    flows: Mapping[int, Sequence[str]],
    capacities: Mapping[str, float],
    counts: Mapping[int, int] | None = None,
) -> dict[int, float]:
    """Return max-min fair rates: raise all flows equally, and freeze those on a full link.

    Parameters
    ----------
    flows
        The links of each flow, at least one.
    capacities
        Bytes per second of each of those links.
    counts
        Number of flows that each entry represents; 1 by default.

    Returns
    -------
    dict
        Bytes per second of each flow, or of each of the flows that an entry represents.
    """
    members: dict[str, list[int]] = {}
    unfrozen: dict[str, int] = {}
    for flow, links in flows.items():
        weight = counts[flow] if counts is not None else 1
        for link in links:
            if link in members:
                members[link].append(flow)
                unfrozen[link] += weight
            else:
                members[link] = [flow]
                unfrozen[link] = weight
    left = {link: capacities[link] for link in members}
    # A link's share only grows while flows freeze. So an outdated heap entry is too low, and is
    # pushed again with the current share. The link's number breaks ties, so that names do not
    # matter.
    numbers = {link: number for number, link in enumerate(members)}
    heap = [(left[link] / unfrozen[link], numbers[link], link) for link in members]
    heapq.heapify(heap)
    rates: dict[int, float] = {}
    while heap:
        share, number, link = heapq.heappop(heap)
        if not unfrozen[link]:
            continue
        current = left[link] / unfrozen[link]
        if current > share:
            heapq.heappush(heap, (current, number, link))
            continue
        for flow in members[link]:
            if flow in rates:
                continue
            rates[flow] = share
            weight = counts[flow] if counts is not None else 1
            for other in flows[flow]:
                left[other] = max(left[other] - share * weight, 0.0)
                unfrozen[other] -= weight
    return rates


@dataclass
class _Transfer:
    links: Sequence[str]
    nbytes: float
    left_nbytes: float  # at `since_s`
    narrowest: str
    fastest: float  # capacity of the narrowest link
    on_done: Callable[[], object]
    since_s: float
    rate: float = 0.0
    #: Links that limit this transfer: its narrowest one, and contended ones.
    limiting: tuple[str, ...] = ()


class Transfers:
    """All transfers in progress.

    Parameters
    ----------
    clock
        The clock of the simulation.
    capacities
        Bytes per second of each link.
    """

    def __init__(self, clock: VirtualClock, capacities: Mapping[str, float]) -> None:
        self._clock = clock
        self._capacities = capacities
        self._transfers: dict[int, _Transfer] = {}
        #: End of each transfer if nothing changes, and a heap of them. An entry of the heap is
        #: outdated if the transfer has another end now. The clock's queue has one event, for the
        #: first end.
        self._ends: dict[int, float] = {}
        self._queue: list[tuple[float, int]] = []
        self._next_end: ClockEvent | None = None
        self._on_link: dict[str, dict[int, None]] = {}
        #: Rate that the transfers on a link would use if the link had no limit.
        self._demand: dict[str, float] = {}
        #: Number of transfers that a link has in common with each other link.
        self._common: dict[str, Counter[str]] = {}
        #: Links that may limit some of their transfers more than the transfers' other links do.
        self._contended: set[str] = set()
        self._numbers = itertools.count()
        self._changed: dict[str, None] = {}
        self._next_settling: ClockEvent | None = None

    def start(self, links: Sequence[str], nbytes: float, on_done: Callable[[], object]) -> int:
        """Start a transfer; `on_done` is called when its last byte has passed.

        Without links or bytes, `on_done` is called immediately after this method returns.

        Returns
        -------
        int
            A number for `abort`.
        """
        number = next(self._numbers)
        now_s = self._clock.now_s
        fastest, narrowest = min(
            ((self._capacities[link], link) for link in links), default=(math.inf, "")
        )
        transfer = _Transfer(links, nbytes, nbytes, narrowest, fastest, on_done, now_s)
        self._transfers[number] = transfer
        if not links or not nbytes:
            self._set_end(number, now_s)
            self._await_end()
        else:
            for link in links:
                self._on_link.setdefault(link, {})[number] = None
                self._demand[link] = self._demand.get(link, 0.0) + fastest
                self._common.setdefault(link, Counter()).update(links)
            self._changed.update(dict.fromkeys(links))
            self._settle_later(transfer)
        return number

    def abort(self, number: int) -> None:
        """Stop a transfer without calling `on_done`. Harmless if the transfer has ended."""
        if number in self._transfers:
            self._settle_later(self._remove(number))

    def rates(self) -> dict[int, float]:
        """Return the bytes per second of each transfer in progress."""
        return {number: transfer.rate for number, transfer in self._transfers.items()}

    def _remove(self, number: int) -> _Transfer:
        transfer = self._transfers.pop(number)
        self._ends.pop(number, None)
        for link in transfer.links:
            on_link = self._on_link.get(link, {})
            if number not in on_link:
                continue
            del on_link[number]
            if on_link:
                self._demand[link] -= transfer.fastest
                self._common[link].subtract(transfer.links)
                self._changed[link] = None
            else:
                del self._on_link[link], self._demand[link], self._common[link]
                self._contended.discard(link)
        return transfer

    @property
    def settling(self) -> bool:
        """Whether something changed and rates are outdated."""
        return self._next_settling is not None

    def _settle_later(self, changed: _Transfer) -> None:
        """Settle at the end of this instant, or after a wait if there are many transfers."""
        when_s = self._clock.now_s
        if len(self._transfers) > MANY:
            when_s += changed.nbytes * self._slowest(changed.links) * WAIT_SHARE
        if self._next_settling is not None:
            if self._next_settling.when_s <= when_s:
                return
            self._next_settling.cancel()
        self._next_settling = self._clock.call_at(when_s, self._settle)

    def _slowest(self, links: Sequence[str]) -> float:
        """Return the most seconds that a byte takes where each link is shared equally."""
        on_link = self._on_link
        return max(
            (len(on_link.get(link, ())) / self._capacities[link] for link in links), default=0.0
        )

    def _settle(self) -> None:
        self._next_settling = None
        changed, self._changed = self._changed, {}
        now_s = self._clock.now_s
        for number, rate in self._rates_after(changed).items():
            transfer = self._transfers[number]
            # An unchanged rate keeps its end exactly, without rounding.
            if rate == transfer.rate:
                continue
            transfer.left_nbytes -= transfer.rate * (now_s - transfer.since_s)
            transfer.rate, transfer.since_s = rate, now_s
            self._set_end(number, now_s + max(transfer.left_nbytes, 0.0) / rate)
        self._await_end()

    def _set_end(self, number: int, end_s: float) -> None:
        self._ends[number] = end_s
        heapq.heappush(self._queue, (end_s, number))

    def _await_end(self) -> None:
        """Schedule the first end."""
        queue, ends = self._queue, self._ends
        if len(queue) > 4 * len(ends):  # most entries are outdated
            queue[:] = sorted((end_s, number) for number, end_s in ends.items())
        while queue and ends.get(queue[0][1]) != queue[0][0]:
            heapq.heappop(queue)
        when_s = queue[0][0] if queue else math.inf
        if self._next_end is not None:
            if self._next_end.when_s == when_s:
                return
            self._next_end.cancel()
            self._next_end = None
        if queue:
            self._next_end = self._clock.call_at(when_s, self._end)

    def _end(self) -> None:
        self._next_end = None
        now_s = self._clock.now_s
        ended = []
        while self._queue and self._queue[0][0] <= now_s:
            end_s, number = heapq.heappop(self._queue)
            if self._ends.get(number) == end_s:
                ended.append(self._remove(number))
                self._settle_later(ended[-1])
        self._await_end()
        for transfer in ended:
            transfer.on_done()

    def _rates_after(self, changed: Iterable[str]) -> dict[int, float]:
        links = [link for link in changed if link in self._on_link]
        self._update_contention(links)
        # Transfers with the same limiting links share one computation.
        groups: dict[tuple[str, ...], list[int]] = {}
        for number in self._affected(links):
            groups.setdefault(self._transfers[number].limiting, []).append(number)
        counts = {group: len(numbers) for group, numbers in enumerate(groups.values())}
        rates = fair_rates(dict(enumerate(groups)), self._capacities, counts)
        return {
            number: rates[group]
            for group, numbers in enumerate(groups.values())
            for number in numbers
        }

    def _update_contention(self, links: Iterable[str]) -> None:
        # Contention of a link depends only on the transfers on it.
        outdated: set[int] = set()
        for link in links:
            is_contended = self._is_contended(link)
            if is_contended != (link in self._contended):
                (self._contended.add if is_contended else self._contended.discard)(link)
                outdated.update(self._on_link[link])
            outdated.update(n for n in self._on_link[link] if not self._transfers[n].limiting)
        for number in outdated:
            transfer = self._transfers[number]
            transfer.limiting = tuple(
                link
                for link in transfer.links
                if link == transfer.narrowest or link in self._contended
            )

    def _is_contended(self, link: str) -> bool:
        capacity = self._capacities[link]
        if self._demand[link] <= capacity:
            return False
        common = self._common[link]
        # A link that all transfers have in common is a link of each of them.
        links = self._transfers[next(iter(self._on_link[link]))].links
        return not any(
            common[other] == common[link] and (self._capacities[other], other) < (capacity, link)
            for other in links
        )

    def _affected(self, changed: Iterable[str]) -> list[int]:
        """Return the transfers whose rates may change with those of the links."""
        reached: set[int] = set()
        links = list(changed)
        seen = set(links)
        while links:
            for number in self._on_link[links.pop()]:
                if number in reached:
                    continue
                reached.add(number)
                for other in self._transfers[number].limiting:
                    if other not in seen:
                        seen.add(other)
                        links.append(other)
        return sorted(reached)
