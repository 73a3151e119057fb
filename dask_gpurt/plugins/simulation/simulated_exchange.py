"""A simulated P2P shuffle: parts travel from transfers to the owners of outputs, beside compute.

As in a run on real workers, each output belongs to one worker before the first part is sent.
A transfer ends when its worker has few enough bytes to send. The barrier ends when all parts have
arrived. Parts for one owner that wait on a worker travel together.

Not modelled: compression on the way, relays, and the loss of a worker.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
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
#: Owners to which a worker sends at a time. The runtime takes more, which fills links no better,
#: but makes a simulation of many workers slow.
WINDOW = 4


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
        self._nbytes = model.nbytes
        #: The share of all bytes that each output reads, and that each owner gets. Larger outputs
        #: read more.
        self._output_shares: dict[StableStr, float] = {
            one.key: one.nbytes / everything if everything else 1 / len(outputs) for one in outputs
        }
        self._shares: dict[str, float] = {}
        self._senders: dict[str, _Sender] = {}
        self._at_barrier: list[Callable[[], None]] = []

    def _place_outputs(self) -> None:
        """Give each worker neighbouring outputs, as many as the others."""
        addresses = list(self._shared.workers)
        shares: defaultdict[str, float] = defaultdict(float)
        for number, (key, share) in enumerate(self._output_shares.items()):
            owner = addresses[number * len(addresses) // len(self._output_shares)]
            shares[owner] += share
            self._restrict(key, owner)
        self._shares = shares

    def send(self, source: ModelledWorker, done: Callable[[], None]) -> None:
        """Send the parts of one transfer. Call `done` when the transfer may end."""
        if not self._shares:
            self._place_outputs()
        sender = self._senders.get(source.address)
        if sender is None:
            sender = self._senders[source.address] = _Sender(
                source, self._others(source.address), self._send_message
            )
        for owner, share in self._shares.items():
            nbytes = self._part_nbytes * share
            if owner == source.address:
                source.take_shards(nbytes)
            elif nbytes:
                sender.add(owner, nbytes)
        sender.go_on(done)

    def _others(self, source: str) -> list[str]:
        """Return the other workers, beginning with the one after the source."""
        addresses = list(self._shared.workers)
        position = addresses.index(source)
        return addresses[position + 1 :] + addresses[:position]

    def _send_message(
        self, source: str, owner: str, nbytes: float, done: Callable[[], None]
    ) -> None:
        shared = self._shared
        start_s = shared.clock.now_s
        route = shared.cluster.network.route(source, owner)

        def sent() -> None:
            shared.count_on_links(route.links, int(nbytes))
            shared.clock.call_later(route.latency_s, arrived)

        def arrived() -> None:
            now_s = shared.clock.now_s
            shared.moved.append(
                TransferRun((self._barrier_key,), source, owner, start_s, now_s, int(nbytes))
            )
            shared.workers[owner].take_shards(nbytes)
            done()
            self._end_if_quiet()

        shared.transfers.start(route.links, nbytes, sent)

    def at_barrier(self, done: Callable[[], None]) -> None:
        """Call `done` when no part is under way."""
        self._at_barrier.append(done)
        self._end_if_quiet()

    def _end_if_quiet(self) -> None:
        if not any(sender.waiting_nbytes for sender in self._senders.values()):
            waiting, self._at_barrier = self._at_barrier, []
            for done in waiting:
                done()

    def output_nbytes(self, key: Key) -> float:
        """Return the bytes of the shards that an output reads."""
        return self._nbytes * self._output_shares[StableStr(str(key))]


class _Sender:
    """The parts that one worker has to send: a message to a few owners at a time.

    Owners take turns, each worker beginning with another one, so that senders do not meet at one
    receiver.
    """

    def __init__(
        self,
        source: ModelledWorker,
        turns: list[str],
        send: Callable[[str, str, float, Callable[[], None]], None],
    ) -> None:
        self._source = source.address
        self._send = send
        self._turns = turns
        self._limit_nbytes = max(MAX_WAITING_NBYTES, MAX_WAITING_SHARE * source.memory_nbytes)
        #: Bytes to send to each owner, in the order of turns.
        self._queued: dict[str, float] = {}
        self._active: set[str] = set()
        self._held_back: list[Callable[[], None]] = []
        #: Bytes to send and bytes under way.
        self.waiting_nbytes = 0.0

    def add(self, owner: str, nbytes: float) -> None:
        """Add bytes for an owner."""
        self._queued[owner] = self._queued.get(owner, 0.0) + nbytes
        self.waiting_nbytes += nbytes

    def go_on(self, done: Callable[[], None]) -> None:
        """Send, and call `done` when few enough bytes wait."""
        if self._queued and not self._active:
            self._queued = {
                owner: self._queued[owner] for owner in self._turns if owner in self._queued
            }
        self._held_back.append(done)
        self._fill()

    def _fill(self) -> None:
        for owner in list(self._queued):
            if len(self._active) >= WINDOW:
                break
            if owner not in self._active:
                self._active.add(owner)
                nbytes = self._queued.pop(owner)
                self._send(self._source, owner, nbytes, partial(self._sent, owner, nbytes))
        if self.waiting_nbytes <= self._limit_nbytes:
            held_back, self._held_back = self._held_back, []
            for done in held_back:
                done()

    def _sent(self, owner: str, nbytes: float) -> None:
        self._active.discard(owner)
        self.waiting_nbytes -= nbytes
        if not self._active and not self._queued:
            self.waiting_nbytes = 0.0  # without the rounding of many sums
        self._fill()
