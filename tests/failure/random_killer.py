"""Kills a random worker at a random point of real joins, again and again; every answer is right.

Random, but not in time: the seed says which query, which kind of event, which of them, and who
dies. Every event of a shuffle on any worker is reported to this process, and goes on only once it
was counted.

    python -m tests.failure.random_killer --runs 50 --transport ucx
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import dask
import pandas as pd
from distributed import Client, LocalCluster, WorkerPlugin

import dask_gpurt
from dask_gpurt.demo import tpch_data, tpch_queries, tpch_sql
from dask_gpurt.demo.answers import assert_same_answer
from dask_gpurt.demo.material import connect_views
from tests.failure import gates
from tests.failure.gates import DEADLINE_S
from tests.failure.leftovers import assert_nothing_left
from tests.failure.stage import NEVER_GIVE_UP

N_WORKERS = 3
SCALE = 0.02
#: Joins with several shuffles each, some of them outer or semi joins.
QUERIES = (3, 4, 5, 7, 9, 10, 13, 18)

SETTINGS = NEVER_GIVE_UP | {
    # A merge of small tables would not shuffle otherwise.
    "dataframe.shuffle.method": "p2p",
    "gpurt.strict": True,
    # Some shards are on disk as well when it happens.
    "gpurt.shuffle.memory": "1 MiB",
}


def report(path: str, point: str) -> None:
    """Say that a worker has come to a point; return when it may go on."""
    with contextlib.suppress(ConnectionError, FileNotFoundError):
        with socket.socket(socket.AF_UNIX) as conn:
            conn.connect(path)
            conn.sendall(point.encode())
            conn.shutdown(socket.SHUT_WR)
            conn.recv(1)


class Reports(WorkerPlugin):
    """Has a worker report every event, and every worker that comes in place of a killed one."""

    name = "reports"

    def __init__(self, path: str) -> None:
        self.path = path

    async def setup(self, worker: Any) -> None:
        # A joining worker sets its plugins up at the same time, in any order.
        while "shuffle" not in worker.plugins:
            await asyncio.sleep(0)
        for point in gates.POINTS:
            gates.before(worker, point, partial(report, self.path, point))


@dataclass(frozen=True)
class Kill:
    """The `nth` event of a kind kills the worker `victim`, counted in order of their names."""

    point: str
    nth: int
    victim: int


class Killer:
    """Counts events, and kills when it is time."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="killer-")
        self.path = os.path.join(self._directory.name, "reports")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen(128)
        self._lock = threading.Lock()
        self._pids: list[int] = []
        self._plan: Kill | None = None
        self.counts: Counter[str] = Counter()
        self.killed: int | None = None
        threading.Thread(target=self._serve, daemon=True).start()

    def arm(self, plan: Kill | None, pids: list[int]) -> None:
        """Count from zero, and act on this plan."""
        with self._lock:
            self.counts.clear()
            self.killed = None
            self._plan, self._pids = plan, pids

    def _serve(self) -> None:
        while True:
            try:
                conn, _ = self._listener.accept()
            except OSError:
                return
            with conn, contextlib.suppress(ConnectionError):
                self._count(conn.recv(64).decode())

    def _count(self, point: str) -> None:
        with self._lock:
            self.counts[point] += 1
            plan = self._plan
            if plan and plan.point == point and plan.nth == self.counts[point]:
                self.killed = self._pids[plan.victim]
                os.kill(self.killed, signal.SIGKILL)

    def close(self) -> None:
        self._listener.close()
        self._directory.cleanup()


@dataclass
class Outcome:
    """What came of one run."""

    seed: int
    query: int
    plan: Kill
    n_shuffles: int
    n_runs: int
    seconds: float

    def __str__(self) -> str:
        plan = self.plan
        return (
            f"seed {self.seed}: Q{self.query}, worker {plan.victim} killed at {plan.point} "
            f"{plan.nth}: right answer in {self.seconds:.1f} s, {self.n_runs} runs of "
            f"{self.n_shuffles} shuffles"
        )


class Arena:
    """A cluster of processes, the tables, and the answers of another engine."""

    def __init__(self, client: Client, killer: Killer, directory: Path) -> None:
        self._client = client
        self._killer = killer
        self._tables = tpch_data.load_tpch(directory, SCALE)
        self._directory = directory
        self._answers: dict[int, pd.DataFrame] = {}
        self._events: dict[int, Counter[str]] = {}
        self._n_shuffles: dict[int, int] = {}
        client.register_plugin(Reports(killer.path))

    def _n_runs(self) -> int:
        runs = dask_gpurt.status(self._client)["runs"]
        assert runs["stock"] == 0
        return int(runs["gpurt"])

    def _pids(self) -> list[int]:
        self._client.wait_for_workers(N_WORKERS, timeout=DEADLINE_S)
        workers = self._client.scheduler_info(n_workers=-1)["workers"]
        pids = self._client.run(os.getpid)
        return [pids[address] for address in sorted(workers, key=lambda a: workers[a]["name"])]

    def _run(self, query: int, plan: Kill | None) -> int:
        """Run a query; how many runs its shuffles took. Its answer is checked."""
        before = self._n_runs()
        self._killer.arm(plan, self._pids())
        with self._client.as_current():
            got = tpch_queries.QUERIES[query](self._tables)
        assert_same_answer(got, self._expected(query), tpch_sql.ORDERED_BY[query])
        return self._n_runs() - before

    def _expected(self, query: int) -> pd.DataFrame:
        if query not in self._answers:
            with connect_views(self._directory, tpch_data.N_FILES) as connection:
                answer = connection.execute(tpch_sql.tpch_sql(query, SCALE)).df()
            assert len(answer)
            self._answers[query] = answer
        return self._answers[query]

    def _rehearse(self, query: int) -> None:
        """Learn how many events a query has when nothing happens."""
        if query not in self._events:
            self._n_shuffles[query] = self._run(query, None)
            self._events[query] = self._killer.counts.copy()
            assert set(self._events[query]) == set(gates.POINTS)

    def once(self, seed: int) -> Outcome:
        """One query with one kill."""
        choose = random.Random(seed)
        query = choose.choice(QUERIES)
        self._rehearse(query)
        point = choose.choice(gates.POINTS)
        # Tasks are always as many. Messages, and workers that are asked to a barrier, depend on who
        # did what, so that not all of them can be met again.
        n_sure = self._events[query][point] // (2 if point in gates.HANDLERS else 1)
        plan = Kill(point, choose.randint(1, max(1, n_sure)), choose.randrange(N_WORKERS))
        start_s = time.perf_counter()
        n_runs = self._run(query, plan)
        seconds = time.perf_counter() - start_s
        assert self._killer.killed is not None, f"{plan} did not come to pass"
        assert_nothing_left(self._client)
        return Outcome(seed, query, plan, self._n_shuffles[query], n_runs, seconds)


@contextlib.contextmanager
def open_arena(directory: Path, transport: str = "auto") -> Iterator[Arena]:
    options = {"n_workers": N_WORKERS, "threads_per_worker": 1, "dashboard_address": ":0"}
    killer = Killer()
    with (
        contextlib.closing(killer),
        dask.config.set(SETTINGS | {"gpurt.shuffle.transport": transport}),
        LocalCluster(silence_logs=50, **options) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        dask_gpurt.enable(client)
        yield Arena(client, killer, directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    parser.add_argument("--transport", default="auto", choices=["auto", "ucx", "comm"])
    options = parser.parse_args()
    directory = tpch_data.make_tpch(SCALE)
    with open_arena(directory, options.transport) as arena:
        for seed in range(options.seed, options.seed + options.runs):
            print(arena.once(seed), flush=True)
    print(f"{options.runs} runs, {options.runs} right answers")


if __name__ == "__main__":
    main()
