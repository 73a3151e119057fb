"""A cluster with fixed roles: known senders, receivers and bystanders."""

from __future__ import annotations

import contextlib
import faulthandler
import inspect
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import dask
import numpy as np
import pandas as pd
from distributed import Client, LocalCluster, as_completed, get_worker, wait
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.shuffle._core import id_from_key

import dask_gpurt
from tests.failure.gates import DEADLINE_S, pass_gate, restore
from tests.integration.comparing import collection

#: There are two senders and two receivers, so that a shuffle can go on without one of them.
ROLES = {"sender": (0, 1), "receiver": (2, 3), "bystander": (4,)}
N_INPUTS = 6
N_OUTPUTS = 6
ROWS = 4_000

#: Settings for each transport of shards.
TRANSPORTS: dict[str, dict[str, Any]] = {
    "comm": {"gpurt.shuffle.transport": "comm"},
    "shared": {"gpurt.shuffle.transport": "auto"},
    "ucx": {"gpurt.shuffle.transport": "ucx"},
}

#: A local cluster checks a worker some time after it left, and closes its nanny if it is still
#: gone. Here, the worker may have come back and been killed again at that time.
NEVER_GIVE_UP = {"distributed.deploy.lost-worker-timeout": "1 hour"}

#: With so little memory for shards, every test has some on disk, too.
SETTINGS = NEVER_GIVE_UP | {"gpurt.shuffle.memory": "128 KiB"}


def frame(number: int) -> pd.DataFrame:
    rng = np.random.default_rng(number)
    return pd.DataFrame(
        {
            "key": rng.integers(0, 1000, ROWS),
            "origin": number * ROWS + np.arange(ROWS),
            "text": pd.array(rng.choice(["a", "bb"], ROWS), dtype="str"),
        }
    )


def expected() -> list[pd.DataFrame]:
    """Compute the outputs by Dask's other shuffle method, without workers."""
    lazy = collection([frame(number) for number in range(N_INPUTS)])
    lazy = lazy.shuffle("key", npartitions=N_OUTPUTS, shuffle_method="tasks")
    return list(dask.compute(*lazy.to_delayed(), scheduler="sync"))


def make_input(number: int, gate: str | None, times: dict[str, int]) -> pd.DataFrame:
    """Return an input partition; wait at a gate first, and make it repeatedly on some workers."""
    if gate is not None:
        pass_gate(gate)
    return [frame(number) for _ in range(times.get(get_worker().address, 1))][-1]


class Departures(SchedulerPlugin):
    """A scheduler plugin that can wait until a worker is gone."""

    name = "departures"

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._gone: set[str] = set()

    def add_worker(self, scheduler: Any, worker: str) -> None:
        # The new worker may have the port of one that left before.
        with self._changed:
            self._gone.discard(worker)

    def remove_worker(self, scheduler: Any, worker: str, **kwargs: Any) -> None:
        with self._changed:
            self._gone.add(worker)
            self._changed.notify_all()

    def wait_for(self, worker: str) -> None:
        with self._changed:
            gone = self._changed.wait_for(lambda: worker in self._gone, DEADLINE_S)
        assert gone, f"the scheduler has not noticed that {worker} left"


class Barriers(SchedulerPlugin):
    """A scheduler plugin that counts how often a barrier was assigned to a worker."""

    name = "barriers"

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._n_given = 0

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        if finish == "processing" and id_from_key(key) is not None:
            with self._changed:
                self._n_given += 1
                self._changed.notify_all()

    def wait_for(self, n_times: int) -> None:
        with self._changed:
            given = self._changed.wait_for(lambda: self._n_given >= n_times, DEADLINE_S)
        assert given, f"a barrier was given to a worker {self._n_given} times"


class Stage:
    """Five workers with roles, and one shuffle at a time.

    Senders make and divide the input partitions. Receivers own the outputs.
    """

    def __init__(self, cluster: LocalCluster, client: Client, transport: str) -> None:
        self.cluster = cluster
        self.client = client
        self.transport = transport
        self.departures = Departures()
        self.barriers = Barriers()
        self.closed: list[Any] = []
        scheduler = cluster.scheduler
        plugin = scheduler.plugins["shuffle"]

        def owners(spec: Any) -> dict[int, str]:
            # Restrictions would not work: stock Dask assigns outputs to workers in the barrier's
            # restrictions even if they are gone.
            live = [w.address for w in scheduler.workers.values() if w.name in ROLES["receiver"]]
            return {p: spec.pick_worker(p, live) for p in spec.output_partitions}

        async def prepare() -> None:
            plugin._calculate_worker_for = owners
            scheduler.add_plugin(self.departures)
            scheduler.add_plugin(self.barriers)

        cluster.sync(prepare)

    def addresses(self, role: str) -> list[str]:
        """Return the addresses of the workers with a role; wait for a restarted one."""
        give_up = time.monotonic() + DEADLINE_S
        while True:
            workers = self.client.scheduler_info(n_workers=-1)["workers"]
            by_name = {worker["name"]: address for address, worker in workers.items()}
            if by_name.keys() >= set(ROLES[role]):
                return [by_name[name] for name in ROLES[role]]
            assert time.monotonic() < give_up, f"of the {role}s there are {sorted(by_name)}"

    def worker_at(self, address: str) -> Any:
        """Return the worker of this process with this address."""
        (worker,) = (w for w in self.cluster.workers.values() if w.address == address)
        return worker

    def tell(self, address: str, function: Callable[..., Any], *args: Any) -> Any:
        """Call `function(worker, *args)` in the worker's process, on its loop."""

        async def call(dask_worker: Any) -> Any:
            found = function(dask_worker, *args)
            return await found if inspect.isawaitable(found) else found

        return self.client.run(call, workers=[address])[address]

    def shuffle(self, gate: str | None = None, times: dict[str, int] | None = None) -> list[Any]:
        """Start a shuffle, and return futures of its outputs."""
        inputs = [
            dask.delayed(make_input, pure=False)(number, gate, times or {})
            for number in range(N_INPUTS)
        ]
        senders, receivers = self.addresses("sender"), self.addresses("receiver")
        # The barrier is never on the victim, so that every test has the same situation.
        barrier = receivers[1:]

        def place(key: Any) -> list[str]:
            name = key[0] if isinstance(key, tuple) else key
            if name.startswith("shuffle-barrier"):
                return barrier
            return receivers if name.startswith("p2pshuffle") else senders

        with self.client.as_current(), dask.config.set({"dataframe.shuffle.method": "p2p"}):
            import dask.dataframe as dd

            lazy = dd.from_delayed(inputs, meta=frame(0).iloc[:0], verify_meta=False)
            outputs = lazy.shuffle("key", npartitions=N_OUTPUTS).to_delayed()
            with dask.annotate(workers=place):
                return list(self.client.compute(outputs))

    def results(self, outputs: list[Any]) -> list[pd.DataFrame]:
        """Return the outputs, or fail at the deadline."""
        self.wait(outputs)
        return list(self.client.gather(outputs))

    def forget(self, outputs: list[Any]) -> None:
        """Make the scheduler forget a shuffle, even if futures still refer to it."""
        for future in outputs:
            future.release()

    def wait(self, outputs: list[Any]) -> None:
        try:
            with self.client.as_current():
                wait(outputs, timeout=DEADLINE_S)
        except TimeoutError:
            self.print_state()
            faulthandler.dump_traceback()
            raise

    def wait_for_done(self, n_outputs: int, outputs: list[Any]) -> None:
        """Return once this many outputs are done, whichever they are."""
        with self.client.as_current():
            done = as_completed(outputs, timeout=DEADLINE_S)
            for _ in range(n_outputs):
                next(done)

    def runs(self) -> dict[str, int]:
        return dict(dask_gpurt.status(self.client)["runs"])

    def print_state(self) -> None:
        """Print the tasks of the scheduler, and what workers report: for a test that hangs."""

        def tasks(dask_scheduler: Any) -> list[str]:
            return [
                f"{ts.key} {ts.state} {getattr(ts.processing_on, 'address', '')}"
                for ts in dask_scheduler.tasks.values()
            ]

        print(*self.client.run_on_scheduler(tasks), sep="\n")
        for address, report in dask_gpurt.status(self.client)["workers"].items():
            print(address, *map(repr, report.items()), sep="\n  ")

    def paths(self) -> set[str]:
        """Return the names of the transports used since the last cool-down."""
        workers = dask_gpurt.status(self.client)["workers"].values()
        return {link["path"] for worker in workers for link in worker["links"].values()}

    def wait_until_stuck(self, paused: str, outputs: list[Any]) -> None:
        """Return once the shuffle cannot continue without a paused worker."""
        scheduler = self.cluster.scheduler

        async def is_stuck() -> bool:
            busy = {t.processing_on.address for t in scheduler.tasks.values() if t.processing_on}
            return busy <= {paused}

        def is_idle(worker: Any) -> bool:
            return not worker.state.executing

        give_up = time.monotonic() + DEADLINE_S
        while not all(future.done() for future in outputs):
            if self.tell(paused, is_idle) and self.cluster.sync(is_stuck):
                return
            assert time.monotonic() < give_up, "the others neither finish nor get stuck"

    def wait_for_blocked_producers(self, n_threads: int) -> None:
        """Return once this many threads wait for room in a peer's queue of shards."""

        def n_blocked(worker: Any) -> int:
            runs = worker.plugins["shuffle"].shuffle_runs._runs
            return sum(len(run._outbox._changed._waiters) for run in runs)

        give_up = time.monotonic() + DEADLINE_S
        while sum(self.tell(sender, n_blocked) for sender in self.addresses("sender")) < n_threads:
            assert time.monotonic() < give_up, "producers do not wait for a peer that is stuck"

    def restore(self) -> None:
        self.client.run(restore)


@contextlib.contextmanager
def open_stage(transport: str, processes: bool = False, threads: int = 1) -> Iterator[Stage]:
    """Start a cluster of five workers, in this process or in one process each."""
    options: dict[str, Any] = {"n_workers": 5, "threads_per_worker": threads}
    options |= {"dashboard_address": ":0"}
    if processes:
        options |= {"silence_logs": 50}
    else:
        # Without a memory limit, only the test pauses a worker.
        options |= {"processes": False, "protocol": "tcp://", "silence_logs": False}
        options |= {"memory_limit": 0}
    with (
        dask.config.set(SETTINGS | TRANSPORTS[transport]),
        LocalCluster(**options) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        dask_gpurt.enable(client)
        yield Stage(cluster, client, transport)


@contextlib.contextmanager
def leaving(stage: Stage, victim: str) -> Iterator[None]:
    """Retire a worker of this process at the start of the block, and close it at the end."""
    closed = [w for w in stage.cluster.workers.values() if w.address == victim]
    stage.closed += closed
    with ThreadPoolExecutor(1) as thread:
        retired = thread.submit(stage.client.retire_workers, [victim])
        stage.departures.wait_for(victim)
        yield
        retired.result(DEADLINE_S)
    for worker in closed:
        stage.client.sync(worker.finished)
