"""The events of a trace as columns of NumPy, and the messages as transfers between hosts.

All parts of the report work on these columns. Names are replaced by numbers once, here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np

from dask_gpurt.devices.ledger import COMMUNICATION, COMPUTE, WAITING
from dask_gpurt.errors import TraceFileError
from dask_gpurt.tracing.amounts import name_text
from dask_gpurt.tracing.events import DEVICE, WORKER, Trace, TraceProcess
from dask_gpurt.tracing.lane_names import FETCH, NOT_SENDS, PHASE, RECEIVE, RELAY, SEND
from dask_gpurt.tracing.report.busy_time import Column

#: Kinds of hops: a message of a shuffle, and one that a relay hands on to its receiver.
MESSAGE, RELAYED = "message", "relayed"
#: Transports whose messages have arrived in full when the receiver begins to take them in. With
#: others, the receiver moves the bytes.
STREAMED = frozenset({"comm", "tcp", "tls", "ws", "wss"})

#: The part of a key after its prefix: numbers, hashes, and what follows in a tuple.
# A part can match in one way only: other patterns take exponential time for long keys.
_SUFFIX = re.compile(r"(?:-(?:[0-9a-f]{6,}(?:-[0-9a-f]+)*+|\d{1,5}(?![0-9a-f])))*+(?:[',].*)?$")


def prefix_of(key: str) -> str:
    """Return the prefix of a key; a prefix stays as it is."""
    return name_text(_SUFFIX.sub("", key.lstrip("('")) or key)


def _column(events: Sequence[Any], name: str, kind: type[np.generic]) -> Column:
    """Return one attribute of all events.

    Raises
    ------
    TraceFileError
        It is not a number of this kind in some event, as in a damaged file.
    """
    try:
        return np.fromiter(map(attrgetter(name), events), kind, len(events))
    except (OverflowError, TypeError, ValueError) as error:
        raise TraceFileError(f"the trace is damaged: {name} of some event: {error}") from error


def _numbered(values: Iterable[str], n: int) -> tuple[Column, list[str]]:
    """Return a number for each value, and the values by number."""
    numbers: dict[str, int] = {}
    column = np.fromiter((numbers.setdefault(one, len(numbers)) for one in values), np.int32, n)
    return column, list(numbers)


class WorkColumns:
    """Columns of `Trace.work`.

    `lane`, `path` and `way` have numbers into `lanes`, `paths` and `ways`. `peer` is the index of
    the other process in `Places.hosts`; -1 without one.
    """

    def __init__(self, trace: Trace, places: Places) -> None:
        work, n = trace.work, len(trace.work)
        self.process = _column(work, "process", np.int32)
        self.nbytes = _column(work, "nbytes", np.float64)
        self.encoded_nbytes = _column(work, "encoded_nbytes", np.float64)
        self.start_s = _column(work, "start_s", np.float64)
        self.end_s = _column(work, "end_s", np.float64)
        self.message = _column(work, "message", np.int64)
        self.task = _column(work, "task", np.int64)
        self.thread = _column(work, "thread", np.uint64)
        self.lane, self.lanes = _numbered((one.lane for one in work), n)
        self.path, self.paths = _numbered((one.path for one in work), n)
        self.way, self.ways = _numbered((one.way for one in work), n)
        self.peer = np.fromiter((places.index(one.peer) for one in work), np.int32, n)

    def is_lane(self, name: str) -> Column:
        """Return which work is of a lane."""
        return np.equal(self.lane, self.lanes.index(name) if name in self.lanes else -1)

    def is_path(self, name: str) -> Column:
        """Return which work is of a path."""
        return np.equal(self.path, self.paths.index(name) if name in self.paths else -1)


class TaskColumns:
    """Columns of `Trace.tasks`. `prefix` has numbers into `prefixes`."""

    def __init__(self, trace: Trace) -> None:
        tasks, n = trace.tasks, len(trace.tasks)
        self.process = _column(tasks, "process", np.int32)
        self.ready_s = _column(tasks, "ready_s", np.float64)
        self.submitted_s = _column(tasks, "submitted_s", np.float64)
        self.assigned_s = _column(tasks, "assigned_s", np.float64)
        self.here_s = _column(tasks, "here_s", np.float64)
        self.start_s = _column(tasks, "start_s", np.float64)
        self.end_s = _column(tasks, "end_s", np.float64)
        #: When it left its thread: at its end, or before.
        self.free_s = self.end_s - _column(tasks, "away_s", np.float64)
        self.known_s = _column(tasks, "known_s", np.float64)
        self.nbytes = _column(tasks, "nbytes", np.float64)
        self.thread = _column(tasks, "thread", np.uint64)
        self.number = _column(tasks, "number", np.int64)
        self.needs = [one.needs for one in tasks]
        known: dict[str, str] = {}
        prefixes = (known.get(t.key) or known.setdefault(t.key, prefix_of(t.key)) for t in tasks)
        self.prefix, self.prefixes = _numbered(prefixes, n)
        self.index = {int(number): i for i, number in enumerate(self.number)}

    def __len__(self) -> int:
        return len(self.needs)


class Places:
    """Hosts and names of processes. A peer that is not in the trace gets a number after them."""

    def __init__(self, trace: Trace) -> None:
        self.names = [_name_of(one) for one in trace.processes]
        self.hosts = [one.host or _host_in(one.address) for one in trace.processes]
        self.n_processes = len(self.names)
        self.devices = [i for i, one in enumerate(trace.processes) if one.kind == DEVICE]
        self.workers = [i for i, one in enumerate(trace.processes) if one.kind == WORKER]
        self._index = {one.address: i for i, one in enumerate(trace.processes)}
        self._index[""] = -1

    def index(self, address: str) -> int:
        """Return the number of a process by its address."""
        found = self._index.get(address)
        if found is None:
            found = self._index[address] = len(self.hosts)
            self.hosts.append(_host_in(address))
            self.names.append(name_text(address))
        return found


def _name_of(process: TraceProcess) -> str:
    """Return a short name. Clusters on one machine number their workers."""
    name = process.name or process.address
    return f"{process.kind} {name}" if name.isdigit() else name_text(name)


def _host_in(address: str) -> str:
    return address.rpartition("://")[2].rpartition(":")[0] or address


@dataclass
class Hops:
    """Columns of bytes that went from one worker to another: messages and fetched outputs.

    Attributes
    ----------
    kind
        Numbers into `kinds`: `MESSAGE`, `RELAYED`, `FETCH`, or the name of another lane.
    sender, receiver
        Indices of processes.
    source, target
        Numbers of their hosts in `hosts`.
    nbytes
        Bytes on the link: of encoded messages, those after encoding.
    wire_end_s
        The last byte had arrived.
    end_s
        The receiver had answered.
    n_unreceived
        Messages that were sent and have no receive in the trace.
    """

    hosts: list[str]
    kinds: list[str]
    kind: Column
    sender: Column
    receiver: Column
    source: Column
    target: Column
    way: Column
    nbytes: Column
    start_s: Column
    wire_end_s: Column
    end_s: Column
    task: Column
    n_unreceived: int


def hops_of(work: WorkColumns, places: Places) -> Hops:
    """Return messages and fetches, each once, though both of its ends may have recorded it."""
    has_peer = work.peer >= 0
    is_message = work.is_lane(COMMUNICATION) & (work.is_path(SEND) | work.is_path(RELAY))
    # Both ends of a fetch may be recorded. The receiver knows how long it waited.
    is_fetch = work.is_lane(FETCH) & ~work.is_path(SEND)
    is_other = ~(work.is_lane(COMMUNICATION) | work.is_lane(FETCH))
    for path in NOT_SENDS:
        is_other &= ~work.is_path(path)
    rows = np.flatnonzero(has_peer & (is_message | is_fetch | is_other))
    kinds = [MESSAGE, RELAYED, FETCH, *work.lanes]
    kind = work.lane[rows] + 3
    kind[is_message[rows]] = np.where(work.is_path(SEND)[rows], 0, 1)[is_message[rows]]
    kind[is_fetch[rows]] = 2
    wire_end_s, n_unreceived = _arrivals(work, rows)
    sender = np.where(is_fetch[rows], work.peer[rows], work.process[rows])
    receiver = np.where(is_fetch[rows], work.process[rows], work.peer[rows])
    host_of, hosts = _numbered(places.hosts, len(places.hosts))
    return Hops(
        hosts=hosts,
        kinds=kinds,
        kind=kind,
        sender=sender,
        receiver=receiver,
        source=host_of[sender],
        target=host_of[receiver],
        way=work.way[rows],
        nbytes=np.where(work.encoded_nbytes, work.encoded_nbytes, work.nbytes)[rows],
        start_s=work.start_s[rows],
        wire_end_s=wire_end_s,
        end_s=work.end_s[rows],
        task=work.task[rows],
        n_unreceived=n_unreceived,
    )


def _arrivals(work: WorkColumns, rows: Column) -> tuple[Column, int]:
    """Return when the last byte of each hop had arrived, and how many messages have no receive.

    A send lasts until the answer. The receiver's work and its wait for memory are no time of the
    link, so the receiver's own record ends the transfer.
    """
    end_s = work.end_s[rows].copy()
    receives = np.flatnonzero(work.is_path(RECEIVE) & (work.message > 0) & (work.peer >= 0))
    numbered = work.message[rows] > 0
    if not len(receives) or not numbered.any():
        return end_s, int(numbered.sum())
    of_send = work.process[rows].astype(np.int64) << 40 | work.message[rows]
    of_receive = work.peer[receives].astype(np.int64) << 40 | work.message[receives]
    order = np.argsort(of_receive, kind="stable")
    at = np.searchsorted(of_receive[order], of_send).clip(max=len(order) - 1)
    match = receives[order[at]]
    is_matched = numbered & (of_receive[order[at]] == of_send)
    is_streamed = np.isin(work.way[rows], [i for i, w in enumerate(work.ways) if w in STREAMED])
    arrived_s = np.where(is_streamed, work.start_s[match], work.end_s[match])
    # Clocks differ a little: an arrival outside of its send says nothing.
    is_usable = is_matched & (arrived_s > work.start_s[rows]) & (arrived_s < end_s)
    end_s[is_usable] = arrived_s[is_usable]
    return end_s, int((numbered & ~is_matched).sum())


def is_barrier(prefix: str) -> bool:
    """Return whether tasks of a prefix end the transfers of shuffles. They wait, and do no work."""
    return "barrier" in prefix


class Columns:
    """All columns of a trace.

    Attributes
    ----------
    held_back
        Rows of work in which a task waited until a peer took its shards.
    working_s
        Seconds of each task without these waits.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.places = Places(trace)
        self.work = WorkColumns(trace, self.places)
        self.tasks = TaskColumns(trace)
        self.hops = hops_of(self.work, self.places)
        self._threads: dict[int, int] = {}
        self.held_back = self._rows_held_back()
        self.working_s = self._working_s()
        ends = (column for column in (self.work.end_s, self.tasks.known_s) if len(column))
        self.wall_s = trace.wall_s or max((float(column.max()) for column in ends), default=0.0)

    def n_threads(self, process: int) -> int:
        """Return the threads of a worker; those seen, if it did not say."""
        if process not in self._threads:
            seen = self.tasks.thread[self.tasks.process == process]
            said = self.trace.processes[process].n_threads
            self._threads[process] = said or len(np.unique(seen))
        return self._threads[process]

    def life_s(self, process: int) -> tuple[float, float]:
        """Return when a worker came, and when it left: the begin and the end of the trace."""
        found = self.trace.processes[process]
        left_s = self.wall_s if found.left_s is None else min(found.left_s, self.wall_s)
        return min(found.joined_s, left_s), left_s

    def threads_s(self, process: int) -> float:
        """Return the seconds that the threads of a worker had."""
        joined_s, left_s = self.life_s(process)
        return self.n_threads(process) * (left_s - joined_s)

    def _rows_held_back(self) -> Column:
        """Return the rows of work in which a task waited until a peer took its shards."""
        work = self.work
        in_phase = np.flatnonzero(work.is_lane(PHASE) & work.is_path("held_back"))
        # The ledger has the same waits, without the task.
        if len(in_phase):
            return in_phase
        return np.flatnonzero(work.is_lane(COMPUTE) & work.is_path(WAITING))

    def _working_s(self) -> Column:
        """Return the seconds of each task without its waits for peers."""
        tasks, work, rows = self.tasks, self.work, self.held_back
        working_s = tasks.free_s - tasks.start_s
        working_s[np.array([is_barrier(one) for one in tasks.prefixes], bool)[tasks.prefix]] = 0.0
        index = tasks.index
        held = np.fromiter((index.get(int(n), -1) for n in work.task[rows]), np.int64, len(rows))
        waits_s = (work.end_s - work.start_s)[rows]
        known = held >= 0
        working_s -= np.bincount(held[known], waits_s[known], minlength=len(tasks))
        return working_s.clip(min=0.0)
