"""The contents of a trace, as plain records on one clock.

Times are seconds since the start of the trace, on the scheduler's clock. `plugins.tracing` records
the events, and `tracing.merge` brings the clocks of workers together. Writers and readers turn a
`Trace` into a file and back. Reports are made from a `Trace` alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

#: Kinds of a `TraceProcess`.
WORKER, SCHEDULER, DEVICE = "worker", "scheduler", "device"
#: In `Trace.about`: the memory limit of each worker in bytes, by its address; 0 without a limit.
MEMORY_LIMITS = "memory_limits"


@dataclass(frozen=True)
class TraceProcess:
    """One process of the cluster, or a device that a foreign trace describes.

    Attributes
    ----------
    kind
        `WORKER`, `SCHEDULER` or `DEVICE`.
    counters
        Growth of the worker's counters during the trace (`metrics.MEANING`).
    n_dropped
        Events that were not recorded, because there were too many.
    ended
        Why the recording ended early, for example "limit of 1.0 GiB"; empty if it did not.
    clock_error_s
        The largest error of times from this process, compared with the scheduler's clock.
    joined_s, left_s
        When a worker came after the start of the trace, and when it left before the end.
    """

    address: str
    name: str
    host: str
    kind: str = WORKER
    n_threads: int = 0
    counters: dict[str, int] = field(default_factory=dict)
    n_dropped: int = 0
    ended: str = ""
    clock_error_s: float = 0.0
    joined_s: float = 0.0
    left_s: float | None = None


class LaneWork(NamedTuple):
    """One piece of work of one lane: a message, a copy, a write to disk, a kernel.

    Attributes
    ----------
    process
        Index in `Trace.processes`.
    lane, path
        As in the ledger: the lane or stream that did the work, and the kind of work.
    nbytes
        Bytes moved; 0 if none.
    peer
        Address of the other worker, for messages.
    way
        The transport, for example "tcp", "shared memory" or "ucx"; for copies of a device, "pinned"
        or "pageable".
    run
        Number of the shuffle run; 0 outside of runs.
    message
        Number of the message, counted by its sender; 0 without one. Sender and number identify the
        message on both sides.
    task
        `TaskTimes.number` of the task that did the work, or that the work is for; -1 without one.
    thread
        Identifier of the thread in its process; 0 if unknown.
    encoded_nbytes
        Bytes of a message on the link; 0 if it was not encoded.
    """

    process: int
    lane: str
    path: str
    nbytes: int
    start_s: float
    end_s: float
    peer: str = ""
    way: str = ""
    run: int = 0
    message: int = 0
    task: int = -1
    thread: int = 0
    encoded_nbytes: int = 0


class TaskTimes(NamedTuple):
    """One execution of one task.

    Attributes
    ----------
    number
        Unique in the trace.
    key
        Prefix of the key, or the whole key if the user asked for it. Keys may hold user data.
    process
        Index of the worker in `Trace.processes`.
    needs
        Numbers of the tasks whose outputs it needs.
    ready_s
        All inputs were in memory somewhere in the cluster.
    assigned_s
        The scheduler sent it to this worker.
    here_s
        All inputs were in the memory of this worker.
    start_s, end_s
        It ran.
    known_s
        The scheduler knew the result.
    nbytes
        Size of the output.
    thread
        Identifier of the thread in its process.
    away_s
        Seconds until its end in which it had left its thread, as tasks with `worker_client` do.
    submitted_s
        The scheduler had the client's graph with this task, to a millisecond; 0 if before the
        trace. Tasks of one graph have the same time.
    """

    number: int
    key: str
    process: int
    needs: tuple[int, ...]
    ready_s: float
    assigned_s: float
    here_s: float
    start_s: float
    end_s: float
    known_s: float
    nbytes: int = 0
    thread: int = 0
    away_s: float = 0.0
    submitted_s: float = 0.0


class Instant(NamedTuple):
    """Something that happened at one time: an eviction, a restart of a run, a lost worker."""

    process: int
    name: str
    at_s: float
    detail: str = ""


class Sample(NamedTuple):
    """A sample of a quantity over time, such as the bytes of a tier. Bytes, shares or rates."""

    process: int
    name: str
    at_s: float
    value: float


class LinkFacts(NamedTuple):
    """Known facts of the link between two hosts, or between two tiers of one host.

    Attributes
    ----------
    source, target
        Hosts, or names of tiers.
    way
        The transport, as in `LaneWork`; empty if it is the same for all transports.
    bandwidth
        The most that the link can carry, in bytes a second; 0 if unknown.
    """

    source: str
    target: str
    way: str
    bandwidth: float


@dataclass
class Trace:
    """All events of a cluster in a period, on one clock.

    Attributes
    ----------
    work, tasks
        Ordered by their start.
    instants, samples
        Ordered by their time.
    began_utc_s
        The time 0 of the trace, in seconds since 1970.
    wall_s
        Length of the trace.
    about
        Versions, settings and the program, as values that JSON can hold.
    """

    processes: list[TraceProcess]
    work: list[LaneWork] = field(default_factory=list)
    tasks: list[TaskTimes] = field(default_factory=list)
    instants: list[Instant] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    links: list[LinkFacts] = field(default_factory=list)
    began_utc_s: float = 0.0
    wall_s: float = 0.0
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def n_events(self) -> int:
        """Number of all events, of any kind."""
        return len(self.work) + len(self.tasks) + len(self.instants) + len(self.samples)
