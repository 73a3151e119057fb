"""A replay of traces in too little memory, which counts the bytes moved to and from a tier below.

`Belady` knows the whole trace, and evicts the value with the furthest next use. `Informed` ranks by
one of our policies, with the foresight of a worker. Both share the rules of the memory:

- Inputs of the running task stay.
- A value that is loaded leaves a clean copy below, so that evicting it again costs nothing.
- A copy for a peer is read without being kept.

`optimum` tries all choices, for tiny traces only. This module uses only policies and their
foresight from the product.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from typing import Protocol

from dask_gpurt.memory.decisions.eviction_policy import EvictionCandidate, EvictionPolicy
from dask_gpurt.memory.decisions.foresight import Outlook
from tests.memory.traces import Event, Trace


class Chooser(Protocol):
    def see(self, time: int, event: Event) -> None:
        """Note an event that is about to happen."""

    def victim(self, candidates: Collection[int], clean: Collection[int]) -> int:
        """Return the candidate to evict."""


@dataclass
class Moved:
    read_nbytes: int = 0
    written_nbytes: int = 0

    @property
    def nbytes(self) -> int:
        return self.read_nbytes + self.written_nbytes


def replay(trace: Trace, capacity_nbytes: int, chooser: Chooser) -> Moved:
    """Return the bytes that a worker with this much memory moves.

    The inputs of the running task stay in memory even if they exceed the capacity.
    """
    moved = Moved()
    size = [node.nbytes for node in trace.nodes]
    held: set[int] = set()
    clean: set[int] = set()
    running: tuple[int, ...] = ()
    made_by_running = -1
    used = 0

    def make_room(nbytes: int) -> None:
        nonlocal used
        while used + nbytes > capacity_nbytes:
            candidates = held.difference(running)
            if not candidates:
                return
            victim = chooser.victim(candidates, clean)
            held.remove(victim)
            used -= size[victim]
            if victim not in clean:
                clean.add(victim)
                moved.written_nbytes += size[victim]

    for time, event in enumerate(trace.events):
        chooser.see(time, event)
        for node in event.nodes:
            if event.kind == "run":
                running, made_by_running = trace.nodes[node].inputs, node
                missing = [one for one in running if one not in held]
                make_room(sum(size[one] for one in missing))
                for one in missing:
                    assert one in clean, "a task ran before its inputs were there"
                    held.add(one)
                    used += size[one]
                    moved.read_nbytes += size[one]
            elif event.kind == "put" and node not in held and node not in clean:
                held.add(node)
                used += size[node]
                make_room(0)
            elif event.kind == "send" and node not in held:
                assert node in clean, "a peer took what was not there"
                moved.read_nbytes += size[node]
            elif event.kind == "release":
                if node in held:
                    held.remove(node)
                    used -= size[node]
                clean.discard(node)
            if event.kind == "put" and node == made_by_running:
                running = ()
    return moved


class Belady:
    """Evicts the value with the furthest next use; of values without one, clean ones first."""

    def __init__(self, trace: Trace) -> None:
        self.now = 0
        self.uses: dict[int, list[int]] = defaultdict(list)
        for time, event in enumerate(trace.events):
            for node in event.nodes:
                if event.kind in ("run", "send"):
                    used = trace.nodes[node].inputs if event.kind == "run" else (node,)
                    for one in used:
                        self.uses[one].append(time)

    def see(self, time: int, event: Event) -> None:
        self.now = time

    def next_use(self, node: int) -> float:
        uses = self.uses[node]
        following = bisect_right(uses, self.now)
        return uses[following] if following < len(uses) else math.inf

    def victim(self, candidates: Collection[int], clean: Collection[int]) -> int:
        return max(candidates, key=lambda node: (self.next_use(node), node in clean, node))


class Informed:
    """Evicts by one of our policies, with a worker's foresight.

    Parameters
    ----------
    hints
        Whether the scheduler reports dependents that other workers run. Otherwise only tasks in
        the worker's own queue are known.
    """

    def __init__(self, trace: Trace, policy: EvictionPolicy, *, hints: bool = True) -> None:
        self.nodes = trace.nodes
        self.rank = policy.rank
        self.learns_from = ("queue", "submit") if hints else ("queue",)
        self.dependents: dict[int, set[int]] = defaultdict(set)
        self.last_used: dict[int, int] = {}
        self.made: dict[int, int] = {}
        self.queued: set[int] = set()
        self.held_back: set[int] = set()
        self.given: set[int] = set()
        self.done: set[int] = set()
        self.sent: set[int] = set()
        self.outlook = self.look()

    def look(self) -> Outlook[int]:
        at_peer = self.given - self.queued - self.done
        theirs, ours = (
            sorted(self.nodes[task].priority for task in tasks)
            for tasks in (at_peer, self.queued - self.done)
        )
        return Outlook(
            lambda task: self.nodes[task].priority,
            lambda task: (one for one in self.nodes[task].inputs if one not in self.done),
            lambda task: task in self.held_back and task not in self.given,
            lambda task: (
                bisect_left(theirs, self.nodes[task].priority) if task in at_peer else None
            ),
            ours,
        )

    def see(self, time: int, event: Event) -> None:
        kind = event.kind
        for node in event.nodes:
            inputs = self.nodes[node].inputs
            if kind in self.learns_from:
                for one in inputs:
                    self.dependents[one].add(node)
            if kind == "hold":
                self.held_back.add(node)
            elif kind == "queue":
                self.queued.add(node)
            if kind in ("queue", "give"):
                self.given.add(node)
            elif kind in ("run", "over"):
                for one in inputs:
                    self.dependents[one].discard(node)
            elif kind == "send":
                self.sent.add(node)
            elif kind == "drop":
                self.sent.discard(node)
            if kind == "over":
                self.done.add(node)
            elif kind == "put":
                self.last_used[node] = time
                self.made.setdefault(node, time)
            elif kind == "run":
                self.last_used.update(dict.fromkeys(inputs, time))
        self.outlook = self.look()

    def candidate(self, node: int, is_clean: bool) -> EvictionCandidate:
        uses = self.dependents[node]
        if node in self.sent:
            # Tasks of the peer use its own copy.
            uses = {task for task in uses if task in self.queued or task not in self.given}
        return EvictionCandidate(
            self.nodes[node].nbytes,
            self.outlook.next_use(uses),
            self.last_used[node],
            is_clean,
            self.made[node],
        )

    def victim(self, candidates: Collection[int], clean: Collection[int]) -> int:
        return max(candidates, key=lambda node: self.rank(self.candidate(node, node in clean)))


def optimum(trace: Trace, capacity_nbytes: int, *, write_cost: int = 1) -> int:
    """Return the least cost of all choices: 1 for a byte read, `write_cost` for a byte written."""
    size = [node.nbytes for node in trace.nodes]

    @cache
    def least(time: int, held: frozenset[int], clean: frozenset[int]) -> float:
        """Return the cost of the events from `time` on."""
        if time == len(trace.events):
            return 0
        kind, (node,) = trace.events[time]
        if kind == "run":
            inputs = frozenset(trace.nodes[node].inputs)
            read = sum(size[one] for one in inputs - held)
            return read + fit(time, held | inputs, clean, inputs)
        if kind == "put":
            return fit(time, held | {node}, clean, frozenset())
        assert kind == "release"
        return least(time + 1, held - {node}, clean - {node})

    @cache
    def fit(
        time: int, held: frozenset[int], clean: frozenset[int], pinned: frozenset[int]
    ) -> float:
        """Evict until the held values fit, then return `least` of the next event."""
        evictable = held - pinned
        if sum(size[one] for one in held) <= capacity_nbytes or not evictable:
            return least(time + 1, held, clean)
        return min(
            (0 if one in clean else write_cost * size[one])
            + fit(time, held - {one}, clean | {one}, pinned)
            for one in evictable
        )

    return int(least(0, frozenset(), frozenset()))
