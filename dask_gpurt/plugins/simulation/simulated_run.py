"""Simulation of a workload on a modelled cluster, with distributed's own scheduler.

There are no sockets, processes or threads. The scheduler itself takes no virtual time; its
processor time is in `Result.cost`. `docs/simulator.md` lists what is modelled.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping
from functools import partial
from time import thread_time
from typing import Any

from distributed import Scheduler
from distributed.scheduler import heartbeat_interval

from dask_gpurt.errors import SimulationError
from dask_gpurt.plugins.patches.simulator import (
    SimulatedScheduler,
    failure,
    graph_message,
    virtual_time,
)
from dask_gpurt.plugins.simulation.shared_state import Limits, SharedState
from dask_gpurt.plugins.simulation.simulated_exchange import ModelledExchange
from dask_gpurt.plugins.simulation.simulated_worker import ModelledWorker
from dask_gpurt.plugins.simulation.virtual_loop import VirtualIOLoop, VirtualLoop
from dask_gpurt.simulate.clock import VirtualClock
from dask_gpurt.simulate.cluster_model import ChangesSpeed, ClusterModel, Incident, WorkerModel
from dask_gpurt.simulate.program import ExchangeModel, ProgramModel, Submission, next_uses
from dask_gpurt.simulate.result import Result, SchedulerCost
from dask_gpurt.simulate.transfers import Transfers
from dask_gpurt.simulate.workload import StableStr, Workload

CLIENT = StableStr("simulated-client")
#: States of a task on a worker in which the worker gives it up to a thief.
STEALABLE = ("ready", "constrained", "waiting")
#: Virtual seconds without a message, a task or a transfer after which a simulation is stuck. Longer
#: than any timeout of distributed that revives a computation.
STUCK_S = 600.0

Install = Callable[[Scheduler], Awaitable[object] | object]


def simulate(
    workload: Workload | ProgramModel,
    cluster: ClusterModel,
    install: Install | None = None,
    *,
    held: Mapping[str, str] | None = None,
    validate: bool = False,
) -> Result:
    """Compute a workload on a modelled cluster.

    Parameters
    ----------
    workload
        Tasks that a client submits at once, or a program with shuffles and several graphs.
    cluster
        Machine on which the workload runs.
    install
        Called with the scheduler after its workers have joined and before the graph is submitted.
        Installs a placement policy or another scheduler plugin. May be a coroutine function.
    held
        Results that exist before the workload is submitted, as of a persisted collection: the
        worker's address by the key of a task of the workload. They cost no time and no transfer.
    validate
        Let distributed check its own state after every message. Slow.

    Returns
    -------
    Result
        Exactly reproducible for the same arguments and Dask configuration.

    Raises
    ------
    SimulationError
        The computation fails, or cannot end. `held` names a worker or a task that does not exist.
        A worker fails during a shuffle, which is not modelled.
    """
    program = workload if isinstance(workload, ProgramModel) else ProgramModel.of(workload)
    workload = program.workload
    if program.exchanges and cluster.incidents:
        raise SimulationError("no worker can fail in a simulation of a program with shuffles")
    keys = {str(task.key) for task in workload.tasks}
    addresses = {worker.address for worker in cluster.workers}
    for key, address in (held or {}).items():
        if str(key) not in keys or address not in addresses:
            raise SimulationError(
                f"held names {key!r} at {address}: there is no such task or worker"
            )
    loop = VirtualLoop(VirtualClock())  # type: ignore[abstract]
    with virtual_time():
        io_loop = VirtualIOLoop(asyncio_loop=loop)
        try:
            simulation = _Simulation(program, cluster, loop, held or {}, validate=validate)
            return loop.run(simulation.run(install))
        finally:
            io_loop.close()


class _ConnectionToWorker:
    """The scheduler's end of a connection to a modelled worker."""

    def __init__(self, deliver: Callable[[list[dict[str, Any]]], None]) -> None:
        self._deliver = deliver

    def send(self, *messages: dict[str, Any]) -> None:
        if messages:
            self._deliver(list(messages))


class _Registration:
    """The connection on which a worker joins. The scheduler's answer is discarded."""

    async def write(self, message: object) -> None:
        """Discard an answer."""


class _Client:
    """A client that waits for the wanted results of its submissions."""

    def __init__(self, clock: VirtualClock, latency_s: float) -> None:
        self._clock = clock
        self._latency_s = latency_s
        #: By key: the results that a submission still waits for, and its future.
        self._waits: dict[str, tuple[dict[str, None], asyncio.Future[None]]] = {}

    def wait_for(self, wanted: Iterable[StableStr]) -> asyncio.Future[None]:
        """Return a future of the moment in which all these results exist."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        missing = dict.fromkeys(map(str, wanted))
        for key in missing:
            self._waits[key] = missing, done
        if not missing:
            done.set_result(None)
        return done

    def send(self, *messages: dict[str, Any]) -> None:
        for message in messages:
            self._clock.call_later(self._latency_s, partial(self._take, message))

    def _take(self, message: dict[str, Any]) -> None:
        op, key = message["op"], str(message.get("key", ""))
        if op in ("task-erred", "cancelled-keys"):
            error = failure(message)
            for _, done in self._waits.values():
                if not done.done():
                    done.set_exception(error)
            return
        if key not in self._waits:
            return
        missing, done = self._waits[key]
        if done.done():
            return
        if op == "key-in-memory":
            missing.pop(key, None)
        elif op == "lost-data":
            missing[key] = None
        if not missing:
            done.set_result(None)


class _Simulation:
    """One computation, from an empty cluster to the last result."""

    def __init__(
        self,
        program: ProgramModel,
        cluster: ClusterModel,
        loop: VirtualLoop,
        held: Mapping[str, str],
        *,
        validate: bool,
    ) -> None:
        self._program = program
        self._workload = workload = program.workload
        self._held = {StableStr(key): address for key, address in held.items()}
        self._cluster = cluster
        self._loop = loop
        self._clock = loop.clock
        self._validate = validate
        self._cost = SchedulerCost()
        self._steals = 0
        self._n_pauses = 0
        self._uses = next_uses(workload)
        self._rank = {task.key: rank for rank, task in enumerate(workload.tasks)}
        self._shared = SharedState(
            clock=loop.clock,
            cluster=cluster,
            transfers=Transfers(loop.clock, cluster.capacities),
            send=self._to_scheduler,
            models={task.key: task for task in workload.tasks},
            limits=Limits.from_config(),
            next_use=self._next_use,
        )

    def _next_use(self, key: Hashable) -> float:
        """Return the position of the next task that needs a result, or infinity."""
        uses = self._uses[self._rank[key]]  # type: ignore[index]
        tasks = self._workload.tasks
        while uses and tasks[uses[-1]].key in self._shared.done:
            uses.pop()
        return uses[-1] if uses else math.inf

    async def run(self, install: Install | None) -> Result:
        clock = self._clock
        self._scheduler = scheduler = SimulatedScheduler(self._connect, validate=self._validate)
        self._bandwidth = scheduler.bandwidth
        try:
            await scheduler.start_plugins()
            for number, model in enumerate(self._cluster.workers):
                await self._add_worker(model, number / len(self._cluster.workers))
            if install is not None:
                outcome = install(scheduler)
                if inspect.isawaitable(outcome):
                    await outcome
            self._time_periodic_callbacks()
            clock.call_later(STUCK_S, partial(self._check_for_stall, ()))
            started_s = clock.now_s
            for incident in self._cluster.incidents:
                clock.call_at(started_s + incident.at_s, partial(self._apply_incident, incident))
            self._client = _Client(clock, self._cluster.control_latency_s)
            scheduler.add_simulated_client(CLIENT, self._client)
            self._hold()
            await self._submit_all()
            return self._result(clock.now_s - started_s)
        finally:
            for worker in self._shared.workers.values():
                worker.alive = False
            scheduler.stop_simulated()

    async def _submit_all(self) -> None:
        """Submit each graph when the client has the results that it waits for."""
        program = self._program
        released = program.released_after()
        submission_of = program.submission_of()
        self._exchanges_of: dict[int, list[ExchangeModel]] = {}
        for exchange in program.exchanges:
            number = submission_of[exchange.barrier]
            self._exchanges_of.setdefault(number, []).append(exchange)
        done: list[asyncio.Future[None]] = []
        self._submitted = [self._loop.create_future() for _ in program.submissions]
        tasks = []
        for number, submission in enumerate(program.submissions):
            done.append(self._loop.create_future())
            tasks.append(
                self._loop.create_task(
                    self._submit(submission, done, number, released.get(number, []))
                )
            )
        await asyncio.gather(*tasks)

    async def _submit(
        self,
        submission: Submission,
        done: list[asyncio.Future[None]],
        number: int,
        released: list[int],
    ) -> None:
        if number:
            # A graph may need results of the one before, whose turn comes first.
            await self._submitted[number - 1]
        for other in submission.after:
            await done[other]
        if submission.pause_s:
            self._n_pauses += 1
            await asyncio.sleep(submission.pause_s)
            self._n_pauses -= 1
        models = self._workload.tasks
        wanted = [models[position].key for position in submission.wanted]
        positions = [one for one in submission.tasks if models[one].key not in self._held]
        arrived = self._client.wait_for(wanted)
        message = graph_message(self._workload, positions, wanted)
        began = thread_time()
        await self._scheduler.take_graph(message, CLIENT)
        self._cost.graph_s += thread_time() - began
        for exchange in self._exchanges_of.get(number, ()):
            self._add_exchange(exchange)
        self._submitted[number].set_result(None)
        await arrived
        done[number].set_result(None)
        self._scheduler.client_releases_keys(
            keys=[models[position].key for position in released], client=CLIENT
        )

    def _add_exchange(self, model: ExchangeModel) -> None:
        models, exchanges = self._workload.tasks, self._shared.exchanges
        found = ModelledExchange(model, self._program, self._shared, self._scheduler.restrict)
        exchanges.of_barrier[models[model.barrier].key] = found
        for position in model.transfers:
            exchanges.of_transfer[models[position].key] = found
        for position in model.outputs:
            exchanges.of_output.setdefault(models[position].key, []).append(found)

    def _result(self, makespan_s: float) -> Result:
        shared = self._shared
        limited = shared.workers if self._cluster.disk_nbytes_per_s else {}
        return Result(
            makespan_s=makespan_s,
            tasks=tuple(shared.tasks),
            transfers=tuple(shared.moved),
            link_nbytes=dict(sorted(shared.link_nbytes.items())),
            peak_nbytes={a: worker.peak_nbytes for a, worker in shared.workers.items()},
            steals=self._steals,
            spilled_nbytes={a: worker.memory.written_nbytes for a, worker in limited.items()},
            needed_nbytes={a: worker.memory.needed_nbytes for a, worker in limited.items()},
            cost=self._cost,
        )

    # Workers join, send heartbeats, and leave.

    async def _add_worker(self, model: WorkerModel, turn: float) -> None:
        worker = ModelledWorker(model, self._shared, validate=self._validate)
        self._shared.workers[model.address] = worker
        await self._scheduler.add_worker(
            comm=_Registration(),  # type: ignore[arg-type]
            address=model.address,
            status="running",
            # The scheduler hashes a worker by this id.
            server_id=worker.stable_address,
            nthreads=model.nthreads,
            name=model.name or model.address,
            resolve_address=False,
            now=self._loop.wall_time(),
            resources={},
            memory_limit=model.memory_nbytes,
            metrics=worker.metrics(self._bandwidth),
            services={},
            local_directory="",
            versions={},
            nanny="",
            extra={},
            stimulus_id="add-worker-simulated",
        )
        # Stagger the heartbeats, like those of workers that joined one after the other.
        interval_s = heartbeat_interval(len(self._cluster.workers))
        self._clock.call_later(interval_s * turn, partial(self._heartbeat, worker, interval_s))

    def _hold(self) -> None:
        """Give workers the results that exist already, as if a client had scattered them."""
        shared = self._shared
        for key, address in self._held.items():
            shared.workers[address].hold(key)
        self._scheduler.update_data(
            who_has={key: [address] for key, address in self._held.items()},
            nbytes={key: shared.models[key].nbytes for key in self._held},
            client=CLIENT,
        )

    def _heartbeat(self, worker: ModelledWorker, interval_s: float) -> None:
        if not worker.alive:
            return
        worker.heartbeat()
        heartbeat: dict[str, Any] = {
            "address": worker.address,
            "resolve_address": False,
            "now": self._loop.wall_time(),
            "metrics": worker.metrics(self._bandwidth),
            "executing": worker.executing(),
        }
        # Look the handler up on arrival, since plugins wrap handlers.
        self._clock.call_later(
            self._cluster.control_latency_s,
            lambda: self._scheduler.handlers["heartbeat_worker"](**heartbeat),
        )
        self._clock.call_later(interval_s, partial(self._heartbeat, worker, interval_s))

    def _apply_incident(self, incident: Incident) -> None:
        worker = self._shared.workers[incident.address]
        if isinstance(incident, ChangesSpeed):
            worker.change_speed(incident.speed)
            return
        worker.die()
        # The scheduler notices the broken connection.
        self._clock.call_later(
            self._cluster.control_latency_s,
            lambda: self._loop.create_task(
                self._scheduler.remove_worker(
                    worker.address, stimulus_id="connection-lost-simulated", close=False
                )
            ),
        )

    # Messages in both directions.

    def _connect(self, address: str) -> _ConnectionToWorker:
        worker = self._shared.workers[address]

        def deliver(messages: list[dict[str, Any]]) -> None:
            for message in messages:
                self._clock.call_later(
                    self._cluster.control_latency_s, partial(worker.receive, message)
                )

        return _ConnectionToWorker(deliver)

    def _to_scheduler(self, address: str, message: dict[str, Any]) -> None:
        self._clock.call_later(
            self._cluster.control_latency_s, partial(self._arrive, address, message)
        )

    def _arrive(self, address: str, message: dict[str, Any]) -> None:
        if message["op"] == "steal-response" and message["state"] in STEALABLE:
            self._steals += 1
        began = thread_time()
        self._scheduler.receive(message, worker=address)
        self._cost.messages_s += thread_time() - began
        self._cost.messages += 1

    def _check_for_stall(self, before: tuple[int, ...]) -> None:
        """Fail a computation that is stuck. Stealing and heartbeats would go on forever."""
        shared = self._shared
        now = self._cost.messages, len(shared.tasks), len(shared.moved)
        busy = self._n_pauses or shared.transfers.rates()
        busy = busy or any(w.executing() for w in shared.workers.values())
        if now == before and not busy:
            raise SimulationError("the simulation is stuck: nothing happens, but it is not done")
        self._clock.call_later(STUCK_S, partial(self._check_for_stall, now))

    def _time_periodic_callbacks(self) -> None:
        def timed(callback: Callable[[], Any]) -> Callable[[], Any]:
            def run() -> Any:
                began = thread_time()
                try:
                    return callback()
                finally:
                    self._cost.periodic_s += thread_time() - began

            return run

        for periodic in self._scheduler.periodic_callbacks.values():
            periodic.callback = timed(periodic.callback)
