"""A shuffle run on this package's data plane, under distributed's control plane.

On each worker, distributed's shuffle plugin calls an `ExchangeRun` as it calls its own runs. Run
ids, owners, the barrier, restarts and the refusal of stale runs stay distributed's. This package
moves the data: `shuffle.plan` cuts shards, `shuffle.shards` stores them, `transport` sends them. A
subclass (`frame_run`, `array_run`) cuts input partitions and assembles outputs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dask_gpurt.config import ShuffleSettings
from dask_gpurt.devices.device import Priority
from dask_gpurt.devices.host_memory.run_memory import RunMemory
from dask_gpurt.devices.ledger import COMPUTE, WAITING
from dask_gpurt.errors import (
    DamagedError,
    IncompleteExchangeError,
    PartitionReleasedError,
    ProtocolError,
    ShardStorageError,
    TransportError,
)
from dask_gpurt.frames.adapter import BodyAdapter, Empty, Packed, Piece
from dask_gpurt.plugins.dashboard.shuffle_fields import Writes
from dask_gpurt.plugins.patches.p2p import (
    P2PConsistencyError,
    P2POutOfDiskError,
    ShuffleClosedError,
    ShuffleSpec,
    context_meter,
    event_loop,
    sync,
    thread_time,
)
from dask_gpurt.plugins.shielding import in_a_thread, to_its_end
from dask_gpurt.plugins.shuffle.fine_metrics import (
    FineMetrics,
    RunClock,
    amount,
    left_host,
)
from dask_gpurt.plugins.shuffle.messenger import Messenger
from dask_gpurt.plugins.shuffle.peer_links import DAMAGED, RELINK
from dask_gpurt.plugins.shuffle.run_control import RunControl
from dask_gpurt.plugins.tracing.ledger_hook import DiskEntries, enter_phase, enter_receipt
from dask_gpurt.plugins.worker.worker_runtime import runtime_of
from dask_gpurt.shuffle.credits import in_turn
from dask_gpurt.shuffle.figures import RunFigures
from dask_gpurt.shuffle.messages import Outgoing, shard_of
from dask_gpurt.shuffle.plan import ExchangePlan, RowsBySlot
from dask_gpurt.shuffle.routing import Routing
from dask_gpurt.shuffle.shard import Shard
from dask_gpurt.shuffle.shards import ShardStore
from dask_gpurt.shuffle.spill_file import SpillFile
from dask_gpurt.tracing.lane_names import RECEIVE
from dask_gpurt.transport import wire
from dask_gpurt.transport.sending.outbox import Outbox

if TYPE_CHECKING:
    from dask_gpurt.plugins.patches.p2p import ShuffleWorkerPlugin

logger = logging.getLogger("dask_gpurt.shuffle")

#: Input partitions that are cut together: the name and the data of each (opened, if a frame).
Inputs = Sequence[tuple[Any, Any]]


class ExchangeRun:
    """One attempt at a shuffle, on one worker; a subclass knows the kind of data.

    It has the interface of distributed's `ShuffleRun`. `add_partition` and `get_output_partition`
    run in threads of tasks, spills in a thread of their own, all else on the worker's event loop.

    Parameters
    ----------
    kind
        Name of the kind of data, for reports.
    adapter
        Packs, unpacks and joins the data of this run.
    """

    def __init__(
        self,
        spec: ShuffleSpec[Any],
        settings: ShuffleSettings,
        kind: str,
        adapter: BodyAdapter,
        run_id: int,
        span_id: str | None,
        plan: ExchangePlan,
        plugin: ShuffleWorkerPlugin,
    ) -> None:
        runtime = runtime_of(plugin.worker)
        worker = plugin.worker
        self.id = spec.id
        self.run_id = run_id
        self.span_id = span_id
        self.local_address = worker.address
        self.closed = False
        self.transferred = False
        self.start_time = time.time()
        self._control = RunControl(worker, self.id, run_id)
        self._exception: Exception | None = None
        self._closed_event = asyncio.Event()
        #: Set once the run has failed or closes: nobody needs its results any more.
        self._ended = asyncio.Event()
        self._last_report: dict[str, Any] | None = None
        self._worker, self._settings, self._runtime, self._plan = worker, settings, runtime, plan
        self._sends, self._disk_writes = Writes(), Writes()
        self._disk = DiskEntries(runtime.ledger, run_id)
        self.figures = RunFigures(self.id, run_id, kind, self.start_time, worker.state.nthreads)
        self._clock = RunClock(self.figures)
        slots, budget = plan.slots_of_worker.get(worker.address, (0, 0)), runtime.budget(settings)
        pools = runtime.pool, runtime.links.outgoing
        self._memory = memory = RunMemory(*pools, slots, budget.limit_nbytes)
        self.memory_for, self.outgoing_memory = memory.stored, memory.outgoing
        self._store = ShardStore(
            adapter,
            slots,
            os.path.join(worker.local_directory, f"gpurt-shuffle-{self.id}-{run_id}"),
            budget,
            runtime.counters,
            partial(SpillFile, reading=self._clock.waiting_for_disk),
            on_disk_io=self._disk_io,
            run_later=self._run_later,
            empty_at=memory.stored,
            slots_per_lane=memory.slots_per_lane,
            readers=self._plan.readers_of_slot,
            may_spill=self.id not in runtime.kept_off_disk,
        )
        self._metrics = FineMetrics(worker.digest_metric, span_id)
        self._peers = in_turn(self._plan.workers, self.local_address)
        self._routing = Routing(self.local_address, self._plan.workers, settings.routing)
        n_hops = len({self._routing.hop(peer) for peer in self._peers})
        self._messenger = Messenger(self, worker, settings, adapter, self._peers, n_hops)
        self._send_budget = runtime.send_budget(settings)
        self._outbox: Outbox[Outgoing] = Outbox(
            self._send,
            event_loop(worker),
            budget=self._send_budget,
            message_nbytes=self._messenger.message_nbytes,
            concurrency=self._messenger.n_messages,
        )
        self._received_nbytes = 0
        runtime.begin_run(self)
        runtime.links.transport = settings.transport
        self._spilling = runtime.lanes.spill

    def __repr__(self) -> str:
        return f"{type(self).__name__}<{self.id}[{self.run_id}]> on {self.local_address}"

    # ------------------------------------------------------------------ transfer

    def add_partition(self, data: Any, partition_id: Any, **kwargs: Any) -> int:
        """Cut an input partition into shards and send them to their owners."""
        self.raise_if_closed()
        if self.transferred:
            raise RuntimeError(f"Cannot add more partitions to {self}")
        for inputs in self._ready_groups(data, partition_id):
            with self._metrics.foreground():
                self._add(inputs)
        self.raise_if_closed()
        return self.run_id

    def _ready_groups(self, data: Any, partition_id: Any) -> Sequence[Inputs]:
        """Return groups of input partitions to cut now; empty if the task has more to hand over."""
        return [[(partition_id, data)]]

    def _add(self, inputs: Inputs) -> None:
        with (
            self._timed("partition"),
            context_meter.meter("p2p-shard-partition-noncpu"),
            context_meter.meter("p2p-shard-partition-cpu", func=thread_time),
        ):
            local: list[Shard] = []
            outgoing: dict[str, list[Outgoing]] = {}
            for worker, header, made in self._shards_of(inputs):
                if isinstance(made, Packed):
                    shards = outgoing.setdefault(self._routing.hop(worker), [])
                    shards.append(Outgoing(header, made, worker))
                    if made.is_on_device:
                        self._messenger.expect_device_shards()
                else:
                    local.append(shard_of(header, body=made))
        local_nbytes = sum(shard.nbytes for shard in local)
        sent_nbytes = sum(shard.nbytes for shards in outgoing.values() for shard in shards)
        amount(
            "p2p-shards", local_nbytes + sent_nbytes, len(local) + sum(map(len, outgoing.values()))
        )
        n_in = len(inputs)
        self._runtime.counters.add(partitions_in=n_in, local_nbytes=local_nbytes)
        n_rows = sum(shard.n_rows for shard in local)
        n_rows += sum(shard.header.n_rows for shards in outgoing.values() for shard in shards)
        self.figures.add(rows_in=n_rows, partitions_in=n_in, local_nbytes=local_nbytes)
        # Cut all shards before any is sent. If the task fails while it cuts, and runs again, no
        # receiver has a part of the failed attempt.
        self._store.add(local)
        context_meter.digest_metric("p2p-comms-limiter", 1, "count")
        with (
            self._timed("held_back"),
            self._runtime.ledger.timed(COMPUTE, WAITING),
            context_meter.meter("p2p-comms-limiter"),
        ):
            for address in self._peers:
                if address in outgoing:
                    self._outbox.put(address, outgoing.pop(address))
            if not self._settings.overlap:
                sync(self._worker.loop, self._outbox.flush)
        self.make_room()

    def _shards_of(self, inputs: Inputs) -> Iterable[tuple[str, wire.ShardHeader, Any]]:
        """Yield the shards of input partitions: receiver, header, body (`Packed` if remote)."""
        raise NotImplementedError

    def _cut(
        self, source: int, parts: Sequence[RowsBySlot]
    ) -> Iterator[tuple[int, str, wire.ShardHeader, Empty]]:
        """Yield the shards of input partitions: number of the part, receiver, header, allocator.

        Parameters
        ----------
        source
            Number of the input partition; the lowest number if there are several.
        parts
            All rows of these partitions, in parts of one layout each.
        """
        attempt = random.getrandbits(64)
        for worker, slots in self._plan.slots_of_worker.items():
            cuts = [(which, *cut) for which, part in enumerate(parts) for cut in part.cuts(*slots)]
            for number, (which, a, b) in enumerate(cuts):
                part = parts[which]
                origins = part.origins(a, b)
                header = wire.ShardHeader(
                    layout_key=part.layout_key,
                    source=source,
                    attempt=attempt,
                    number=number,
                    count=len(cuts),
                    first_slot=a,
                    packed_rows=wire.pack_rows(np.diff(part.before[a : b + 1])),
                    packed_origins=wire.pack_origins(*origins) if origins is not None else b"",
                )
                stays = worker == self.local_address
                here = partial(self.memory_for, first_slot=a)
                yield which, worker, header, here if stays else self.outgoing_memory

    async def _send(self, address: str, shards: Sequence[Outgoing]) -> None:
        began = time.perf_counter()
        nbytes = sum(shard.nbytes for shard in shards)
        with self._metrics.background("background-comms", on_loop=True):
            with context_meter.meter("process"), context_meter.meter("send"):
                try:
                    sent = await self._messenger.send(address, shards)
                except OSError:
                    if not self._routing.is_two_level:
                        raise
                    sent = await self._messenger.send_around(address, shards)
            amount("process", nbytes)
            left_host(sent.raw_nbytes, sent.wire_nbytes)
        seconds, until_s = self._clock.since(began)
        self._sends.add(nbytes, seconds)
        self.figures.sent(address, nbytes, sent.raw_nbytes, sent.wire_nbytes, seconds, until_s)

    async def receive(self, data: Any) -> dict[str, Any]:
        """Handler: store the shards that a peer sent. Answer once there is room for more."""
        self.raise_if_closed()
        start_s = self._runtime.ledger.clock()
        try:
            if "offers" in data:
                return await self._runtime.links.accept(data["offers"])
            with self._timed("receive"):
                sender, number = data["sender"], data["message"]
                self._messenger.heard_from(sender, number)
                shards = await self._messenger.receive(data["header"], data["payload"])
        except (TypeError, KeyError) as error:
            raise ProtocolError(
                f"a field of this shuffle message is missing or of another type: {error!r}"
            ) from error
        except TransportError:
            return {"status": RELINK}
        except DamagedError as error:
            # Log the text alone: the error would keep the message's buffers in memory.
            logger.warning("shuffle %s: %s; the peer sends it again", self.id, str(error))
            return {"status": DAMAGED}
        nbytes = sum(shard.nbytes for shard in shards)
        self._received_nbytes += nbytes
        enter_receipt(self._runtime.ledger, nbytes, start_s, sender, self.run_id, number)
        self._runtime.counters.add(received_nbytes=nbytes)
        self._store.add(shards)
        if self._store.is_over_limit:
            # The peer and its producers wait for this answer: this is the back-pressure.
            with self._clock.waiting_for_disk():
                await asyncio.wrap_future(
                    self._spilling.submit(self._spill, priority=Priority.HIGH, path="spill")
                )
        return {"status": "OK", "credit": self._messenger.credit_nbytes()}

    # ------------------------------------------------------------------ barrier

    async def barrier(self, run_ids: Sequence[int]) -> int:
        """Tell all workers, through the scheduler, that every input partition was added."""
        self.raise_if_closed()
        consistent = all(run_id == self.run_id for run_id in run_ids)
        await self._control.barrier(self._ended, consistent=consistent)
        return self.run_id

    async def inputs_done(self) -> None:
        """Handler: no task will add a partition any more; flush the outbox."""
        self.raise_if_closed()
        self.transferred = True
        try:
            await self._outbox.flush()
        except Exception as error:
            self._exception = error
            raise
        # If the run was closed meanwhile, it dropped its queue, and those shards never arrived.
        self.raise_if_closed()

    # ------------------------------------------------------------------ unpack

    def get_output_partition(self, partition_id: Any, key: Any, **kwargs: Any) -> Any:
        """Assemble an output partition, on the worker that owns it."""
        self.raise_if_closed()
        owner = self._plan.worker_for[partition_id]
        if owner != self.local_address:
            sync(self._worker.loop, self._control.move_task, key, owner)
        if not self.transferred:
            raise RuntimeError("`get_output_partition` called before barrier task")
        self._memory.all_stored()
        slot = self._plan.slot_of[partition_id]
        with (
            self._timed("unpack"),
            self._metrics.foreground(),
            context_meter.meter("p2p-get-output-noncpu"),
            context_meter.meter("p2p-get-output-cpu", func=thread_time),
        ):
            try:
                self._store.seal()
                with self._disk.timed("read", "disk > shards"):
                    pieces = self._store.pieces(slot)
            except (IncompleteExchangeError, PartitionReleasedError, ShardStorageError) as error:
                self.raise_if_closed()
                if isinstance(error, ShardStorageError):
                    self._runtime.keep_off_disk(self.id)
                sync(self._worker.loop, self._control.start_over, error)
            result = self._assemble(partition_id, pieces)
        self._runtime.counters.add(partitions_out=1)
        self.figures.add(outputs=1)
        self._runtime.release_with(key, self._store, slot)
        self.make_room()
        return result

    def make_room(self) -> None:
        """Spill shards if they exceed their budget. Runs in a thread."""
        if self._store.is_over_limit:
            with self._clock.waiting_for_disk():
                self._spill()

    def relieve(self) -> None:
        """Spill shards, since the process is short of memory; give up if no disk takes them."""
        self._store.try_disk_again()
        self.make_room()
        reason = self._store.why_stuck()
        if reason is not None and not self.closed:
            logger.error("%s: memory is short, and no shard can be spilled (%s)", self, reason)
            self._worker.loop.add_callback(self.give_up, P2POutOfDiskError())

    def give_up(self, error: Exception) -> None:
        """End the run on this worker. Its tasks fail with the error. Runs on the event loop."""
        self.fail(error)
        self._ending = asyncio.ensure_future(self.close())

    def _spill(self) -> None:
        if self._store.is_over_limit:
            with self._metrics.background("background-disk", on_loop=False):
                with context_meter.meter("process"), context_meter.meter("disk-write"):
                    with self._disk_writes.timed(), self._disk.timed("spill", "shards > disk"):
                        self._store.make_room()

    def _disk_io(self, label: str, nbytes: int) -> None:
        """Count a shard that was written (`disk-write`) or read back (`p2p-disk-read`)."""
        amount(label, nbytes)
        self._disk.add(nbytes)
        if label == "disk-write":
            amount("process", nbytes)
            self._disk_writes.add(nbytes)

    def _run_later(self, call: Callable[[], None]) -> None:
        """Run a call in the spill lane; no caller waits for it."""
        try:
            self._spilling.submit(call, path="remove")
        except RuntimeError:  # the lane closed with the last run
            call()

    def _assemble(self, partition_id: Any, pieces: Sequence[Piece]) -> Any:
        """Return an output partition, given its pieces in the order of their inputs."""
        raise NotImplementedError

    # ------------------------------------------------------------------ life

    def raise_if_closed(self) -> None:
        """Raise the reason why the run ended, if it did."""
        if self.closed:
            if self._exception and not isinstance(self._exception, P2PConsistencyError):
                raise self._exception
            # The scheduler may start a task again while its first attempt still runs here.
            # distributed retries after this error alone; any other one of the first attempt would
            # fail the second one.
            raise ShuffleClosedError(f"{self} has already been closed") from self._exception

    def fail(self, exception: Exception) -> None:
        """End the run: the scheduler gave it up."""
        if not self.closed:
            self._exception = exception
        self._ended.set()

    async def close(self) -> None:
        if self.closed:
            await self._closed_event.wait()
            return
        self.closed = True
        self._ended.set()
        # A closing worker waits for this close, and would hang if it were cancelled half way.
        await to_its_end(self._outbox.close)
        self._send_budget.forget((self.id, self.run_id))
        self._last_report = self.report()
        try:
            await in_a_thread(self._free)
        finally:
            self._runtime.end_run(self, self._last_report)
            self._closed_event.set()

    def _free(self) -> None:
        """Free files and pages, which takes time where there are many. Runs in a thread."""
        with contextlib.closing(self._memory):
            self._store.close()

    def report(self) -> dict[str, Any]:
        """Return a snapshot of the statistics of this run on this worker."""
        if self._last_report is not None:
            # `close` frees the shards, after which their rows can no longer be counted.
            return self._last_report
        rows = self._store.rows_of_slots().items()
        of_partition = {self._plan.partitions[slot]: n for slot, n in rows}
        return self.figures.snapshot(of_partition, self._runtime.links.bandwidth)

    @contextlib.contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.figures.spent(phase, self._clock.since(began)[0])
            if phase != RECEIVE:  # each received message has its own ledger entry
                enter_phase(self._runtime.ledger, phase, began, self.run_id)

    def heartbeat(self) -> dict[str, Any]:
        """Return the progress in the shape that distributed's dashboard draws."""
        return {
            "disk": self._disk_writes.shown(
                memory_nbytes=self._store.resident_nbytes,
                limit_nbytes=self._runtime.limit_nbytes,
                read_nbytes=self._store.unspilled_nbytes,
                n_buckets=1,
            ),
            "comm": self._sends.shown(
                memory_nbytes=self._outbox.waiting_nbytes,
                limit_nbytes=self._send_budget.most_nbytes,
                read_nbytes=self._received_nbytes,
                n_buckets=len(self._plan.workers),
            ),
            "start": self.start_time,
        }
