"""Transfers that share links, each at its fair rate.

Rates are max-min fair: no transfer can get more without taking from one that has as little or less.
They are recomputed when a transfer starts or ends, once for all changes at one instant. The
recomputation covers only the transfers that a change can affect. It does not spread through a link
that its transfers cannot fill, even if each runs at the speed of its other links. Nor does it
spread through a link whose transfers all share a narrower one.

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
    for flow, links in flows.items():
        for link in links:
            members.setdefault(link, []).append(flow)
    left = {link: capacities[link] for link in members}
    weights = counts if counts is not None else dict.fromkeys(flows, 1)
    unfrozen = {link: sum(weights[flow] for flow in on) for link, on in members.items()}
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
        #: End of each transfer if nothing changes. The clock's queue has one event, for the first
        #: end.
        self._ends: dict[int, float] = {}
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
        #: Whether something changed at this instant and rates are outdated.
        self.settling = False

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
        """Stop a transfer without calling `on_done`. Harmless if the transfer has ended."""
        if number in self._transfers:
            self._remove(number)
            self._settle_later()

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
            # An unchanged rate keeps its end exactly, without rounding.
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
        ended = [self._remove(number) for number in sorted(over)]
        self._settle_later()
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
        everything = common[link]
        return not any(
            count == everything and (self._capacities[other], other) < (capacity, link)
            for other, count in common.items()
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
