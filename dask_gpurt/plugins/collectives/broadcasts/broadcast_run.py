"""One broadcast on one worker: it receives the slices of a value, and hands them on.

Slices go from host to host, and inside each host to all workers of the broadcast
(`collectives.two_level`). A worker sends a slice as soon as it has it, and up to `WINDOW` slices to
each peer at a time. A peer answers when it has a slice, so nothing piles up at a slow one.

If a peer fails, its sender also sends to those that the peer would have sent to.

Slices travel as messages of shuffles do: over shared memory, UCX or Dask's connections. All have a
checksum. Slices in shared memory have one too: a sender that gives up reuses the memory, and a slow
worker may still read it. This runs on the event loop; copies are made in threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import struct
from collections import Counter
from collections.abc import Awaitable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

import numpy as np
import numpy.typing as npt

from dask_gpurt.collectives import two_level
from dask_gpurt.collectives.steps import slice_bounds
from dask_gpurt.devices.host_memory.pool import Tenant
from dask_gpurt.errors import DamagedError, ProtocolError, TransportError
from dask_gpurt.plugins.patches.connections import LostPeers
from dask_gpurt.plugins.tracing.ledger_hook import entered, message_numbers
from dask_gpurt.shuffle.messages import Message
from dask_gpurt.shuffle.routing import host_of
from dask_gpurt.tracing.lane_names import COLLECTIVE
from dask_gpurt.transport import wire

if TYPE_CHECKING:
    from distributed.core import ConnectionPool

    from dask_gpurt.plugins.shuffle.peer_links import Links
    from dask_gpurt.plugins.shuffle.transports import Transport

logger = logging.getLogger("dask_gpurt")

Buffer = npt.NDArray[np.uint8]
T = TypeVar("T")

#: Slices under way to each peer. With one, a link would idle while an answer is on its way.
WINDOW = 2
#: Workers that a sender asks at the same time: each takes a connection of Dask's.
N_ASKED = 64
#: Longest time without a new slice, after which a broadcast has failed here.
PATIENCE_S = 30.0
#: Longest time until a worker answers the invitation to a broadcast.
JOIN_PATIENCE_S = 5.0
#: A broadcast that is slower, in bytes a second, and takes longer than `PATIENCE_S`, has failed.
LEAST_RATE = 50e6
#: Number of a slice, its bytes, and its checksum.
_HEADER = struct.Struct("<QQQ")
_NO_BYTES = np.empty(0, dtype=np.uint8)


class BroadcastRun:
    """One worker's part in a broadcast.

    Parameters
    ----------
    name
        Identifies the broadcast on all of its workers.
    workers
        Addresses of the workers; the first one has the value.
    rank
        Number of this worker among them.
    stretches
        The memory of the value's bytes, in order: filled if this is the first worker.
    n_slices
        Slices that the value is cut into.
    """

    def __init__(
        self,
        links: Links,
        name: str,
        workers: Sequence[str],
        rank: int,
        stretches: Sequence[Buffer],
        n_slices: int,
    ) -> None:
        self._links = links
        self.name = name
        self._workers, self._rank = workers, rank
        self._stretches = stretches
        self._starts = list(accumulate((one.nbytes for one in stretches), initial=0))
        self._bounds = slice_bounds(self._starts[-1], n_slices)
        self._hosts = [host_of(address) for address in workers]
        self._here = [asyncio.Event() for _ in range(n_slices)]
        self._lost = {address: asyncio.Event() for address in workers}
        #: Peers in whose place this worker sends.
        self._replaced: set[int] = set()
        if rank == 0:
            for one in self._here:
                one.set()
        #: Copies of slices that peers on this host read, until all of them have read.
        self._lent: dict[int, asyncio.Task[tuple[Buffer, int]]] = {}
        self._n_read: Counter[int] = Counter()
        self._tenant = Tenant()
        mine = self._hosts[rank]
        self._n_readers = sum(self._hosts[peer] == mine for peer in self._successors(rank))

    async def run(self) -> None:
        """Receive all slices, and send them to all peers that get them from this worker.

        The first worker also waits for peers that leave, until the caller cancels this.

        Raises
        ------
        TransportError
            Nothing arrived for `PATIENCE_S`.
        """
        feeding = [asyncio.create_task(self._feed(peer)) for peer in self._successors(self._rank)]
        if self._rank == 0:
            peers = range(1, len(self._workers))
            feeding += [asyncio.create_task(self._replace_if_lost(peer)) for peer in peers]
        try:
            for number, one in enumerate(self._here):
                try:
                    async with asyncio.timeout(PATIENCE_S):
                        await one.wait()
                except TimeoutError:
                    raise TransportError(
                        f"slice {number} of {len(self._here)} has not arrived in {PATIENCE_S:g} s"
                    ) from None
            await asyncio.gather(*feeding)
        finally:
            for task in feeding:
                task.cancel()
            self._lent.clear()
            self._tenant.close()

    def lose(self, address: str) -> None:
        """Note that a worker has left the cluster."""
        if (lost := self._lost.get(address)) is not None:
            lost.set()

    async def unless_lost(self, address: str, call: Awaitable[T]) -> T:
        """Return the result of a call to a worker.

        Raises
        ------
        OSError
            The worker has left the cluster. Dask would try to connect to it for half a minute.
        """
        calling = asyncio.ensure_future(call)
        losing = asyncio.ensure_future(self._lost[address].wait())
        try:
            await asyncio.wait({calling, losing}, return_when=asyncio.FIRST_COMPLETED)
            if not calling.done():
                raise OSError("it has left the cluster")
            return calling.result()
        finally:
            calling.cancel()
            losing.cancel()

    # ------------------------------------------------------------------ sending

    def _successors(self, rank: int) -> list[int]:
        """Return the ranks that get their slices from a rank; the one on another host first."""
        steps = two_level.broadcast(rank, self._hosts, n_slices=1)
        return [send.peer for step in steps for send in step.sends]

    async def _feed(self, peer: int) -> None:
        """Send all slices to a peer in order; if it fails, to those that it would have sent to."""
        room = asyncio.Semaphore(WINDOW)
        try:
            async with asyncio.TaskGroup() as group:
                for number, here in enumerate(self._here):
                    await here.wait()
                    await room.acquire()
                    sending = group.create_task(self._send(peer, number))
                    sending.add_done_callback(lambda _: room.release())
        except* Exception as failed:
            error = failed.exceptions[0]
            logger.info("a broadcast goes on without %s: %s", self._workers[peer], error)
            await asyncio.gather(self._leave(self._workers[peer]), self._replace(peer))

    async def _replace_if_lost(self, peer: int) -> None:
        """Replace a peer that leaves after it was sent all slices, and before it has sent them."""
        await self._lost[self._workers[peer]].wait()
        await self._replace(peer)

    async def _replace(self, peer: int) -> None:
        """Send all slices to those that a peer would have sent to, once."""
        if peer not in self._replaced:
            self._replaced.add(peer)
            await asyncio.gather(*map(self._feed, self._successors(peer)))

    async def _leave(self, address: str) -> None:
        """Tell a peer that it gets no more slices, if it is still there."""
        leave = "gpurt_broadcast_leave"
        with contextlib.suppress(Exception):
            await self.unless_lost(
                address, self._links.connections.call(address, leave, name=self.name)
            )

    async def _send(self, peer: int, number: int) -> None:
        address = self._workers[peer]

        async def compose(path: Transport) -> Message:
            if path.is_local:
                lent = self._lent.get(number)
                if lent is None:
                    lent = asyncio.create_task(asyncio.to_thread(self._copied_out, number))
                    self._lent[number] = lent
                buffer, checksum = await asyncio.shield(lent)
                return Message(_HEADER.pack(number, buffer.nbytes, checksum), [buffer])
            buffer, checksum = await asyncio.to_thread(self._sealed, number)
            header = _HEADER.pack(number, buffer.nbytes, checksum)
            return Message(header, [buffer], wire_nbytes=len(header) + buffer.nbytes)

        sender, message = self._workers[self._rank], next(message_numbers)

        async def call(data: dict[str, Any]) -> dict[str, Any]:
            here = {"name": self.name, "sender": sender, "message": message}
            return await self._links.connections.call(
                address, "gpurt_broadcast_slice", **here, **data
            )

        sending = entered(
            self._links.ledger,
            lambda composing: self._links.deliver(address, self._links.transport, composing, call),
            compose,
            address,
            "broadcast",
            COLLECTIVE,
            message=message,
        )
        await self.unless_lost(address, sending)
        if self._hosts[peer] == self._hosts[self._rank]:
            self._n_read[number] += 1
            if self._n_read[number] >= self._n_readers:
                self._lent.pop(number, None)

    def _nbytes(self, number: int) -> int:
        return self._bounds[number + 1] - self._bounds[number]

    def _parts(self, number: int) -> list[Buffer]:
        """Return the memory of a slice: parts of the value's stretches."""
        first, end = self._bounds[number : number + 2]
        parts = []
        for stretch, start in zip(self._stretches, self._starts, strict=False):
            a, b = max(first - start, 0), min(end - start, stretch.nbytes)
            if a < b:
                parts.append(stretch[a:b])
        return parts

    def _copied_out(self, number: int) -> tuple[Buffer, int]:
        """Return a copy of a slice, where peers on this host can read it, with its checksum."""
        lent = self._tenant.empty(self._links.outgoing, self._nbytes(number), "slices")
        start = 0
        for part in self._parts(number):
            np.copyto(lent[start : start + part.nbytes], part)
            start += part.nbytes
        return lent, wire.checksum([lent])

    def _sealed(self, number: int) -> tuple[Buffer, int]:
        """Return the bytes of a slice in one stretch, with their checksum."""
        parts = self._parts(number)
        buffer = parts[0] if len(parts) == 1 else np.concatenate([_NO_BYTES, *parts])
        return buffer, wire.checksum([buffer])

    # ------------------------------------------------------------------ receiving

    async def take(self, header: Any, payload: Any) -> int:
        """Take in a slice from a peer; return its bytes.

        Raises
        ------
        ProtocolError
            The message is malformed.
        DamagedError
            The checksum does not match.
        TransportError
            The sender must offer its path again.
        """
        try:
            number, nbytes, checksum = _HEADER.unpack(header)
        except (struct.error, TypeError) as error:
            raise ProtocolError("not a slice of a broadcast") from error
        if number >= len(self._here) or nbytes != self._nbytes(number):
            raise ProtocolError(f"slice {number} of {nbytes} bytes, of {len(self._here)} slices")
        if self._here[number].is_set():
            return 0  # a peer sends it in the place of one that failed
        parts = self._parts(number)

        def empty(_: int, nbytes: int) -> Buffer:
            return parts[0] if len(parts) == 1 else np.empty(nbytes, dtype=np.uint8)

        (found,) = await self._links.fetch(payload, [nbytes], empty, asyncio.to_thread)
        await asyncio.to_thread(_put, found, parts, checksum)
        self._here[number].set()
        return int(nbytes)


def _put(found: Buffer, parts: Sequence[Buffer], checksum: int) -> None:
    """Check received bytes, and copy them to their place unless they are there."""
    if wire.checksum([found]) != checksum:
        raise DamagedError("a slice of a broadcast arrived damaged")
    if len(parts) == 1 and np.may_share_memory(found, parts[0]):
        return
    start = 0
    for part in parts:
        np.copyto(part, found[start : start + part.nbytes])
        start += part.nbytes


def longest_s(nbytes: int) -> float:
    """Return the longest time that anybody waits for a broadcast of `nbytes`."""
    return PATIENCE_S + nbytes / LEAST_RATE


class _Receivers:
    """The receivers of one broadcast, as its sender asks them over Dask's own connections."""

    def __init__(self, run: BroadcastRun, rpc: ConnectionPool) -> None:
        self._run, self._rpc = run, rpc
        self._room = asyncio.Semaphore(N_ASKED)

    async def ask(
        self, peers: Sequence[str], handler: str, limit_s: float, **message: Any
    ) -> dict[str, dict[str, Any]]:
        """Call a handler of these workers; a failure is an answer with the reason."""
        calls = (self._call(peer, handler, limit_s, message) for peer in peers)
        return dict(zip(peers, await asyncio.gather(*calls), strict=True))

    async def _call(
        self, peer: str, handler: str, limit_s: float, message: dict[str, Any]
    ) -> dict[str, Any]:
        try:
            async with self._room, asyncio.timeout(limit_s):
                call = getattr(self._rpc(peer), handler)(name=self._run.name, **message)
                return dict(await self._run.unless_lost(peer, call))
        except TimeoutError:
            return {"why_not": f"no answer in {limit_s:g} s"}
        except Exception as error:  # the peer is gone, or it raised this
            return {"why_not": str(error) or type(error).__name__}


def _reasons(answers: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Return the reason of each worker that failed."""
    return {peer: str(one["why_not"]) for peer, one in answers.items() if one.get("why_not")}


async def broadcast_value(
    links: Links,
    rpc: ConnectionPool,
    address: str,
    key: Any,
    header: Any,
    stretches: Sequence[Buffer],
    workers: Sequence[str],
    n_slices: int,
    version: int = 0,
) -> dict[str, dict[str, Any]]:
    """Send a value from here to these workers.

    Parameters
    ----------
    rpc
        Dask's own connections: returns an object for an address, whose attributes call handlers.
        Over those of `links`, answers that take long would keep slices waiting for a connection.
    address
        Address of the sender.
    header, stretches
        The value, as `patches.values.replicate.serialize` returns it.
    version
        The scheduler's number for the task of the value, with which workers tell it of their
        copies; 0 if the caller does.

    Returns
    -------
    dict
        `reached`: for each worker that has the value now, its size there in bytes. `failed`: for
        each other one, the reason.
    """
    nbytes = sum(one.nbytes for one in stretches)
    n_slices = max(1, min(n_slices, nbytes))
    invitation = {
        "key": key,
        "version": version,
        "workers": [address, *workers],
        "header": header,
        "lengths": [one.nbytes for one in stretches],
        "n_slices": n_slices,
    }
    run = BroadcastRun(links, uuid4().hex, [address, *workers], 0, stretches, n_slices)
    lost = LostPeers(rpc, run.lose)
    try:
        return await _spread(run, _Receivers(run, rpc), workers, nbytes, invitation)
    finally:
        lost.uninstall()


async def _spread(
    run: BroadcastRun,
    receivers: _Receivers,
    workers: Sequence[str],
    nbytes: int,
    invitation: dict[str, Any],
) -> dict[str, dict[str, Any]]:
    answers = await receivers.ask(workers, "gpurt_broadcast_join", JOIN_PATIENCE_S, **invitation)
    if absent := _reasons(answers):
        # If a worker is missing, the slices need another route. The caller may try again.
        present = [one for one in workers if one not in absent]
        await receivers.ask(present, "gpurt_broadcast_leave", JOIN_PATIENCE_S)
        return {"reached": {}, "failed": absent}
    sending = asyncio.ensure_future(run.run())
    try:
        answers = await receivers.ask(workers, "gpurt_broadcast_end", longest_s(nbytes))
    finally:
        sending.cancel()
    absent = _reasons(answers)
    reached = {one: answers[one]["nbytes"] for one in workers if one not in absent}
    return {"reached": reached, "failed": absent}
