"""Transfers that share links, each at its fair rate.

Rates are max-min fair: no transfer can get more without taking it from one that has as little or
less. They are worked out again whenever a transfer starts or ends. All that happens at one instant
is settled at once, and only where a change can reach: not through a link that its transfers could
not fill even if each went as fast as the rest of its way allows, and not through one whose
transfers all go through a narrower one as well.

Not modelled: the slow start of TCP, protocol overhead, loss. A link has one capacity, either way
has a link of its own.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from dask_gpurt.simulate.clock import Event, VirtualClock


def fair_rates(
    flows: Mapping[int, Sequence[str]],
    capacities: Mapping[str, float],
    counts: Mapping[int, int] | None = None,
) -> dict[int, float]:
    """Max-min fair rates, by filling all flows alike and freezing those whose link is full.

    Parameters
    ----------
    flows
        The links on the way of each flow, at least one.
    capacities
        Bytes per second of each of those links.
    counts
        How many flows one stands for; one each if not given.

    Returns
    -------
    dict
        Bytes per second of each flow, or of each of those that one stands for.
    """
    members: dict[str, list[int]] = {}
    for flow, links in flows.items():
        for link in links:
            members.setdefault(link, []).append(flow)
    left = {link: capacities[link] for link in members}
    weights = counts if counts is not None else dict.fromkeys(flows, 1)
    unfrozen = {link: sum(weights[flow] for flow in on) for link, on in members.items()}
    # Shares only grow while flows are frozen, so an outdated entry of the heap is too low, and is
    # put back with what became of it. The number of the link breaks ties, so that names do not.
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
            weight = weights[flow]
            for other in flows[flow]:
                left[other] = max(left[other] - share * weight, 0.0)
                unfrozen[other] -= weight
    return rates


@dataclass
class _Transfer:
    links: Sequence[str]
    left_nbytes: float  # at `since_s`
    narrowest: str
    fastest: float  # what the narrowest link carries
    on_done: Callable[[], object]
    since_s: float
    rate: float = 0.0
    #: Those of its links that matter: its narrowest, and what is contended.
    matter: tuple[str, ...] = ()


class Transfers:
    """The transfers that are under way.

    Parameters
    ----------
    clock
        The time in which they take place.
    capacities
        Bytes per second of each link.
    """

    def __init__(self, clock: VirtualClock, capacities: Mapping[str, float]) -> None:
        self._clock = clock
        self._capacities = capacities
        self._transfers: dict[int, _Transfer] = {}
        #: When each ends if nothing changes. One event is in the clock's queue, for the first.
        self._ends: dict[int, float] = {}
        self._next_end: Event | None = None
        self._on_link: dict[str, dict[int, None]] = {}
        #: What the transfers on a link could take of it if it had no bound.
        self._demand: dict[str, float] = {}
        #: How many transfers of a link go through another one too.
        self._common: dict[str, Counter[str]] = {}
        #: Links that may hold back some of their transfers more than the rest of their way does.
        self._contended: set[str] = set()
        self._numbers = itertools.count()
        self._changed: dict[str, None] = {}
        #: Something changed at this instant, and rates are not worked out yet.
        self.settling = False

    def start(self, links: Sequence[str], nbytes: float, on_done: Callable[[], object]) -> int:
        """Begin a transfer; `on_done` is called when its last byte is through.

        With no link on its way, or nothing to carry, that is at once (but not before this returns).

        Returns
        -------
        int
            What `abort` wants.
        """
        number = next(self._numbers)
        now_s = self._clock.now_s
        fastest, narrowest = min(
            ((self._capacities[link], link) for link in links), default=(math.inf, "")
        )
        self._transfers[number] = _Transfer(links, nbytes, narrowest, fastest, on_done, now_s)
        if not links or not nbytes:
            self._ends[number] = now_s
        else:
            for link in links:
                self._on_link.setdefault(link, {})[number] = None
                self._demand[link] = self._demand.get(link, 0.0) + fastest
                self._common.setdefault(link, Counter()).update(links)
            self._changed.update(dict.fromkeys(links))
        self._settle_later()
        return number

    def abort(self, number: int) -> None:
        """End a transfer that will not get through; `on_done` is not called. Harmless if over."""
        if number in self._transfers:
            self._leave(number)
            self._settle_later()

    def rates(self) -> dict[int, float]:
        """Bytes per second of each transfer under way."""
        return {number: transfer.rate for number, transfer in self._transfers.items()}

    def _leave(self, number: int) -> _Transfer:
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

    def _settle_later(self) -> None:
        if not self.settling:
            self.settling = True
            self._clock.call_later(0.0, self._settle)

    def _settle(self) -> None:
        self.settling = False
        changed, self._changed = self._changed, {}
        now_s = self._clock.now_s
        for number, rate in self._rates_after(changed).items():
            transfer = self._transfers[number]
            # What keeps its rate keeps its end too, to the last bit.
            if rate == transfer.rate:
                continue
            transfer.left_nbytes -= transfer.rate * (now_s - transfer.since_s)
            transfer.rate, transfer.since_s = rate, now_s
            self._ends[number] = now_s + max(transfer.left_nbytes, 0.0) / rate
        if self._next_end is not None:
            self._next_end.cancel()
            self._next_end = None
        if self._ends:
            self._next_end = self._clock.call_at(min(self._ends.values()), self._end)

    def _end(self) -> None:
        self._next_end = None
        now_s = self._clock.now_s
        over = [number for number, end_s in self._ends.items() if end_s <= now_s]
        ended = [self._leave(number) for number in sorted(over)]
        self._settle_later()
        for transfer in ended:
            transfer.on_done()

    def _rates_after(self, changed: Iterable[str]) -> dict[int, float]:
        links = [link for link in changed if link in self._on_link]
        self._note_contention(links)
        # Those that share all links that matter are worked out as one.
        alike: dict[tuple[str, ...], list[int]] = {}
        for number in self._reach(links):
            alike.setdefault(self._transfers[number].matter, []).append(number)
        counts = {way: len(numbers) for way, numbers in enumerate(alike.values())}
        rates = fair_rates(dict(enumerate(alike)), self._capacities, counts)
        return {
            number: rates[way] for way, numbers in enumerate(alike.values()) for number in numbers
        }

    def _note_contention(self, links: Iterable[str]) -> None:
        # Whether a link is contended follows from the transfers on it and nothing else.
        outdated: set[int] = set()
        for link in links:
            is_contended = self._is_contended(link)
            if is_contended != (link in self._contended):
                (self._contended.add if is_contended else self._contended.discard)(link)
                outdated.update(self._on_link[link])
            outdated.update(n for n in self._on_link[link] if not self._transfers[n].matter)
        for number in outdated:
            transfer = self._transfers[number]
            transfer.matter = tuple(
                link
                for link in transfer.links
                if link == transfer.narrowest or link in self._contended
            )

    def _is_contended(self, link: str) -> bool:
        capacity = self._capacities[link]
        if self._demand[link] <= capacity:
            return False
        common = self._common[link]
        everything = common[link]
        return not any(
            count == everything and (self._capacities[other], other) < (capacity, link)
            for other, count in common.items()
        )

    def _reach(self, changed: Iterable[str]) -> list[int]:
        """Transfers whose rates may change with those of the links."""
        reached: set[int] = set()
        links = list(changed)
        seen = set(links)
        while links:
            for number in self._on_link[links.pop()]:
                if number in reached:
                    continue
                reached.add(number)
                for other in self._transfers[number].matter:
                    if other not in seen:
                        seen.add(other)
                        links.append(other)
        return sorted(reached)
