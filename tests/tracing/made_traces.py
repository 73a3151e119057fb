"""Traces made by hand and by a small model of a shuffle, for tests of reports.

`MadeTrace` adds tasks and work with few words. `ModelledShuffle` plays a shuffle on a few workers
in virtual time: links that carry one message after the other, a bound on bytes in flight that holds
tasks back, a barrier, joins, and a last task that fetches its inputs.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from dask_gpurt.tracing.events import WORKER, LaneWork, LinkFacts, TaskTimes, Trace, TraceProcess
from dask_gpurt.tracing.lane_names import FETCH, PHASE, RECEIVE, SEND

MB = 1e6


class MadeTrace:
    """A trace that grows by calls. Worker `i` of host `h` has the address `tcp://h:i`."""

    def __init__(self, *workers: tuple[str, int], threads: int = 2) -> None:
        self.trace = Trace(
            [
                TraceProcess(f"tcp://{host}:{number}", f"{host}-{number}", host, WORKER, threads)
                for host, number in workers
            ]
        )
        self._thread = 0

    def task(
        self,
        key: str,
        process: int,
        ready_s: float,
        start_s: float,
        end_s: float,
        needs: tuple[int, ...] = (),
        assigned_s: float | None = None,
        here_s: float | None = None,
        known_s: float | None = None,
        thread: int | None = None,
        nbytes: int = 0,
        away_s: float = 0.0,
    ) -> int:
        """Add a task and return its number. Times that are not given leave no wait."""
        number = len(self.trace.tasks)
        here_s = start_s if here_s is None else here_s
        assigned_s = here_s if assigned_s is None else assigned_s
        known_s = end_s if known_s is None else known_s
        if thread is None:
            self._thread += 1
            thread = self._thread
        times = (ready_s, assigned_s, here_s, start_s, end_s, known_s)
        more = nbytes, thread, away_s
        self.trace.tasks.append(TaskTimes(number, key, process, needs, *times, *more))
        self.trace.wall_s = max(self.trace.wall_s, known_s)
        return number

    def work(
        self, process: int, lane: str, path: str, start_s: float, end_s: float, **more
    ) -> None:
        """Add work; `nbytes` and the rest by name."""
        nbytes = int(more.pop("nbytes", 0))
        self.trace.work.append(LaneWork(process, lane, path, nbytes, start_s, end_s, **more))
        self.trace.wall_s = max(self.trace.wall_s, end_s)

    def message(
        self,
        sender: int,
        receiver: int,
        start_s: float,
        arrived_s: float,
        nbytes: float,
        answered_s: float | None = None,
        way: str = "tcp",
    ) -> None:
        """Add both sides of a message."""
        number = len(self.trace.work) + 1
        answered_s = arrived_s if answered_s is None else answered_s
        for process, peer, path, begin_s, end_s in (
            (sender, receiver, SEND, start_s, answered_s),
            (receiver, sender, RECEIVE, arrived_s, answered_s),
        ):
            self.work(
                process,
                "communication",
                path,
                begin_s,
                end_s,
                nbytes=nbytes,
                peer=self.trace.processes[peer].address,
                way=way if path == SEND else "",
                run=1,
                message=number,
            )


@dataclass
class ModelledShuffle:
    """A shuffle on workers of a few hosts.

    Attributes
    ----------
    rates
        Bytes a second of the link between two hosts; `rate` for others.
    into
        Bytes a second that a host can receive from all others together.
    slowdown
        Factor for the tasks of a worker, by its index.
    weights
        Share of the rows of each output partition, relative to the others.
    in_flight_nbytes
        Bytes that may wait to be sent by one worker.
    """

    hosts: tuple[str, ...] = ("host1", "host2")
    workers_of_host: int = 2
    threads: int = 2
    n_inputs: int = 64
    n_outputs: int = 64
    input_nbytes: float = 64 * MB
    message_nbytes: float = 4 * MB
    rate: float = 1000 * MB
    rates: Mapping[tuple[str, str], float] = field(default_factory=dict)
    into: Mapping[str, float] = field(default_factory=dict)
    slowdown: Mapping[int, float] = field(default_factory=dict)
    weights: Mapping[int, float] = field(default_factory=dict)
    read_s: float = 0.30
    cut_s: float = 0.05
    join_s: float = 0.20
    in_flight_nbytes: float = 64 * MB
    facts: bool = True

    def trace(self) -> Trace:
        """Play the shuffle and return its trace."""
        return _Play(self).trace


class _Play:
    """The events of one play, in virtual time."""

    def __init__(self, model: ModelledShuffle) -> None:
        self._model = model
        self._now_s, self._turn = 0.05, 0
        self._events: list[tuple[float, int, Iterator[float]]] = []
        hosts = [host for host in model.hosts for _ in range(model.workers_of_host)]
        self._hosts = hosts
        self._made = MadeTrace(*((h, 4000 + i) for i, h in enumerate(hosts)), threads=model.threads)
        self.trace = self._made.trace
        self._free_s: dict[tuple[str, str], float] = {}
        self._answers: list[list[tuple[float, float]]] = [[] for _ in hosts]
        self._weight = [model.weights.get(j, 1.0) for j in range(model.n_outputs)]
        submitted_s = self._now_s
        transfers = self._all(self._transfers(w, submitted_s) for w in self._each_thread())
        barrier = self._barrier(transfers)
        joins = self._all(self._joins(w, barrier) for w in self._each_thread())
        self._sum(joins)
        self.trace.work.sort(key=lambda one: one.start_s)
        self.trace.tasks.sort(key=lambda one: one.start_s)
        self.trace.wall_s += 0.02
        self.trace.about = {"program": "shuffle.py", "settings": {"gpurt.shuffle.memory": 0.3}}
        if model.facts:
            self.trace.links = [
                LinkFacts(a, b, "tcp", model.rate)
                for a in model.hosts
                for b in model.hosts
                if a != b
            ]

    def _each_thread(self) -> list[tuple[int, int]]:
        return [(w, t) for w in range(len(self._hosts)) for t in range(self._model.threads)]

    def _all(self, threads) -> list[int]:
        """Let threads take turns by their time until all are done; return the tasks that ended."""
        self._ended: list[int] = []
        self._taken: dict[int, int] = {}
        for thread in threads:
            self._turn += 1
            heapq.heappush(self._events, (self._now_s, self._turn, thread))
        while self._events:
            self._now_s, _, thread = heapq.heappop(self._events)
            if (next_s := next(thread, None)) is not None:
                self._turn += 1
                heapq.heappush(self._events, (next_s, self._turn, thread))
        return self._ended

    def _next(self, worker: int, n: int) -> int | None:
        """Return the number of the next partition of a worker."""
        taken = self._taken.get(worker, worker)
        self._taken[worker] = taken + len(self._hosts)
        return taken if taken < n else None

    def _transfers(self, at: tuple[int, int], submitted_s: float) -> Iterator[float]:
        (worker, thread), model = at, self._model
        slowdown = model.slowdown.get(worker, 1.0)
        while self._next(worker, model.n_inputs) is not None:
            start_s = self._now_s
            assigned_s = max(start_s - 0.0005, submitted_s)
            yield start_s + model.read_s * slowdown
            read = self._made.task(
                "read-csv", worker, submitted_s, start_s, self._now_s, (), assigned_s, start_s,
                self._now_s + 0.001, thread + 1, int(model.input_nbytes),
            )  # fmt: skip
            ready_s = self._now_s + 0.001
            yield ready_s + 0.001
            start_s, number = self._now_s, len(self.trace.tasks)
            # The number is taken now: other threads add tasks while this one runs.
            self._made.task(
                "shuffle-transfer", worker, ready_s, start_s, start_s, (read,), ready_s, start_s,
                start_s, thread + 1,
            )  # fmt: skip
            yield start_s + model.cut_s * slowdown
            cut_s = self._now_s
            self._made.work(worker, PHASE, "partition", start_s, cut_s, run=1, task=number)
            yield from self._put_all(worker)
            if self._now_s > cut_s:
                self._made.work(worker, PHASE, "held_back", cut_s, self._now_s, run=1, task=number)
            end_s = self._now_s
            done = self.trace.tasks[number]._replace(end_s=end_s, known_s=end_s + 0.001)
            self.trace.tasks[number] = done
            self._ended.append(number)
            yield end_s + 0.0015

    def _put_all(self, worker: int) -> Iterator[float]:
        """Hand the shards of a partition to the outbox; wait while too many bytes are under way."""
        model = self._model
        for peer in range(len(self._hosts)):
            if peer == worker:
                continue
            share = sum(self._weight[peer :: len(self._hosts)]) / sum(self._weight)
            left = model.input_nbytes * share
            while left > 0:
                nbytes = min(left, model.message_nbytes)
                while (wait_s := self._full_until(worker, nbytes)) > self._now_s:
                    yield wait_s
                self._send(worker, peer, nbytes)
                left -= nbytes

    def _full_until(self, worker: int, nbytes: float) -> float:
        waiting = sorted(one for one in self._answers[worker] if one[0] > self._now_s)
        self._answers[worker] = waiting
        is_full = sum(one[1] for one in waiting) + nbytes > self._model.in_flight_nbytes
        return waiting[0][0] if is_full and waiting else 0.0

    def _send(self, worker: int, peer: int, nbytes: float) -> None:
        link = self._hosts[worker], self._hosts[peer]
        is_here = link[0] == link[1]
        rate = 4000 * MB if is_here else self._model.rates.get(link, self._model.rate)
        # All that a host receives from others may go through one link.
        name = (link[1], "") if link[1] in self._model.into and not is_here else link
        rate = self._model.into[link[1]] if name != link else rate
        free_s = max(self._free_s.get(name, 0.0), self._now_s)
        self._free_s[name] = arrived_s = free_s + nbytes / rate
        answered_s = arrived_s + 0.0005 + nbytes / (3000 * MB)
        self._answers[worker].append((answered_s, nbytes))
        way = "shared memory" if is_here else "tcp"
        self._made.message(worker, peer, self._now_s, arrived_s, nbytes, answered_s, way)

    def _barrier(self, transfers: list[int]) -> int:
        tasks = self.trace.tasks
        ready_s = max(tasks[i].known_s for i in transfers)
        delivered_s = max(s for answers in self._answers for s, _ in answers)
        end_s = max(delivered_s, ready_s) + 0.004
        self._now_s = end_s + 0.002
        return self._made.task(
            "shuffle-barrier", 0, ready_s, ready_s + 0.002, end_s, tuple(transfers),
            ready_s + 0.001, ready_s + 0.002, end_s + 0.001, 1,
        )  # fmt: skip

    def _joins(self, at: tuple[int, int], barrier: int) -> Iterator[float]:
        (worker, thread), model = at, self._model
        ready_s = self.trace.tasks[barrier].known_s
        mean = sum(self._weight) / model.n_outputs
        while (output := self._next(worker, model.n_outputs)) is not None:
            start_s, weight = self._now_s, self._weight[output] / mean
            yield start_s + model.join_s * weight * model.slowdown.get(worker, 1.0)
            number = self._made.task(
                "shuffle-p2p", worker, ready_s, start_s, self._now_s, (barrier,), ready_s + 0.001,
                ready_s + 0.001, self._now_s + 0.001, thread + 1, int(model.input_nbytes * weight),
            )  # fmt: skip
            self._made.work(worker, PHASE, "unpack", start_s, self._now_s, run=1, task=number)
            self._ended.append(number)
            yield self._now_s + 0.001

    def _sum(self, joins: list[int]) -> None:
        tasks, number = self.trace.tasks, len(self.trace.tasks)
        ready_s = max(tasks[i].known_s for i in joins)
        here_s = ready_s + 0.001
        for peer in range(1, len(self._hosts)):
            way, address = "tcp", self.trace.processes[peer].address
            fetched_s = here_s + 0.003
            self._made.work(
                0,
                FETCH,
                "fetch",
                here_s,
                fetched_s,
                nbytes=8000,
                peer=address,
                way=way,
                task=number,
            )
            here_s = fetched_s
        times = (ready_s + 0.001, here_s, here_s + 0.021, 1)
        self._made.task("sum", 0, ready_s, here_s, here_s + 0.02, tuple(joins), *times)
