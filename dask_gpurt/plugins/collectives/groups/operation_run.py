"""One collective operation on one rank: it carries out the steps of a schedule over the links.

The event loop sends, receives and waits. The thread of the rank's task waits for the operation
anyway. So it does large copies and sums, and all work on a device (`task_thread`).

- A message of up to `INLINE_NBYTES` is copied and sent, and the operation does not wait for its
  answer. Two operations of a rank may be under way like that, no more.
- A larger one stays where it is until the peer answers. Inside a host the peer reads it from shared
  memory. Each peer has up to `WINDOW` of them to answer.
- A received slice goes to its place at once, or is kept until the sums of its step are made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from dask_gpurt.collectives.reduction import Operation
from dask_gpurt.collectives.slice_memory import Buffer, SliceMemory, bytes_of
from dask_gpurt.collectives.steps import SliceReceive, SliceSend, Step
from dask_gpurt.devices.host_memory.pool import Tenant
from dask_gpurt.errors import CollectiveError, DamagedError, ProtocolError
from dask_gpurt.plugins.collectives.groups.group_messages import OperationCall, SliceHeader
from dask_gpurt.plugins.collectives.groups.task_thread import TaskThread
from dask_gpurt.plugins.shuffle.payloads import is_inline
from dask_gpurt.shuffle.messages import Message
from dask_gpurt.transport import wire

if TYPE_CHECKING:
    from dask_gpurt.plugins.collectives.groups.group_member import GroupMember
    from dask_gpurt.plugins.shuffle.transports import Transport

T = TypeVar("T")

#: Larger messages are not copied: shared memory, or the caller's own, is sent.
INLINE_NBYTES = 1 << 16
#: Larger copies and sums are made by the thread of the task. To ask it takes about 100 us.
HERE_NBYTES = 1 << 18
#: Large messages under way to each peer.
WINDOW = 2


class OperationPlan:
    """The steps, memory and operation of one rank."""

    def __init__(
        self,
        subject: OperationCall,
        steps: Sequence[Step],
        memory: SliceMemory,
        operation: Operation | None = None,
    ) -> None:
        self.subject, self.steps, self.memory, self.operation = subject, steps, memory, operation
        self.encoded = subject.encoded()


class OperationRun:
    """One operation. On the event loop.

    Parameters
    ----------
    epoch
        Number of the operation in its group.
    prepare
        Makes the plan, once the subject is known. Runs in the task's thread.
    """

    def __init__(
        self,
        member: GroupMember,
        epoch: int,
        call: str,
        thread: TaskThread,
        plan: OperationPlan | None,
        prepare: Callable[[OperationCall], OperationPlan] | None = None,
    ) -> None:
        self._member, self.epoch, self.call, self._thread = member, epoch, call, thread
        self.plan, self._prepare = plan, prepare
        #: The value that another rank announced, if this one did not know it.
        self._announced: OperationCall | None = None
        self.step = -1
        self.error: BaseException | None = None
        self._waiting: asyncio.Future[None] | None = None
        #: Receives of the present step that have not arrived, and those that have.
        self._expected: dict[int, SliceReceive] = {}
        #: Messages that have come, by step and peer: whether the sender may hear that they are in.
        self._taken: dict[tuple[int, int], bool] = {}
        self._added: dict[range, dict[int, Buffer]] = {}
        #: Large messages that have no answer yet.
        self._sending: set[asyncio.Task[None]] = set()
        self._rooms: dict[int, asyncio.Semaphore] = {}
        #: Bytes of large messages with their checksum or 0, and whether they stay on this host.
        self._ready: dict[tuple[int, range, bool], asyncio.Task[tuple[Buffer, int]]] = {}
        self._tenant = Tenant()

    # ------------------------------------------------------------------ the steps

    async def run(self) -> None:
        """Carry out all steps.

        Raises
        ------
        CollectiveError
            The operation cannot go on, here or on another rank.
        """
        try:
            if self.plan is None:
                await self._until(lambda: self._announced is not None, self._still_silent)
                assert self._prepare is not None and self._announced is not None
                self.plan = await self._thread.run(partial(self._prepare, self._announced))
            for number, step in enumerate(self.plan.steps):
                await self._carry_out(number, step)
            self.step = len(self.plan.steps)
            self._member.changed()
            await self._until(lambda: not self._sending, self._unanswered)
            memory = self.plan.memory
            await self._work(self.plan.subject.nbytes, memory.finish)
        finally:
            for task in self._sending:
                task.cancel()
            self._ready.clear()
            self._added.clear()
            self._tenant.close()

    async def _carry_out(self, number: int, step: Step) -> None:
        assert self.plan is not None
        small: dict[range, Buffer] = {}
        for send in step.sends:
            if self.plan.memory.nbytes(send.slices) <= INLINE_NBYTES:
                if send.slices not in small:
                    small[send.slices] = await self._work(0, self._copied, send.slices)
                self._send_small(number, send, small[send.slices])
            else:
                self._send_large(number, send)
        self._expected = {receive.peer: receive for receive in step.receives}
        self.step = number
        self._member.changed()
        await self._until(lambda: not self._expected, self._still_silent)
        while self._added:
            slices, found = self._added.popitem()
            assert self.plan.operation is not None
            add = partial(self.plan.memory.add, self.plan.operation, slices, self._member.rank)
            await self._work(len(found) * self.plan.memory.nbytes(slices), add, found)
            del found

    async def _until(self, is_done: Callable[[], bool], late: Callable[[], str]) -> None:
        """Wait for a state; fail if nothing changes in time."""
        while not is_done() or self.error is not None:
            if self.error is not None:
                raise self.error
            loop = asyncio.get_running_loop()
            self._waiting = loop.create_future()
            timer = loop.call_later(self._member.timeout_s, self._fail_late, late)
            try:
                await self._waiting
            finally:
                timer.cancel()

    def _fail_late(self, late: Callable[[], str]) -> None:
        self._member.fail(
            CollectiveError(
                f"{self.call} of rank {self._member.rank} made no progress for"
                f" {self._member.timeout_s:g} s: {late()}"
            )
        )

    def _still_silent(self) -> str:
        ranks = ", ".join(map(str, sorted(self._expected))) or "the root"
        return f"no message of rank {ranks} has come, which may be late, stuck, or at its end"

    def _unanswered(self) -> str:
        return "peers have not taken its messages"

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def fail(self, error: BaseException) -> None:
        """End the operation with an error, unless it has one."""
        if self.error is None:
            self.error = error
            self._wake()

    async def _work(self, nbytes: int, function: Callable[..., T], *arguments: Any) -> T:
        """Do something here if it is small, else in the task's thread."""
        assert self.plan is not None
        if nbytes <= HERE_NBYTES and self.plan.memory.is_on_host:
            return function(*arguments)
        return await self._thread.run(partial(function, *arguments))

    # ------------------------------------------------------------------ sending

    def _copied(self, slices: range) -> Buffer:
        assert self.plan is not None
        return bytes_of(self.plan.memory.view(slices)).copy()

    def _header(self, step: int, slices: range, buffer: Buffer, checksum: int) -> bytes:
        assert self.plan is not None
        return SliceHeader(
            self.epoch,
            step,
            self._member.rank,
            slices.start,
            len(slices),
            buffer.nbytes,
            checksum,
            self.plan.encoded,
        ).encoded()

    def _send_small(self, step: int, send: SliceSend, buffer: Buffer) -> None:
        async def compose(path: Transport) -> Message:
            is_sealed = buffer.nbytes and not path.is_local
            checksum = wire.checksum([buffer]) if is_sealed else 0
            header = self._header(step, send.slices, buffer, checksum)
            return Message(header, [buffer] if buffer.nbytes else [])

        self._member.send_behind(self.epoch, send.peer, compose)

    def _send_large(self, step: int, send: SliceSend) -> None:
        assert self.plan is not None
        room = self._rooms.setdefault(send.peer, asyncio.Semaphore(WINDOW))
        # The values before this step. The message may be composed after the step's sum is made, if
        # there is no room or no link to the peer yet.
        view = self.plan.memory.view(send.slices)
        compose = partial(self._compose, step, send.slices, view)

        async def deliver() -> None:
            async with room:
                await self._member.deliver(send.peer, compose)

        task = asyncio.create_task(deliver())
        self._sending.add(task)
        task.add_done_callback(self._on_sent)

    def _on_sent(self, task: asyncio.Task[None]) -> None:
        self._sending.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._member.fail(error)
        self._wake()

    async def _compose(self, step: int, slices: range, view: Any, path: Transport) -> Message:
        assert self.plan is not None
        nbytes = self.plan.memory.nbytes(slices)
        # Once for all peers that get these slices the same way.
        key = step, slices, path.is_local
        if key not in self._ready:
            prepare = self._copied_out if path.is_local else self._sealed
            self._ready[key] = asyncio.ensure_future(self._work(nbytes, prepare, view))
        buffer, checksum = await asyncio.shield(self._ready[key])
        header = self._header(step, slices, buffer, checksum)
        wire_nbytes = 0 if path.is_local else len(header) + nbytes
        return Message(header, [buffer], wire_nbytes=wire_nbytes)

    def _copied_out(self, view: Any) -> tuple[Buffer, int]:
        """Return a copy of slices where peers on this host can read it. It needs no checksum."""
        found = bytes_of(view)
        lent = self._tenant.empty(self._member.links.outgoing, found.nbytes, "lent")
        np.copyto(lent, found)
        return lent, 0

    def _sealed(self, view: Any) -> tuple[Buffer, int]:
        """Return the bytes of slices where they are, with their checksum."""
        found = bytes_of(view)
        return found, wire.checksum([found])

    # ------------------------------------------------------------------ receiving

    async def take(self, header: SliceHeader, payload: Any) -> None:
        """Take in slices from a peer.

        Raises
        ------
        CollectiveError
            The operation is over.
        ProtocolError
            The message is not one of this step.
        DamagedError
            The checksum does not match.
        TransportError
            The sender must offer its path again.
        """
        peer = header.rank
        if self.plan is None:
            if self._announced is None:
                self._announced = self._checked(OperationCall.decoded(header.subject), peer)
                self._wake()
            await self._member.until(lambda: self.plan is not None)
        assert self.plan is not None
        if header.subject != self.plan.encoded:
            other = OperationCall.decoded(header.subject)
            raise self._differs(self.plan.subject, other, peer)
        await self._member.until(lambda: self.step >= header.step)
        key = header.step, peer
        # While a copy is read, the sender must not use its memory again.
        await self._member.until(lambda: self._taken.get(key) is not False)
        if key in self._taken:
            return  # it was sent again, because the answer was lost
        receive = self._expected.get(peer)
        slices = range(header.first, header.first + header.count)
        if receive is None or self.step != header.step or receive.slices != slices:
            raise ProtocolError(f"slices {slices} of rank {peer} are none of step {self.step}")
        memory = self.plan.memory
        if header.nbytes != memory.nbytes(slices):
            raise ProtocolError(f"slices of {header.nbytes} bytes, not {memory.nbytes(slices)}")
        self._taken[key] = False
        try:
            found = await self._fetched(receive, header, payload)
            if receive.adds:
                self._added.setdefault(slices, {})[peer] = found
            else:
                await self._work(len(found), memory.put, slices, found)
        except BaseException:
            # It may come again, or this was another one's.
            del self._taken[key]
            self._member.changed()
            raise
        del self._expected[peer]
        self._wake()
        if receive.adds and is_inline(payload) and len(found) > INLINE_NBYTES:
            # In one process, this may be the sender's own memory. It may change after the answer.
            await self._member.until(lambda: self.step > header.step)
        self._taken[key] = True
        self._member.changed()

    def _differs(self, mine: OperationCall, other: OperationCall, peer: int) -> CollectiveError:
        """Fail, and return the error. The sender gets the same: either may be the first to tell."""
        error = CollectiveError(mine.differs(self._member.rank, other, peer))
        self._member.fail(error)
        return error

    def _checked(self, subject: OperationCall, peer: int) -> OperationCall:
        if subject.call != self.call:
            raise self._differs(OperationCall(self.call, (), "u1", "", 1), subject, peer)
        if subject.nbytes > self._member.memory_nbytes:
            raise ProtocolError(f"a value of {subject.nbytes} bytes is more than the memory here")
        return subject

    async def _fetched(self, receive: SliceReceive, header: SliceHeader, payload: Any) -> Buffer:
        """Return received bytes: in their place, unless they need a sum or are in a message."""
        assert self.plan is not None
        memory = self.plan.memory
        in_place = memory.is_on_host and not receive.adds

        def empty(_: int, nbytes: int) -> Buffer:
            if in_place:
                place: Buffer = memory.into(receive.slices).view(np.uint8)
                return place
            return self._tenant.empty(self._member.pool, nbytes, "received")

        lengths = [header.nbytes] if header.nbytes else []
        buffers = await self._member.links.fetch(payload, lengths, empty, self._thread.run)
        found = buffers[0] if buffers else np.empty(0, np.uint8)
        if header.checksum:
            checksum = await self._work(found.nbytes, wire.checksum, [found])
            if checksum != header.checksum:
                raise DamagedError("slices of a collective operation arrived damaged")
        return found
