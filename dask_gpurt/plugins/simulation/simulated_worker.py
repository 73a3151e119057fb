"""A simulated worker with distributed's own state machine and modelled work.

`WorkerState` decides what to fetch from which peer and what to run next, as in a worker process,
and answers the scheduler. This module executes its instructions in virtual time. A task takes its
duration at this worker's speed; a transfer takes its request's latency plus the time of its bytes
on the links.

On a cluster with disks, memory is limited: results go to disk and come back, which takes time. On
others it is only counted. The model leaves out pausing, worker plugins, threads that slow each
other down, and the time of the worker's own event loop.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from dask.typing import Key

from dask_gpurt.plugins.patches.simulator import (
    EVENTS,
    Execute,
    ExecuteSuccessEvent,
    FindMissingEvent,
    GatherDep,
    GatherDepBusyEvent,
    GatherDepNetworkFailureEvent,
    GatherDepSuccessEvent,
    Instruction,
    RetryBusyWorkerEvent,
    RetryBusyWorkerLater,
    SendMessageToScheduler,
    StateMachineEvent,
    WorkerState,
    give_value,
    upcoming,
)
from dask_gpurt.plugins.simulation.shared_state import SharedState
from dask_gpurt.simulate.clock import ClockEvent
from dask_gpurt.simulate.cluster_model import WorkerModel
from dask_gpurt.simulate.memory_and_disk import MemoryAndDisk
from dask_gpurt.simulate.modelled_memory import ModelledMemory
from dask_gpurt.simulate.result import TaskRun, TransferRun
from dask_gpurt.simulate.workload import StableStr

#: Smallest transfer that counts in measured bandwidths, as in distributed.
MEASURED_NBYTES = 1_000_000
#: Tasks of each thread whose inputs are read ahead.
AHEAD = 4
#: Shortest duration of a task: distributed's stealing asserts that durations are positive.
LEAST_TASK_S = 1e-6


@dataclass
class _Execution:
    run_id: int
    start_s: float
    inputs: tuple[Key, ...]
    left_s: float  # of its duration at speed 1, at `since_s`
    since_s: float
    end: ClockEvent | None = None  # while it computes


@dataclass
class _Fetch:
    """A request of this worker to a peer, until it is answered or has failed."""

    source: str
    instruction: GatherDep
    start_s: float
    transfer: int | None = None  # while bytes are in flight


class ModelledWorker:
    """One worker of a simulation.

    Parameters
    ----------
    model
        Properties of the worker.
    shared
        State shared with the other workers.
    validate
        Let the state machine check itself after every event. Slow.
    """

    def __init__(self, model: WorkerModel, shared: SharedState, *, validate: bool) -> None:
        self.address = model.address
        #: The address for state machines, which keep addresses in sets.
        self.stable_address = StableStr(model.address)
        self.alive = True
        self.speed = model.speed
        self.memory_nbytes = model.memory_nbytes
        self.peak_nbytes = 0
        self._shared = shared
        self._host = model.host
        cluster = shared.cluster
        has_disk = cluster.disk_nbytes_per_s is not None
        self.memory = ModelledMemory(model.memory_nbytes if has_disk else math.inf, shared.next_use)
        self._disk = MemoryAndDisk(
            self.memory,
            shared.transfers,
            (cluster.disk_of(model.host),) if has_disk else (),
            self._next_inputs,
        )
        self._startup_s = model.startup_s
        #: When it has its libraries; None before its first task.
        self._started_s: float | None = None if model.startup_s else 0.0
        limits = shared.limits
        self._state = WorkerState(
            nthreads=model.nthreads,
            address=self.stable_address,
            validate=validate,
            transfer_incoming_count_limit=limits.incoming_count,
            transfer_incoming_bytes_limit=model.memory_nbytes * limits.memory_fraction,
            transfer_message_bytes_limit=limits.message_nbytes,
        )
        self._executions: dict[Key, _Execution] = {}
        self._fetches: dict[int, _Fetch] = {}
        self._fetch_count = 0
        self._outgoing = 0
        self._bandwidth: float | None = None
        self._bandwidth_workers: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))

    def hold(self, key: StableStr) -> None:
        """Take a result that nobody sent."""
        give_value(self._state, key, self._shared.models[key].nbytes)
        self._keep((key,))
        self.peak_nbytes = self._state.nbytes

    # Messages from the scheduler.

    def receive(self, message: dict[str, Any]) -> None:
        """Handle a message from the scheduler."""
        if not self.alive:
            return
        op = message["op"]
        if op == "close":
            self.die()
            return
        event = EVENTS.get(op)
        if event is None:
            return  # plugins and status changes, which are not modelled
        content = {name: value for name, value in message.items() if name != "op"}
        if "who_has" in content:
            content["who_has"] = {
                key: [self._shared.workers[address].stable_address for address in holders]
                for key, holders in content["who_has"].items()
            }
        if op == "remove-worker":
            content["worker"] = self._shared.workers[content["worker"]].stable_address
        self._handle(event(**content))
        if op in ("free-keys", "remove-replicas"):
            for key in message["keys"]:
                if key not in self._state.data:
                    self._disk.drop(key)

    def _handle(self, event: StateMachineEvent) -> None:
        for instruction in self._state.handle_stimulus(event):
            self._follow(instruction)
        self.peak_nbytes = max(self.peak_nbytes, self._state.nbytes)

    def _follow(self, instruction: Instruction) -> None:
        if isinstance(instruction, SendMessageToScheduler):
            self._shared.send(self.address, instruction.to_dict())
        elif isinstance(instruction, Execute):
            self._execute(instruction)
        elif isinstance(instruction, GatherDep):
            self._request(instruction)
        elif isinstance(instruction, RetryBusyWorkerLater):
            event = RetryBusyWorkerEvent(worker=instruction.worker, stimulus_id="retry-busy")
            # The delay that distributed's worker uses.
            self._later(0.15, lambda: self._handle(event))

    def _later(self, delay_s: float, do: Callable[[], object]) -> ClockEvent:
        def if_alive() -> None:
            if self.alive:
                do()

        return self._shared.clock.call_later(delay_s, if_alive)

    # Execution of tasks: wait for memory, read inputs from disk, compute, exchange, finish.

    def _execute(self, instruction: Execute) -> None:
        key = instruction.key
        now_s = self._shared.clock.now_s
        ts = self._state.tasks[key]
        inputs = tuple(one.key for one in ts.dependencies)
        duration_s = max(self._shared.models[key].duration_s, LEAST_TASK_S)
        self._executions[key] = _Execution(ts.run_id, now_s, inputs, duration_s, now_s)
        if self._started_s is None:
            self._started_s = now_s + self._startup_s / self.speed
        if now_s < self._started_s:
            self._later(self._started_s - now_s, partial(self._begin, key))
        else:
            self._begin(key)

    def _begin(self, key: Key) -> None:
        shards_nbytes = sum(
            exchange.output_nbytes(key)
            for exchange in self._shared.exchanges.of_output.get(key, ())
        )
        self._disk.begin(
            self._executions[key].inputs,
            self._shared.models[key].nbytes,
            shards_nbytes,
            partial(self._compute, key),
        )

    def _next_inputs(self) -> Iterator[list[Key]]:
        for ts in upcoming(self._state, AHEAD * self._state.nthreads):
            yield [one.key for one in ts.dependencies]

    def _compute(self, key: Key) -> None:
        execution = self._executions.get(key)
        if execution is None:
            return  # the worker died while it read
        execution.since_s = self._shared.clock.now_s
        execution.end = self._later(execution.left_s / self.speed, partial(self._exchange, key))

    def _exchange(self, key: Key) -> None:
        self._executions[key].end = None
        exchanges = self._shared.exchanges
        done = partial(self._executed, key)
        if key in exchanges.of_transfer:
            exchanges.of_transfer[key].send(self, done)
        elif key in exchanges.of_barrier:
            exchanges.of_barrier[key].at_barrier(done)
        else:
            done()

    def _executed(self, key: Key) -> None:
        execution = self._executions.pop(key, None)
        if execution is None:
            return  # the worker died while it sent
        shared = self._shared
        now_s, nbytes = shared.clock.now_s, shared.models[key].nbytes
        shared.done.add(key)
        shared.tasks.append(TaskRun(str(key), self.address, execution.start_s, now_s))
        self._disk.end(execution.inputs, nbytes)
        self._handle(
            ExecuteSuccessEvent(
                key=key,
                run_id=execution.run_id,
                value=nbytes,
                start=execution.start_s,
                stop=now_s,
                nbytes=nbytes,
                type=int,
                stimulus_id=f"task-finished-{now_s}",
            )
        )
        self._keep((key,))

    def _keep(self, keys: Iterable[Key]) -> None:
        """Count results that came into memory."""
        models = self._shared.models
        self._disk.keep((key, models[key].nbytes) for key in keys if key in self._state.data)

    def take_shards(self, nbytes: float) -> None:
        """Take shards of a shuffle."""
        self._disk.take_shards(nbytes)

    def change_speed(self, speed: float) -> None:
        """Continue at another speed."""
        now_s = self._shared.clock.now_s
        for key, execution in self._executions.items():
            if execution.end is None:
                continue  # it reads or sends, which takes as long as before
            execution.end.cancel()
            execution.left_s -= (now_s - execution.since_s) * self.speed
            execution.since_s = now_s
            execution.end = self._later(
                max(execution.left_s, 0.0) / speed, partial(self._exchange, key)
            )
        self.speed = speed

    def executing(self) -> dict[Key, float]:
        """Return the seconds since the start of each running task."""
        now_s = self._shared.clock.now_s
        return {key: now_s - one.start_s for key, one in self._executions.items()}

    # Fetching results from peers.

    def _request(self, instruction: GatherDep) -> None:
        shared = self._shared
        source = shared.workers[str(instruction.worker)]
        number = self._fetch_count
        self._fetch_count += 1
        self._fetches[number] = _Fetch(source.address, instruction, shared.clock.now_s)
        latency_s = shared.cluster.network.route(self.address, source.address).latency_s
        self._later(latency_s, lambda: source.serve(self, number))

    def serve(self, target: ModelledWorker, number: int) -> None:
        """Answer a peer's request: send the results, or report that too many peers ask."""
        fetch = target._fetches.get(number)
        if fetch is None or not target.alive:
            return
        shared = self._shared
        route = shared.cluster.network.route(self.address, target.address)
        instruction = fetch.instruction
        if not self.alive:
            target._later(route.latency_s, lambda: target._failed(number))
            return
        # distributed allows twice as many transfers to peers on the same host.
        limit = shared.limits.outgoing_count * (2 if self._host == target._host else 1)
        if self._outgoing >= limit:
            target._later(route.latency_s, lambda: target._refused(number))
            return
        data = {
            key: self._state.data[key] for key in instruction.to_gather if key in self._state.data
        }
        nbytes = sum(self._state.tasks[key].get_nbytes() for key in data)
        self._outgoing += 1

        def sent() -> None:
            fetch.transfer = None
            self._outgoing -= 1
            shared.count_on_links(route.links, nbytes)
            target._later(route.latency_s, lambda: target._received(number, data, nbytes))

        def read() -> None:
            self.memory.unuse(data)
            if number in target._fetches:
                fetch.transfer = shared.transfers.start(route.links, nbytes, sent)
            else:
                self._outgoing -= 1

        self._disk.bring(data, read)

    def _received(self, number: int, data: dict[Key, object], nbytes: int) -> None:
        if number not in self._fetches:
            return  # the peer disappeared before the last byte arrived
        fetch = self._fetches.pop(number)
        now_s = self._shared.clock.now_s
        duration_s = max(now_s - fetch.start_s, 0.001)
        self._shared.moved.append(
            TransferRun(
                tuple(map(str, data)), fetch.source, self.address, fetch.start_s, now_s, nbytes
            )
        )
        self._record_transfer(fetch, data, nbytes, duration_s, now_s)
        instruction = fetch.instruction
        self._handle(
            GatherDepSuccessEvent(
                worker=instruction.worker,
                total_nbytes=instruction.total_nbytes,
                data=data,
                stimulus_id=f"gather-dep-success-{now_s}",
            )
        )
        self._keep(data)

    def _record_transfer(
        self,
        fetch: _Fetch,
        data: dict[Key, object],
        nbytes: int,
        duration_s: float,
        now_s: float,
    ) -> None:
        """Record a transfer's bandwidth and times, which a worker reports to the scheduler."""
        if nbytes > MEASURED_NBYTES:
            measured = nbytes / duration_s
            self._bandwidth = (
                measured if self._bandwidth is None else self._bandwidth * 0.95 + measured * 0.05
            )
            total, count = self._bandwidth_workers[fetch.source]
            self._bandwidth_workers[fetch.source] = (total + measured, count + 1)
        for key in data:
            waiting = next(iter(self._state.tasks[key].dependents), None)
            if waiting is not None:
                waiting.startstops.append(
                    {
                        "action": "transfer",
                        "start": fetch.start_s,
                        "stop": now_s,
                        "source": fetch.source,
                    }
                )
                return

    def _refused(self, number: int) -> None:
        self._end_fetch(number, GatherDepBusyEvent, "gather-dep-busy")

    def _failed(self, number: int) -> None:
        self._end_fetch(number, GatherDepNetworkFailureEvent, "gather-dep-network-failure")

    def _end_fetch(
        self,
        number: int,
        event: type[GatherDepBusyEvent | GatherDepNetworkFailureEvent],
        stimulus_id: str,
    ) -> None:
        fetch = self._fetches.pop(number, None)
        if fetch is not None:
            worker, nbytes = fetch.instruction.worker, fetch.instruction.total_nbytes
            self._handle(event(worker=worker, total_nbytes=nbytes, stimulus_id=stimulus_id))

    # Heartbeats, and the end.

    def metrics(self, default_bandwidth: float) -> dict[str, Any]:
        """Return the metrics of a heartbeat. Measured bandwidths are reported once."""
        peers = dict(self._bandwidth_workers)
        self._bandwidth_workers.clear()
        return {
            "bandwidth": {
                "total": default_bandwidth if self._bandwidth is None else self._bandwidth,
                "workers": peers,
                "types": {},
            },
            "digests_total_since_heartbeat": {},
            "managed_bytes": self._state.nbytes,
            "spilled_bytes": {"memory": 0, "disk": 0},
            "memory": self._state.nbytes,
            "cpu": 100.0 * len(self._executions),
            "time": self._shared.clock.now_s,
            "event_loop_interval": 0.02,
            "transfer": {
                "incoming_bytes": self._state.transfer_incoming_bytes,
                "incoming_count": self._state.transfer_incoming_count,
                "outgoing_count": self._outgoing,
            },
        }

    def heartbeat(self) -> None:
        """Do the periodic work that a worker does with every heartbeat."""
        if self._state.missing_dep_flight:
            self._handle(FindMissingEvent(stimulus_id="find-missing"))

    def die(self) -> None:
        """Disappear: stop all work, and break all transfers from and to this worker."""
        self.alive = False
        self._executions.clear()
        shared = self._shared
        for fetch in self._fetches.values():
            if fetch.transfer is not None:
                shared.transfers.abort(fetch.transfer)
                shared.workers[fetch.source]._outgoing -= 1
        self._fetches.clear()
        for peer in shared.workers.values():
            if peer.alive:
                peer._peer_lost(self)

    def _peer_lost(self, peer: ModelledWorker) -> None:
        latency_s = self._shared.cluster.network.route(peer.address, self.address).latency_s
        for number, fetch in self._fetches.items():
            if fetch.source == peer.address and fetch.transfer is not None:
                self._shared.transfers.abort(fetch.transfer)
                self._later(latency_s, partial(self._failed, number))
