"""A program that records traces: `python -m tests.memory.record_trace [NAME]`.

The traces go to `tests/data/traces`.

Each program runs on a real scheduler and two real workers of one thread. All are in this process,
so that one list has all events in order. Values are small, because only the ratios of their sizes
matter. Memory is unlimited, so that no eviction changes the trace.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from typing import Any

import dask
import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
from distributed import Client, LocalCluster, SchedulerPlugin, Worker, WorkerPlugin, wait

from tests.memory.traces import Event, Node, Trace, save


class Recorder(SchedulerPlugin):
    """A scheduler plugin that numbers tasks and collects the events of all workers."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.events: dict[str, list[Event]] = {}
        #: A key that is computed again is a new node, because it has another priority.
        self.current: dict[tuple[Any, Any], int] = {}
        self.latest: dict[Any, int] = {}

    def update_graph(self, scheduler: Any, *, tasks: Any, priority: Any, **_: Any) -> None:
        submitted = []
        for key in tasks:
            identity = (key, priority[key])
            if identity not in self.current:
                self.latest[key] = self.current[identity] = len(self.nodes)
                self.nodes.append(Node(0, priority[key], ()))
                submitted.append(self.latest[key])
        for key in tasks:
            node = self.latest[key]
            inputs = sorted(self.latest[dep.key] for dep in scheduler.tasks[key].dependencies)
            self.nodes[node] = self.nodes[node]._replace(inputs=tuple(inputs))
        self.tell("submit", *submitted)

    def transition(self, key: Any, start: str, finish: str, **_: Any) -> None:
        if finish == "queued":
            self.tell("hold", self.latest[key])

    def tell(self, kind: str, *nodes: int, but: str = "") -> None:
        """Add an event to the traces of all workers but one."""
        for address, events in self.events.items():
            if address != but:
                events.append(Event(kind, nodes))


class Watcher(WorkerPlugin):
    """A worker plugin that reports events to the recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.known: dict[Any, int] = {}

    def setup(self, worker: Worker) -> None:
        self.worker = worker
        self.events = self.recorder.events.setdefault(worker.address, [])

    def transition(self, key: Any, start: str, finish: str, **_: Any) -> None:
        recorder = self.recorder
        if start == "released" and finish in ("waiting", "fetch"):
            self.known[key] = recorder.latest[key]
        node = self.known[key]
        if finish == "waiting":
            self.tell("queue", node)
            self.tell_others("give", node)
        elif finish == "executing":
            self.tell("run", node)
        elif finish == "memory":
            nbytes = self.worker.state.tasks[key].nbytes
            assert nbytes is not None
            recorder.nodes[node] = recorder.nodes[node]._replace(nbytes=nbytes)
            # Of two workers, the peer that sent a value is the other one.
            self.tell_others("over" if start == "executing" else "send", node)
            self.tell("put", node)
            if start == "executing":
                self.tell("over", node)
        elif start == "memory":
            self.tell("release", node)
            self.tell_others("drop", node)

    def tell(self, kind: str, node: int) -> None:
        self.events.append(Event(kind, (node,)))

    def tell_others(self, kind: str, node: int) -> None:
        self.recorder.tell(kind, node, but=self.worker.address)


def array(*shape: int, chunks: Any) -> Any:
    return da.random.default_rng(7).random(shape, chunks=chunks)


def scan(client: Client) -> None:
    x = array(480_000, chunks=10_000).persist()
    wait(x)
    for _ in range(4):
        x.sum().compute()


def anomaly_held(client: Client) -> None:
    x = array(2_000, 1_000, chunks=(50, 500)).persist()
    wait(x)
    ((x - x.mean(0)) / x.std(0)).sum().compute()


def anomaly_made(client: Client) -> None:
    x = array(2_000, 1_000, chunks=(50, 500))
    ((x - x.mean(0)) / x.std(0)).sum().compute()


def dot(client: Client) -> None:
    a = array(600, 600, chunks=100)
    wait(da.dot(a, a.T).persist())


def merge(client: Client) -> None:
    def part(seed: int, column: str) -> pd.DataFrame:
        rng = np.random.default_rng(seed)
        return pd.DataFrame({"key": rng.integers(0, 20_000, 2_000), column: rng.random(2_000)})

    left = dd.from_map(part, range(12), column="left")
    right = dd.from_map(part, range(100, 112), column="right")
    with dask.config.set({"dataframe.shuffle.method": "tasks"}):
        wait(left.merge(right, on="key").persist())


def tree(client: Client) -> None:
    x = array(256, 10_000, chunks=(1, -1))
    x.sum(axis=0, split_every=2).compute()


def layers(client: Client) -> None:
    """A tree as well, each of its layers a graph of its own."""
    blocks = client.map(lambda seed: np.random.default_rng(seed).random(10_000), range(256))
    while len(blocks) > 1:
        blocks = client.map(operator.add, blocks[::2], blocks[1::2])
    wait(blocks)


def overlap(client: Client) -> None:
    x = array(1_000, 1_000, chunks=125).persist()
    wait(x)
    x.map_overlap(lambda block: block + 1, depth=5).map_overlap(np.abs, depth=5).sum().compute()


def steps(client: Client) -> None:
    """Run steps as in a notebook, holding every result."""
    held = [array(240_000, chunks=10_000).persist()]
    for _ in range(4):
        wait(held[-1])
        held.append((held[-1] * 2 + 1).persist())
    wait(held[-1])
    held[-1].sum().compute()


PROGRAMS: dict[str, Callable[[Client], None]] = {
    program.__name__: program
    for program in (scan, anomaly_held, anomaly_made, dot, merge, tree, layers, overlap, steps)
}


def record(program: Callable[[Client], None]) -> list[Trace]:
    """Run a program; return the events by worker."""
    recorder = Recorder()
    with LocalCluster(
        n_workers=2,
        threads_per_worker=1,
        processes=False,
        memory_limit=0,
        dashboard_address=":0",
    ) as cluster:
        cluster.scheduler.add_plugin(recorder)
        for worker in cluster.workers.values():
            cluster.sync(worker.plugin_add, Watcher(recorder), name="watcher")
        with Client(cluster) as client:
            program(client)
            traces = [Trace(recorder.nodes, list(e)) for e in recorder.events.values()]
    return traces


def main() -> None:
    for name in sys.argv[1:] or PROGRAMS:
        traces = record(PROGRAMS[name])
        save(name, traces)
        print(name, [(len(trace.events), trace.peak_nbytes()) for trace in traces], flush=True)


if __name__ == "__main__":
    main()
