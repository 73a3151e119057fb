"""A simulated P2P shuffle: parts travel from transfers to the owners of outputs, beside compute.

As in a run on real workers, each output belongs to one worker before the first part is sent.
A transfer ends when its worker has few enough bytes to send. The barrier ends when all parts have
arrived. Parts for one owner that wait on a worker travel together.

Not modelled: compression on the way, relays, and the loss of a worker.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING

from dask.typing import Key

from dask_gpurt.simulate.program import ExchangeModel, ProgramModel
from dask_gpurt.simulate.result import TransferRun
from dask_gpurt.simulate.workload import StableStr

if TYPE_CHECKING:
    from dask_gpurt.plugins.simulation.shared_state import SharedState
    from dask_gpurt.plugins.simulation.simulated_worker import ModelledWorker

#: Bytes that a worker may have to send while its transfers go on: at least these, or a share of its
#: memory, as `gpurt.shuffle.in-flight: auto`.
MAX_WAITING_NBYTES, MAX_WAITING_SHARE = 64 * 2**20, 0.05


class ModelledExchange:
    """One shuffle of a simulation.

    Parameters
    ----------
    model
        Its tasks and bytes.
    program
        The program that it is part of.
    shared
        State shared with the workers.
    restrict
        Restricts a task to a worker.
    """

    def __init__(
        self,
        model: ExchangeModel,
        program: ProgramModel,
        shared: SharedState,
        restrict: Callable[[StableStr, str], None],
    ) -> None:
        tasks = program.workload.tasks
        self._barrier_key = str(tasks[model.barrier].key)
        self._shared = shared
        self._restrict = restrict
        self._part_nbytes = model.nbytes / max(len(model.transfers), 1)
        outputs = [tasks[one] for one in model.outputs]
        everything = sum(one.nbytes for one in outputs)
        #: Bytes that each output reads. Larger outputs read more.
        self._output_nbytes: dict[StableStr, float] = {
            one.key: model.nbytes * (one.nbytes / everything if everything else 1 / len(outputs))
            for one in outputs
        }
        self._shares: dict[str, float] = {}
        #: Bytes to send and bytes in flight, by sender and owner.
        self._queued: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._flying: set[tuple[str, str]] = set()
        self._waiting_nbytes: defaultdict[str, float] = defaultdict(float)
        self._held_back: defaultdict[str, list[Callable[[], None]]] = defaultdict(list)
        self._at_barrier: list[Callable[[], None]] = []

    def _place_outputs(self) -> None:
        """Give each worker neighbouring outputs, as many as the others."""
        addresses = list(self._shared.workers)
        shares: defaultdict[str, float] = defaultdict(float)
        everything = sum(self._output_nbytes.values())
        for number, (key, nbytes) in enumerate(self._output_nbytes.items()):
            owner = addresses[number * len(addresses) // len(self._output_nbytes)]
            shares[owner] += nbytes / everything if everything else 0.0
            self._restrict(key, owner)
        self._shares = shares

    def send(self, source: ModelledWorker, done: Callable[[], None]) -> None:
        """Send the parts of one transfer. Call `done` when the transfer may end."""
        if not self._shares:
            self._place_outputs()
        for owner, share in self._shares.items():
            nbytes = self._part_nbytes * share
            if owner == source.address:
                source.take_shards(nbytes)
            elif nbytes:
                self._queued[source.address, owner] += nbytes
                self._waiting_nbytes[source.address] += nbytes
                self._fly(source.address, owner)
        if self._may_go_on(source.address):
            done()
        else:
            self._held_back[source.address].append(done)

    def _may_go_on(self, source: str) -> bool:
        limit = max(
            MAX_WAITING_NBYTES, MAX_WAITING_SHARE * self._shared.workers[source].memory_nbytes
        )
        return self._waiting_nbytes[source] <= limit

    def _fly(self, source: str, owner: str) -> None:
        pair = source, owner
        if pair in self._flying or not self._queued[pair]:
            return
        shared = self._shared
        nbytes = self._queued.pop(pair)
        self._flying.add(pair)
        start_s = shared.clock.now_s
        route = shared.machine.network.route(source, owner)

        def sent() -> None:
            for link in route.links:
                shared.link_nbytes[link] = shared.link_nbytes.get(link, 0) + int(nbytes)
            shared.clock.call_later(route.latency_s, arrived)

        def arrived() -> None:
            now_s = shared.clock.now_s
            shared.moved.append(
                TransferRun((self._barrier_key,), source, owner, start_s, now_s, int(nbytes))
            )
            self._flying.discard(pair)
            self._waiting_nbytes[source] -= nbytes
            shared.workers[owner].take_shards(nbytes)
            self._fly(source, owner)
            if self._may_go_on(source):
                for done in self._held_back.pop(source, ()):
                    done()
            self._end_if_quiet()

        shared.transfers.start(route.links, nbytes, sent)

    def at_barrier(self, done: Callable[[], None]) -> None:
        """Call `done` when no part is under way."""
        self._at_barrier.append(done)
        self._end_if_quiet()

    def _end_if_quiet(self) -> None:
        if not self._flying:
            waiting, self._at_barrier = self._at_barrier, []
            for done in waiting:
                done()

    def output_nbytes(self, key: Key) -> float:
        """Return the bytes of the shards that an output reads."""
        return self._output_nbytes[StableStr(str(key))]
