"""The time of one task, from the moment its inputs existed until its output was known.

A story divides that time into segments: computing, or waiting for one thing. The critical path is
made of stories, and idle gaps are explained by them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from dask_gpurt.tracing.lane_names import CPU, FETCH, PHASE
from dask_gpurt.tracing.report.busy_time import Column, Coverage, crowded, late
from dask_gpurt.tracing.report.event_columns import Columns, is_barrier
from dask_gpurt.tracing.report.grouped_rows import GroupedRows

#: Kinds of segments: the work of the time, or the cause of the wait.
COMPUTING = "computing"
NETWORK = "network"
PEER = "waiting for receivers"
MEMORY = "waiting for memory"
DISK = "reading from disk"
THREAD = "waiting for a free thread"
WORKER = "event loops of workers"
HELD = "held by its worker"
SCHEDULER = "scheduler"
CLIENT = "client"

#: A worker with a free thread and all inputs takes at most this long to start a task. Longer, it
#: holds the task back: it is paused, or others have the resource. A busy event loop is slow, too.
PROMPT_S = 0.25
#: Events of the same moment, on two clocks, are at most this far apart.
SAME_S = 0.01
#: All threads of a busy worker run tasks at least once in such a time. Between two tasks, a thread
#: is free for a moment, and then no other task waits for it.
_OFTEN_S = 0.05
#: Tasks for each thread that Dask's queue lets a worker have (`worker-saturation`).
_SATURATION = 1.1
#: Just before a time.
_INSTANT_S = 1e-6
#: Fetched inputs that are looked at, to find the one that a task waited for.
_MAX_FETCHES = 256


class PathSegment(NamedTuple):
    """A period with one cause.

    Attributes
    ----------
    kind, where
        The cause, and for the network the two hosts.
    task
        Index of the task in the trace; -1 for the client's time.
    """

    kind: str
    where: str
    start_s: float
    end_s: float
    task: int


class Backwards:
    """Segments without a gap, from a time back to earlier ones."""

    def __init__(self, from_s: float) -> None:
        self.now_s = from_s
        self.task = -1
        self.segments: list[PathSegment] = []

    def to(self, time_s: float, kind: str, where: str = "") -> None:
        """Go back to a time. A later time than now, or one before 0, is the nearest possible."""
        time_s = max(min(float(time_s), self.now_s), 0.0)
        if time_s < self.now_s:
            self.segments.append(PathSegment(kind, where, time_s, self.now_s, self.task))
            self.now_s = time_s

    def divide(
        self, time_s: float, parts: Iterable[tuple[str, str, float]], rest: str, where: str = ""
    ) -> None:
        """Go back to a time. Each part (kind, where, seconds) gets what is left, at most."""
        for kind, place, seconds in parts:
            if seconds > 0 and self.now_s > time_s:
                self.to(max(self.now_s - seconds, time_s), kind, place)
        self.to(time_s, rest, where)


class TaskStories:
    """Tells the stories of the tasks of a trace."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._places = columns.places
        self._busy: dict[int, Coverage] = {}
        self._by_process = GroupedRows(columns.tasks.process)
        self._by_known = GroupedRows(columns.tasks.process, None, columns.tasks.known_s)
        tasks, work, hops = columns.tasks, columns.work, columns.hops
        self._networks: dict[tuple[float, float, int | None], list[tuple[str, str, float]]] = {}
        self._last: dict[int, int | None] = {}
        n_threads = sum(map(columns.n_threads, columns.places.workers))
        #: When all threads of all workers ran tasks.
        self._all_busy = crowded(tasks.start_s, tasks.free_s, n_threads)
        self._before = _previous(columns)
        self._is_barrier = [is_barrier(prefix) for prefix in tasks.prefixes]
        self._held = GroupedRows(work.process, columns.held_back, work.start_s)
        is_read = work.is_lane("read") | (work.is_lane(PHASE) & work.is_path("disk-read"))
        self._reads = GroupedRows(work.process, np.flatnonzero(is_read), work.start_s)
        # A store that writes values makes room for others.
        makes_room = work.is_lane("write") | work.is_lane("spill")
        makes_room |= work.is_lane(PHASE) & work.is_path("memory-room")
        self._making_room = GroupedRows(work.process, np.flatnonzero(makes_room))
        is_fetch = hops.kind == hops.kinds.index(FETCH)
        self._fetches = GroupedRows(hops.receiver, np.flatnonzero(is_fetch), hops.end_s)
        self._covered: dict[tuple[str, int], Coverage] = {}
        self._samples: dict[int, list[float]] = {}
        for sample in columns.trace.samples:
            if sample.name == CPU:
                self._samples.setdefault(sample.process, []).append(sample.at_s)
        messages = np.flatnonzero(~is_fetch)
        links = hops.source[messages].astype(np.int64) << 32 | hops.target[messages]
        self._links = {
            (int(link) >> 32, int(link) & 0xFFFFFFFF): Coverage(
                hops.start_s[rows], hops.wire_end_s[rows]
            )
            for link, rows in GroupedRows(links, labels=messages).items()
        }
        self._answers = Coverage(hops.wire_end_s[messages], hops.end_s[messages])

    def tell(self, i: int, back: Backwards) -> int | None:
        """Go back over the story of a task.

        Returns
        -------
        int or None
            The task whose end gave this one its thread, if that was waited for. The story goes back
            to that end, or until the scheduler knew of it. Without such a task, it goes back until
            all inputs were in memory.
        """
        tasks = self._columns.tasks
        back.task = i
        self._message(tasks.end_s[i], int(tasks.process[i]), back)
        self._while_running(i, back)
        holder = self._holder(i)
        freed_s = -1.0 if holder is None else float(tasks.free_s[holder])
        if self._until_start(i, back, freed_s):
            return holder
        self._until_here(i, back)
        return self._until_assigned(i, back)

    def last_input(self, i: int) -> int | None:
        """Return the task whose output, of all that a task needs, was there last."""
        if i not in self._last:
            tasks = self._columns.tasks
            made = [tasks.index[need] for need in tasks.needs[i] if need in tasks.index]
            self._last[i] = max(made, key=lambda j: float(tasks.known_s[j]), default=None)
        return self._last[i]

    def _holder(self, i: int) -> int | None:
        """Return the task that ran before on the thread of a task, if no other thread was free."""
        before = int(self._before[i])
        if before < 0:
            return None
        end_s = float(self._columns.tasks.free_s[before])
        covered = self._crowded(int(self._columns.tasks.process[i]))
        return before if covered.between(end_s - _OFTEN_S, end_s) > 0 else None

    def _while_running(self, i: int, back: Backwards) -> None:
        tasks = self._columns.tasks
        start_s, end_s = tasks.start_s[i], min(tasks.end_s[i], back.now_s)
        if self._is_barrier[tasks.prefix[i]]:
            # The barrier delivers what waits in outboxes, and asks the scheduler to tell workers.
            late = [(PEER, "", self._answers.between(start_s, end_s))]
            back.divide(start_s, [*self._network(start_s, end_s), *late], SCHEDULER)
            return
        for wait in reversed(self._waits_inside(i)):
            host = self._host(tasks.process[i])
            begin_s, until_s, is_read = wait
            back.to(until_s, COMPUTING)
            parts = [] if is_read else self._network(begin_s, min(until_s, back.now_s), host)
            back.divide(begin_s, parts, DISK if is_read else PEER)
        back.to(start_s, COMPUTING)

    def _waits_inside(self, i: int) -> list[tuple[float, float, bool]]:
        """Return the waits of a running task in order: start, end, and whether it read."""
        tasks, work = self._columns.tasks, self._columns.work
        start_s, end_s, number = tasks.start_s[i], tasks.end_s[i], tasks.number[i]
        found = []
        for grouped, is_read in ((self._held, False), (self._reads, True)):
            rows = grouped.within(int(tasks.process[i]), start_s, end_s)
            if not len(rows):
                continue
            mine = work.task[rows] == number
            if not is_read:
                # A wait without a task is of this one if its thread is.
                mine |= (work.task[rows] < 0) & (work.thread[rows] == tasks.thread[i])
            for row in rows[mine]:
                found.append((float(work.start_s[row]), float(work.end_s[row]), is_read))
        return sorted(found)

    def _until_start(self, i: int, back: Backwards, freed_s: float) -> bool:
        """All inputs are on the worker: it has no free thread, no room, or reads from disk.

        Return whether the task waited for the thread that was freed then.
        """
        tasks = self._columns.tasks
        now_s, process = back.now_s, int(tasks.process[i])
        is_held = bool(tasks.here_s[i] < freed_s <= now_s)
        here_s = freed_s if is_held else float(tasks.here_s[i])
        if now_s <= here_s:
            return is_held
        crowded_s = self._crowded(process).between(here_s, now_s)
        read_s = self._coverage("reads", self._reads, process).between(here_s, now_s)
        room_s = self._coverage("room", self._making_room, process).between(here_s, now_s)
        idle_s = now_s - here_s - crowded_s
        parts = [(THREAD, "", crowded_s), (DISK, "", min(read_s, idle_s))]
        rest = MEMORY if room_s > 0 else HELD if idle_s > PROMPT_S else WORKER
        back.divide(here_s, parts, rest)
        return is_held

    def _until_here(self, i: int, back: Backwards) -> None:
        """The worker gathers the inputs."""
        tasks, hops = self._columns.tasks, self._columns.hops
        assigned_s, here_s, process = tasks.assigned_s[i], back.now_s, int(tasks.process[i])
        if here_s <= assigned_s:
            return
        row = self._last_fetch(i, assigned_s, here_s)
        if row is None:
            source = self._elsewhere(i)
            if source is not None:
                back.to(assigned_s, NETWORK, self._link(source, process))
            else:
                # It may have waited at another worker, until this one took it over.
                taken_s = self._all_busy.between(assigned_s, here_s)
                back.to(here_s - taken_s, THREAD)
                self._message(assigned_s, process, back)
            return
        link = self._link(int(hops.sender[row]), process)
        back.to(max(hops.start_s[row], assigned_s), NETWORK, link)
        # Before, it waited for other fetches, or for the scheduler's message.
        others = self._fetching(process).between(assigned_s, back.now_s)
        back.divide(assigned_s, [(NETWORK, link, others)], SCHEDULER)

    def _until_assigned(self, i: int, back: Backwards) -> int | None:
        """The scheduler holds a task back until a worker has room for it.

        Return the task whose end made room.
        """
        tasks, process = self._columns.tasks, int(self._columns.tasks.process[i])
        full = self._full(process)
        ready_s = float(tasks.ready_s[i])
        ended = self._by_known.within(process, ready_s + _INSTANT_S, back.now_s + _INSTANT_S)
        if len(ended) and tasks.known_s[ended[-1]] >= back.now_s - _OFTEN_S:
            last, known_s = int(ended[-1]), float(tasks.known_s[ended[-1]])
            if full.between(known_s - _INSTANT_S, known_s) > 0:
                back.to(known_s, SCHEDULER)
                return last
        taken_s = full.between(ready_s, back.now_s)
        if full.between(back.now_s - _INSTANT_S, back.now_s) > 0:
            # No thread was free when it was assigned, so it had waited for none. A long wait was in
            # Dask's queue, which gives a worker a few tasks more than it has threads.
            taken_s = 0.0
            if back.now_s - ready_s > PROMPT_S:
                taken_s = self._full(process, _SATURATION).between(ready_s, back.now_s)
        back.divide(ready_s, [(THREAD, "", taken_s)], SCHEDULER)
        return None

    def _message(self, sent_s: float, process: int, back: Backwards) -> None:
        """A message goes between the scheduler and a worker; that may be too busy to handle it."""
        busy_s = self._blocked(process).between(float(sent_s), back.now_s)
        back.divide(sent_s, [(WORKER, "", busy_s)], SCHEDULER)

    def _last_fetch(self, i: int, assigned_s: float, here_s: float) -> int | None:
        """Return the fetch that brought the last input of a task; None if none is known."""
        tasks, hops = self._columns.tasks, self._columns.hops
        wanted = {int(tasks.number[i]), -1, *tasks.needs[i]}
        rows = self._fetches.within(int(tasks.process[i]), assigned_s, here_s + SAME_S)
        for row in rows[: -_MAX_FETCHES - 1 : -1]:
            if int(hops.task[row]) in wanted:
                return int(row)
        return None

    def _elsewhere(self, i: int) -> int | None:
        """Return a process that made an input of a task, if it is not the task's own."""
        tasks = self._columns.tasks
        made = [tasks.index[need] for need in tasks.needs[i] if need in tasks.index]
        others = [j for j in made if tasks.process[j] != tasks.process[i]]
        return int(tasks.process[max(others, key=lambda j: tasks.nbytes[j])]) if others else None

    def _network(
        self, start_s: float, end_s: float, host: int | None = None
    ) -> list[tuple[str, str, float]]:
        """Return the links that carried messages in a period, busiest first."""
        # The barrier of a shuffle is asked about for every thread that waited for it.
        key = start_s, end_s, host
        if key not in self._networks:
            self._networks[key] = self._links_between(*key)
        return self._networks[key]

    def _links_between(
        self, start_s: float, end_s: float, host: int | None
    ) -> list[tuple[str, str, float]]:
        parts = [
            (NETWORK, self._names(*link), covered.between(start_s, end_s))
            for link, covered in self._links.items()
            if host is None or link[0] == host
        ]
        return sorted((part for part in parts if part[2] > 0), key=lambda part: -part[2])

    def _host(self, process: int) -> int:
        return self._columns.hops.hosts.index(self._places.hosts[process])

    def _link(self, sender: int, receiver: int) -> str:
        return link_text(self._places.hosts[sender], self._places.hosts[receiver])

    def _names(self, source: int, target: int) -> str:
        hosts = self._columns.hops.hosts
        return link_text(hosts[source], hosts[target])

    def _crowded(self, process: int) -> Coverage:
        """Return when all threads of a worker ran tasks."""
        if process not in self._busy:
            tasks, rows = self._columns.tasks, self._by_process[process]
            n_threads = self._columns.n_threads(process)
            self._busy[process] = crowded(tasks.start_s[rows], tasks.free_s[rows], n_threads)
        return self._busy[process]

    def _full(self, process: int, saturation: float = 1.0) -> Coverage:
        """Return when a worker had `saturation` tasks for each thread, as the scheduler saw it."""
        name = f"full {saturation}"
        if (name, process) not in self._covered:
            tasks, rows = self._columns.tasks, self._by_process[process]
            n_tasks = math.ceil(saturation * self._columns.n_threads(process))
            self._covered[name, process] = crowded(
                tasks.assigned_s[rows], tasks.known_s[rows], n_tasks
            )
        return self._covered[name, process]

    def _blocked(self, process: int) -> Coverage:
        """Return when the event loop of a worker was busy: its regular samples came late."""
        if ("blocked", process) not in self._covered:
            self._covered["blocked", process] = late(np.array(self._samples.get(process, [])))
        return self._covered["blocked", process]

    def _fetching(self, process: int) -> Coverage:
        hops = self._columns.hops
        return self._cached("fetches", self._fetches, process, hops.start_s, hops.end_s)

    def _coverage(self, name: str, grouped: GroupedRows, process: int) -> Coverage:
        work = self._columns.work
        return self._cached(name, grouped, process, work.start_s, work.end_s)

    def _cached(
        self, name: str, grouped: GroupedRows, process: int, start_s: Column, end_s: Column
    ) -> Coverage:
        if (name, process) not in self._covered:
            rows = grouped[process]
            self._covered[name, process] = Coverage(start_s[rows], end_s[rows])
        return self._covered[name, process]


def _previous(columns: Columns) -> Column:
    """Return for each task the one that ended before it on its thread; -1 without one."""
    tasks = columns.tasks
    order = np.lexsort((tasks.start_s, tasks.thread, tasks.process))
    before, after = order[:-1], order[1:]
    is_same = tasks.process[before] == tasks.process[after]
    is_same &= tasks.thread[before] == tasks.thread[after]
    is_same &= tasks.free_s[before] <= tasks.start_s[after]
    found = np.full(len(tasks), -1)
    found[after[is_same]] = before[is_same]
    return found


def link_text(source: str, target: str) -> str:
    """Return the name of a link between hosts, or within one."""
    return f"within {source}" if source == target else f"{source} to {target}"
