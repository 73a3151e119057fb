"""Arrows between the events of a trace: of messages, and from a task's output to its consumers.

An arrow has a number. Every event that it touches names the number, and viewers connect these
events in the order of time. This module draws nothing.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from dask_gpurt.tracing.events import FETCH, RECEIVE, SEND, LaneWork, TaskTimes, Trace

#: Most arrows into one task. With more inputs, the last ones to be ready get them: they are the
#: ones that the task waited for, and a picture with thousands of arrows shows nothing.
MAX_ARROWS = 16

#: Numbers of messages begin here. Numbers of outputs are smaller.
_MESSAGES = 1 << 62
_BITS_OF_MESSAGE = 38


class Arrows(NamedTuple):
    """Numbers of the arrows that touch one event.

    Attributes
    ----------
    out, through, into
        The arrows that begin here, that go on from here to another event, and that end here.
    """

    out: tuple[int, ...] = ()
    through: tuple[int, ...] = ()
    into: tuple[int, ...] = ()


NO_ARROWS = Arrows()


class ArrowFinder:
    """Finds the arrows that touch an event of a trace."""

    def __init__(self, trace: Trace) -> None:
        self._indices = {process.address: i for i, process in enumerate(trace.processes)}
        self._out: defaultdict[int, list[int]] = defaultdict(list)
        self._into: defaultdict[int, list[int]] = defaultdict(list)
        self._through: defaultdict[tuple[int, int, str], list[int]] = defaultdict(list)
        self._connect_tasks(trace)

    def _connect_tasks(self, trace: Trace) -> None:
        tasks = {task.number: task for task in trace.tasks}
        fetches = {_key(work) for work in trace.work if work.lane == FETCH}
        n_arrows = 0
        for consumer in trace.tasks:
            inputs = [tasks[one] for one in dict.fromkeys(consumer.needs) if one in tasks]
            # Viewers draw an arrow in the order of time.
            inputs = [one for one in inputs if one.start_s <= consumer.start_s]
            if len(inputs) > MAX_ARROWS:
                inputs = sorted(inputs, key=lambda task: task.known_s)[-MAX_ARROWS:]
            for producer in inputs:
                n_arrows += 1
                self._out[producer.number].append(n_arrows)
                self._into[consumer.number].append(n_arrows)
                peer = trace.processes[producer.process].address
                # A fetch is for its consumer. Several consumers share the fetch of one of them.
                for task in (consumer, producer):
                    if (key := (task.number, consumer.process, peer)) in fetches:
                        self._through[key].append(n_arrows)
                        break

    def of_task(self, task: TaskTimes) -> Arrows:
        """Return the arrows of a task."""
        out, into = self._out.get(task.number, ()), self._into.get(task.number, ())
        return Arrows(tuple(out), (), tuple(into)) if out or into else NO_ARROWS

    def of_work(self, work: LaneWork) -> Arrows:
        """Return the arrows of a piece of work."""
        if work.message:
            if work.path == SEND:
                return Arrows(out=(_number(work.process, work.message),))
            if work.path == RECEIVE and (sender := self._indices.get(work.peer)) is not None:
                return Arrows(into=(_number(sender, work.message),))
        elif work.lane == FETCH:
            # The first of several fetches for one task from one peer.
            if numbers := self._through.pop(_key(work), None):
                return Arrows(through=tuple(numbers))
        return NO_ARROWS


def _key(fetch: LaneWork) -> tuple[int, int, str]:
    return fetch.task, fetch.process, fetch.peer


def _number(sender: int, message: int) -> int:
    bits = (sender << _BITS_OF_MESSAGE) | message % (1 << _BITS_OF_MESSAGE)
    return _MESSAGES | bits % _MESSAGES
