"""A program that kills workers and nannies at random points of real joins, and checks answers.

Every answer has to be right and in time, and nothing may be left. The scheduler, each nanny and
each worker is a process of its own. Workers spill values and shards.

The seed determines the query, the kind and number of the event, and the process that dies. Time
does not matter: workers report every event of a shuffle to this process, and continue only once it
is counted.

    python -m tests.failure.random_killer --runs 100 --transport ucx
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import dask
import pandas as pd
import psutil
from distributed import Client, WorkerPlugin

import dask_gpurt
from dask_gpurt.demo import tpch_data, tpch_queries, tpch_sql
from dask_gpurt.demo.answers import first_difference
from dask_gpurt.demo.material import connect_views
from tests.failure import gates
from tests.failure.gates import DEADLINE_S, until
from tests.failure.leftovers import assert_nothing_left
from tests.integration.processes import CommandLineCluster, command_line_cluster

N_WORKERS = 3
SCALE = 0.02
#: Joins with several shuffles each, some of them outer or semi joins.
QUERIES = (3, 4, 5, 7, 9, 10, 13, 18)

#: The victim: one worker, one nanny with its worker, or all workers at once.
WHO = ("worker", "nanny", "all workers")
#: A query takes a few seconds. One that reaches this deadline hangs.
HANG_S = 120.0

SETTINGS = {
    # A merge of small tables would not shuffle otherwise.
    "dataframe.shuffle.method": "p2p",
    "gpurt.strict": True,
    # With so little memory, some shards are on disk at the time of a kill.
    "gpurt.shuffle.memory": "1 MiB",
}

#: Environment of the processes: workers write values beyond 4 MiB to disk.
ENVIRONMENT = {
    "DASK_DISTRIBUTED__WORKER__MEMORY__TARGET": "0.004",
    "DASK_DISTRIBUTED__WORKER__MEMORY__PAUSE": "False",
    "DASK_DISTRIBUTED__WORKER__MEMORY__TERMINATE": "False",
    "PYTHONPATH": str(Path(__file__).parents[2]),
}
WORKER_OPTIONS = ("--nworkers", "1", "--memory-limit", "1 GiB")


def report(path: str, point: str) -> None:
    """Report that a worker has reached a point; return when it may continue."""
    with contextlib.suppress(ConnectionError, FileNotFoundError):
        with socket.socket(socket.AF_UNIX) as conn:
            conn.connect(path)
            conn.sendall(point.encode())
            conn.shutdown(socket.SHUT_WR)
            conn.recv(1)


class Reports(WorkerPlugin):
    """A plugin that makes every worker report each event, also replacements of killed ones."""

    name = "reports"

    def __init__(self, path: str) -> None:
        self.path = path

    async def setup(self, worker: Any) -> None:
        # A joining worker sets its plugins up concurrently, in any order.
        while "shuffle" not in worker.plugins:
            await asyncio.sleep(0)
        for point in gates.POINTS:
            gates.before(worker, point, partial(report, self.path, point))


@dataclass(frozen=True)
class Kill:
    """A kill at the `nth` event of a kind; `victim` is an index into the sorted names."""

    point: str
    nth: int
    victim: int
    who: str = "worker"


class Killer:
    """Counts events, and kills the planned process at the planned event."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="killer-")
        self.path = os.path.join(self._directory.name, "reports")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen(128)
        self._lock = threading.Lock()
        self._pids: list[list[int]] = []
        self._plan: Kill | None = None
        self.counts: Counter[str] = Counter()
        self.has_killed = False
        threading.Thread(target=self._serve, daemon=True).start()

    def arm(self, plan: Kill | None, pids: list[list[int]]) -> None:
        """Reset the counts, and set the plan; `pids` are the processes of each victim."""
        with self._lock:
            self.counts.clear()
            self.has_killed = False
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
                self.has_killed = True
                for pid in self._pids[plan.victim]:
                    os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        self._listener.close()
        self._directory.cleanup()


@dataclass
class Outcome:
    """The outcome of one run."""

    seed: int
    query: int
    plan: Kill
    n_shuffles: int
    n_runs: int
    seconds: float
    spilled_nbytes: int

    def __str__(self) -> str:
        plan = self.plan
        return (
            f"seed {self.seed}: Q{self.query}, {plan.who} ({plan.victim}) killed at {plan.point} "
            f"{plan.nth}: right answer in {self.seconds:.1f} s, {self.n_runs} runs of "
            f"{self.n_shuffles} shuffles, {self.spilled_nbytes >> 10} KiB of values on disk"
        )


class Arena:
    """A cluster of processes, the tables, and the answers of another engine."""

    def __init__(
        self, cluster: CommandLineCluster, client: Client, killer: Killer, directory: Path
    ) -> None:
        self._cluster = cluster
        self._client = client
        self._killer = killer
        self._nannies = [self._start(number) for number in range(N_WORKERS)]
        self._tables = tpch_data.load_tpch(directory, SCALE)
        self._directory = directory
        self._answers: dict[int, pd.DataFrame] = {}
        self._events: dict[int, Counter[str]] = {}
        self._n_shuffles: dict[int, int] = {}
        client.register_plugin(Reports(killer.path))

    def _start(self, number: int) -> subprocess.Popen:
        options = (*WORKER_OPTIONS, "--name", str(number), "--local-directory", "scratch")
        return self._cluster.worker(*options, **ENVIRONMENT)

    def _n_runs(self) -> int:
        runs = dask_gpurt.status(self._client)["runs"]
        assert runs["stock"] == 0
        return int(runs["gpurt"])

    def _spilled_nbytes(self) -> int:
        """Return the bytes of values that living workers have written to disk."""
        reports = dask_gpurt.status(self._client)["workers"].values()
        io = [report["memory"]["io"] for report in reports if report]
        return int(sum(one.get("disk-write-bytes", 0) for one in io))

    def _names(self) -> dict[int, str]:
        workers = self._client.scheduler_info(n_workers=-1)["workers"]
        return {int(worker["name"]): address for address, worker in workers.items()}

    def _heal(self) -> None:
        """Replace each nanny that has ended, once its worker has ended, too."""
        for number, nanny in enumerate(self._nannies):
            if nanny.poll() is not None:
                until(lambda number=number: number not in self._names(), "its worker lives on")
                self._nannies[number] = self._start(number)
        self._client.wait_for_workers(N_WORKERS, timeout=DEADLINE_S)

    def _pids(self) -> list[int]:
        self._heal()
        pids, names = self._client.run(os.getpid), self._names()
        return [pids[names[number]] for number in range(N_WORKERS)]

    def _run(self, query: int, plan: Kill | None) -> int:
        """Run a query, check its answer, and return the number of runs of its shuffles."""
        before = self._n_runs()
        workers = self._pids()
        pids = {
            "worker": [[pid] for pid in workers],
            "nanny": [[nanny.pid] for nanny in self._nannies],
            "all workers": [workers] * N_WORKERS,
        }
        self._killer.arm(plan, pids[plan.who if plan else "worker"])
        got = self._in_time(query, plan)
        difference = first_difference(got, self._expected(query), tpch_sql.ORDERED_BY[query])
        assert difference is None, difference
        return self._n_runs() - before

    def _in_time(self, query: int, plan: Kill | None) -> pd.DataFrame:
        def answer() -> pd.DataFrame:
            with self._client.as_current():
                return tpch_queries.QUERIES[query](self._tables)

        # As a context, it would wait for a query that hangs.
        threads = ThreadPoolExecutor(1)
        try:
            return threads.submit(answer).result(HANG_S)
        except TimeoutError:
            raise AssertionError(
                f"Q{query} hangs after {plan}:\n{self._cluster.log_text()}"
            ) from None
        finally:
            threads.shutdown(wait=False)

    def _expected(self, query: int) -> pd.DataFrame:
        if query not in self._answers:
            with connect_views(self._directory, tpch_data.N_FILES) as connection:
                answer = connection.execute(tpch_sql.tpch_sql(query, SCALE)).df()
            assert len(answer)
            self._answers[query] = answer
        return self._answers[query]

    def _rehearse(self, query: int) -> None:
        """Count the events of a query without a kill."""
        if query not in self._events:
            self._n_shuffles[query] = self._run(query, None)
            self._events[query] = self._killer.counts.copy()
            assert set(self._events[query]) == set(gates.POINTS)

    def once(self, seed: int) -> Outcome:
        """Run one query with one kill."""
        choose = random.Random(seed)
        query = choose.choice(QUERIES)
        self._rehearse(query)
        point = choose.choice(gates.POINTS)
        # The number of tasks is fixed. The numbers of messages and of workers at a barrier vary
        # with placement, so a later event may not happen again.
        n_sure = self._events[query][point] // (2 if point in gates.HANDLERS else 1)
        nth, victim = choose.randint(1, max(1, n_sure)), choose.randrange(N_WORKERS)
        plan = Kill(point, nth, victim, choose.choice(WHO))
        start_s = time.perf_counter()
        n_runs = self._run(query, plan)
        seconds = time.perf_counter() - start_s
        spilled_nbytes = self._spilled_nbytes()
        assert self._killer.has_killed, f"{plan} did not come to pass"
        self._heal()
        assert_nothing_left(self._client)
        n_shuffles = self._n_shuffles[query]
        return Outcome(seed, query, plan, n_shuffles, n_runs, seconds, spilled_nbytes)


@contextlib.contextmanager
def open_arena(directory: Path, transport: str = "auto") -> Iterator[Arena]:
    """Start an arena; at the end, check that none of its processes and files are left."""
    killer = Killer()
    with (
        contextlib.closing(killer),
        tempfile.TemporaryDirectory(prefix="killer-") as place,
        dask.config.set(SETTINGS | {"gpurt.shuffle.transport": transport}),
    ):
        with command_line_cluster(Path(place)) as cluster:
            cluster.scheduler(**ENVIRONMENT)
            with cluster.client() as client:
                dask_gpurt.enable(client)
                yield Arena(cluster, client, killer, directory)
        until(lambda: not _of(place), "processes are left")
        left = [str(path) for path in Path(place, "scratch").rglob("worker-*") if path.is_dir()]
        assert not left, left


def _of(place: str) -> list[psutil.Process]:
    """Return the processes that run in a directory."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cwd() == place and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


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
