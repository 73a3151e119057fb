"""A trace with the mix of events that a shuffle of a dataframe has."""

from __future__ import annotations

import random

from dask_gpurt.tracing.events import (
    WORKER,
    Instant,
    LaneWork,
    Sample,
    TaskTimes,
    Trace,
    TraceProcess,
)
from dask_gpurt.tracing.formats.picture import work_order
from dask_gpurt.tracing.lane_names import FETCH, PHASE, RECEIVE, SEND


def shuffle_trace(
    n_partitions: int, n_workers: int = 4, n_threads: int = 2, seed: int = 0
) -> Trace:
    """Return a trace with the mix of events that a shuffle of a dataframe has.

    The mix, the durations and the sizes are those of a ledger and a task stream, recorded at a
    shuffle of `dask.datasets.timeseries` on two workers. Each event differs from all others.
    """
    return _Shuffle(n_workers, n_threads, random.Random(seed)).traced(n_partitions)


class _Shuffle:
    """Makes the events of a shuffle, one after the other on each thread."""

    def __init__(self, n_workers: int, n_threads: int, chance: random.Random) -> None:
        self.n_workers, self.n_threads, self.chance = n_workers, n_threads, chance
        self.addresses = [f"tcp://10.0.0.{one}:{40000 + one}" for one in range(n_workers)]
        self.threads = [[self.thread() for _ in range(n_threads)] for _ in self.addresses]
        self.loops = [self.thread() for _ in self.addresses]
        self.now_s = {(w, t): 0.0 for w in range(n_workers) for t in range(n_threads)}
        self.n_messages = [0] * n_workers
        self.trace = Trace(
            [
                TraceProcess(address, f"w{i}", f"node{i}", WORKER, n_threads)
                for i, address in enumerate(self.addresses)
            ],
            began_utc_s=1.8e9,
        )

    def thread(self) -> int:
        """Return a number such as pthreads have."""
        return 140_000_000_000_000 + self.chance.randrange(10**12) * 64

    def lasts(self, mean_s: float) -> float:
        return self.chance.expovariate(1 / mean_s)

    def spend(self, where: tuple[int, int], mean_s: float) -> tuple[float, float]:
        """Return the start and the end of the next event of a thread."""
        start_s = round(self.now_s[where] + self.lasts(mean_s) / 5, 9)
        self.now_s[where] = round(start_s + self.lasts(mean_s), 9)
        return start_s, self.now_s[where]

    def run(
        self, key: str, needs: tuple[int, ...], where: tuple[int, int], mean_s: float
    ) -> TaskTimes:
        """Add a task, and what the ledger has of it."""
        start_s, end_s = self.spend(where, mean_s)
        here_s = round(start_s - self.lasts(1e-3), 9)
        assigned_s = round(here_s - self.lasts(1e-2), 9)
        task = TaskTimes(
            number=len(self.trace.tasks),
            key=key,
            process=where[0],
            needs=needs,
            ready_s=round(assigned_s - self.lasts(1e-4), 9),
            assigned_s=assigned_s,
            here_s=here_s,
            start_s=start_s,
            end_s=end_s,
            known_s=round(end_s + self.lasts(5e-4), 9),
            nbytes=self.chance.randrange(390_000, 410_000),
            thread=self.threads[where[0]][where[1]],
        )
        self.trace.tasks.append(task)
        # The ledger's clock is read a little later than the scheduler's.
        late_s = self.chance.random() / 1e5
        times = (round(at_s + late_s, 9) for at_s in (start_s, end_s))
        entry = task.process, "compute", key, task.nbytes, *times
        self.trace.work.append(LaneWork(*entry, task=task.number, thread=task.thread))
        return task

    def part(self, task: TaskTimes, path: str, from_: float, to: float) -> None:
        """Add a part of the shuffle inside of a task."""
        length_s = task.end_s - task.start_s
        times = (round(task.start_s + length_s * share, 9) for share in (from_, to))
        about = {"run": 1, "task": task.number, "thread": task.thread}
        self.trace.work.append(LaneWork(task.process, PHASE, path, 0, *times, **about))

    def send(self, sender: int, at_s: float) -> None:
        """Add a message to another worker, at both ends."""
        target = (sender + self.chance.randrange(1, self.n_workers)) % self.n_workers
        self.n_messages[sender] += 1
        nbytes = self.chance.randrange(50_000, 800_000)
        sent_s = round(at_s + self.lasts(0.003), 9)
        came_s = round(at_s + self.chance.random() * (sent_s - at_s), 9)
        taken_s = round(came_s + self.lasts(2e-4), 9)
        for process, peer, path, start_s, end_s in (
            (sender, target, SEND, at_s, sent_s),
            (target, sender, RECEIVE, came_s, taken_s),
        ):
            about = {"run": 1, "message": self.n_messages[sender], "thread": self.loops[process]}
            lane = process, "communication", path, nbytes, start_s, end_s, self.addresses[peer]
            self.trace.work.append(LaneWork(*lane, "tcp", **about))

    def fetch(self, source: TaskTimes, where: tuple[int, int]) -> None:
        """Add the transfer of an output to the worker of the next task."""
        at_s = round(source.end_s + 1e-4, 9)
        self.now_s[where] = max(self.now_s[where], at_s + 2e-3)
        times = at_s, round(at_s + 1e-3, 9)
        about = {"peer": self.addresses[source.process], "way": "tcp"}
        work = LaneWork(where[0], FETCH, "get_data", source.nbytes, *times, **about)
        self.trace.work.append(work._replace(task=len(self.trace.tasks)))

    def traced(self, n_partitions: int) -> Trace:
        """Add all events of a shuffle, and return the trace."""
        transfers = [self.write_partition(number) for number in range(n_partitions)]
        barrier = self.run("shuffle-barrier", tuple(transfers), (0, 0), 0.002)
        self.now_s = dict.fromkeys(self.now_s, max(self.now_s.values()))
        for number in range(n_partitions):
            self.read_partition(number, barrier)
        trace = self.trace
        trace.wall_s = max(self.now_s.values())
        self.sample()
        trace.instants += [Instant(0, "evicted", 0.5, "timeseries"), Instant(1, "restart", 0.7)]
        if self.n_workers == 1:
            trace.instants.pop()
        trace.work.sort(key=work_order)
        trace.tasks.sort(key=lambda one: one.start_s)
        trace.samples.sort(key=lambda one: one.at_s)
        return trace

    def place(self, number: int) -> tuple[int, int]:
        return number % self.n_workers, number // self.n_workers % self.n_threads

    def write_partition(self, number: int) -> int:
        where = self.place(number)
        task = self.run("timeseries", (), where, 0.008)
        for key in ("to_string_dtype", "operation", "shuffle-transfer"):
            task = self.run(key, (task.number,), where, 0.004)
        self.part(task, "partition", 0.0, 0.7)
        self.part(task, "held_back", 0.8, 0.81)
        if self.n_workers > 1 and self.chance.random() < 0.64:
            self.send(where[0], round(task.end_s + self.chance.random() / 100, 9))
        return task.number

    def read_partition(self, number: int, barrier: TaskTimes) -> None:
        where = self.place(number)
        task = self.run("p2pshuffle", (barrier.number,), where, 0.006)
        self.part(task, "unpack", 0.0, 0.9)
        if self.n_workers > 1 and self.chance.random() < 0.1:
            where = (where[0] + 1) % self.n_workers, where[1]
            self.fetch(task, where)
        for key in ("len", "chunk"):
            task = self.run(key, (task.number,), where, 0.0005)

    def sample(self) -> None:
        for step in range(int(self.trace.wall_s / 0.1)):
            for process in range(self.n_workers):
                at_s = round(step / 10 + process / 1000, 9)
                for name in ("bytes of outputs", "bytes of shards", "waiting bytes"):
                    value = float(self.chance.randrange(10**8))
                    self.trace.samples.append(Sample(process, name, at_s, value))
                share = round(self.chance.random() * 2, 3)
                self.trace.samples.append(Sample(process, "cpu", at_s, share))
