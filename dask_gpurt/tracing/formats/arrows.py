"""Arrows between the events of a trace: of messages, and from a task's output to its consumers.

An arrow has a number. Every event that it touches names the number, and viewers connect these
events in the order of time. A chain is an arrow from event to event to event. An event is on one
chain at most, which lets Chrome's format name it in the event itself. This module draws nothing.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass, field

from dask_gpurt.tracing.events import LaneWork, TaskTimes, Trace
from dask_gpurt.tracing.lane_names import FETCH, NOT_SENDS, RECEIVE

#: Most arrows into one task. With more inputs, only the last ones to be ready get arrows: the task
#: waited for these. A picture with thousands of arrows shows nothing.
MAX_ARROWS = 16

#: Numbers of messages begin here. Numbers of outputs are smaller.
_MESSAGES = 1 << 62
_BITS_OF_MESSAGE = 38


@dataclass
class Arrows:
    """Numbers of the arrows that touch one event.

    Attributes
    ----------
    chain
        Number of the chain that the event is on; 0 without one.
    comes, goes
        The chain comes here from another event, and goes on to another one.
    out, through, into
        Other arrows: those that begin here, pass here, and end here.
    """

    chain: int = 0
    comes: bool = False
    goes: bool = False
    out: list[int] = field(default_factory=list)
    through: list[int] = field(default_factory=list)
    into: list[int] = field(default_factory=list)


NO_ARROWS = Arrows()

#: What identifies a fetch: its task, the worker that got the output, and the address it came from.
_Fetch = tuple[int, int, str]


class ArrowFinder:
    """Finds the arrows that touch an event of a trace."""

    def __init__(self, trace: Trace) -> None:
        self._indices = {process.address: i for i, process in enumerate(trace.processes)}
        self._numbers = itertools.count(1)
        self._of_tasks: defaultdict[int, Arrows] = defaultdict(Arrows)
        fetches = [work for work in trace.work if work.lane == FETCH]
        self._of_fetches = {_key(work): Arrows() for work in fetches}
        # The first of several fetches for one task from one peer.
        self._starts_s = {_key(work): work.start_s for work in reversed(fetches)}
        tasks = {task.number: task for task in trace.tasks}
        for consumer in trace.tasks:
            inputs = [tasks[one] for one in dict.fromkeys(consumer.needs) if one in tasks]
            # Viewers draw an arrow in the order of time.
            inputs = [one for one in inputs if one.start_s < consumer.start_s]
            inputs.sort(key=lambda task: task.known_s, reverse=True)
            for producer in inputs[:MAX_ARROWS]:
                peer = trace.processes[producer.process].address
                self._connect(producer, consumer, self._fetch(producer, consumer, peer))

    def _fetch(self, producer: TaskTimes, consumer: TaskTimes, peer: str) -> Arrows | None:
        """Return the arrows of the fetch that brought an output to a consumer, if there was one.

        A fetch is known by its consumer. Several consumers share the fetch of an output.
        """
        for task in (consumer, producer):
            key = task.number, consumer.process, peer
            if producer.start_s <= self._starts_s.get(key, float("-inf")) < consumer.start_s:
                return self._of_fetches[key]
        return None

    def _connect(self, producer: TaskTimes, consumer: TaskTimes, on_way: Arrows | None) -> None:
        source, target = self._of_tasks[producer.number], self._of_tasks[consumer.number]
        if source.goes or target.comes or (on_way is not None and on_way.chain):
            number = next(self._numbers)
            source.out.append(number)
            target.into.append(number)
            if on_way is not None:
                on_way.through.append(number)
            return
        source.chain = target.chain = source.chain or next(self._numbers)
        source.goes = target.comes = True
        if on_way is not None:
            on_way.chain, on_way.comes, on_way.goes = source.chain, True, True

    def of_task(self, task: TaskTimes) -> Arrows:
        """Return the arrows of a task."""
        return self._of_tasks.get(task.number, NO_ARROWS)

    def of_work(self, work: LaneWork) -> Arrows:
        """Return the arrows of a piece of work."""
        if work.lane == FETCH:
            # The first of several fetches for one task from one peer.
            return self._of_fetches.pop(_key(work), NO_ARROWS)
        if work.message and work.path not in NOT_SENDS:
            return Arrows(chain=_number(work.process, work.message), goes=True)
        sender = self._indices.get(work.peer)
        if work.message and work.path == RECEIVE and sender is not None:
            return Arrows(chain=_number(sender, work.message), comes=True)
        return NO_ARROWS


def _key(fetch: LaneWork) -> _Fetch:
    return fetch.task, fetch.process, fetch.peer


def _number(sender: int, message: int) -> int:
    bits = (sender << _BITS_OF_MESSAGE) | message % (1 << _BITS_OF_MESSAGE)
    return _MESSAGES | bits % _MESSAGES
