"""The groups of one worker: ranks enter and leave them, and messages of peers reach their rank.

A rank's task enters its group when it has a thread. The scheduler answers when all ranks have done
so (`gangs`), and with the addresses of all. The task's step runs between `enter` and `leave`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from dask_gpurt.collectives.choice import LinkCosts
from dask_gpurt.errors import CollectiveError, DamagedError, TransportError
from dask_gpurt.plugins import request_checks
from dask_gpurt.plugins.collectives.groups.group_member import OVER, GroupMember
from dask_gpurt.plugins.collectives.groups.group_messages import (
    LEAST_RATE,
    LEFT,
    GroupFailure,
    SliceHeader,
)
from dask_gpurt.plugins.shuffle.peer_links import DAMAGED, RELINK
from dask_gpurt.plugins.tracing.ledger_hook import enter_receipt
from dask_gpurt.shuffle.routing import host_of
from dask_gpurt.tracing.lane_names import COLLECTIVE

if TYPE_CHECKING:
    from distributed import Worker

    from dask_gpurt.plugins.worker.worker_runtime import WorkerRuntime

logger = logging.getLogger("dask_gpurt")


class WorkerGroups:
    """The groups of one worker. On the event loop."""

    def __init__(self, worker: Worker, runtime: WorkerRuntime) -> None:
        self._worker = worker
        self._runtime = runtime
        self._members: dict[str, GroupMember] = {}
        self._is_closed = True

    def handlers(self) -> list[Callable[..., Awaitable[Any]]]:
        return [self.gpurt_collective, self.gpurt_collective_abort]

    async def enter(self, name: str, rank: int) -> tuple[GroupMember, LinkCosts]:
        """Begin as a rank of a group; return when all of its ranks have begun.

        Raises
        ------
        GangError
            They cannot run at the same time.
        CollectiveError
            The group has ended.
        """
        if self._is_closed or name in self._members:
            raise CollectiveError("the runtime is off here, or this rank runs already")
        # Before the scheduler knows: peers may send as soon as it has answered them.
        member = self._members[name] = GroupMember(self._worker, self._runtime, name, rank)
        try:
            answer = await self._worker.scheduler.gpurt_gang_join(
                name=name, rank=rank, worker=self._worker.address, rate=self._rate()
            )
            if answer["failure"] is not None:
                raise GroupFailure.checked(answer["failure"]).error()
        except BaseException:
            await self.leave(member, None, {})
            raise
        member.workers, member.timeout_s = answer["workers"], answer["timeout_s"]
        member.changed()
        return member, LinkCosts(**answer["costs"])

    def _rate(self) -> float | None:
        """Return the bytes a second of the slowest link to another host that was measured."""
        rates = [
            float(path["bandwidth"])
            for address, path in self._runtime.links.report().items()
            if path["bandwidth"] and host_of(address) != host_of(self._worker.address)
        ]
        # A link that hardly moved anything is no measurement.
        return max(LEAST_RATE, min(rates)) if rates else None

    async def leave(
        self, member: GroupMember, failure: GroupFailure | None, counts: Mapping[str, Any]
    ) -> None:
        """End a rank's part in its group.

        Parameters
        ----------
        failure
            The error that its step has raised.
        counts
            The operations of this rank, for `status`.
        """
        try:
            await member.leave(failure)
            await self._worker.scheduler.gpurt_gang_leave(
                name=member.name,
                rank=member.rank,
                failure=None if failure is None else failure.plain(),
                counts=dict(counts),
            )
        except Exception as error:
            logger.warning("the scheduler did not answer at the end of a rank: %s", error)
            # A message on the stream gets there, or the scheduler loses this worker.
            left = {"op": LEFT, "name": member.name, "rank": member.rank}
            self._worker.batched_send(left)
        finally:
            # Not before: until the scheduler knows the error, peers get it from here.
            self._members.pop(member.name, None)

    async def gpurt_collective(
        self,
        name: str,
        sender: Any = None,
        message: Any = None,
        header: Any = None,
        payload: Any = None,
        offers: Any = None,
    ) -> dict[str, Any]:
        """Handler: take in slices for a rank, or a peer's offer of a path."""
        if offers is not None:
            return await self._runtime.links.accept(offers)
        decoded = SliceHeader.decoded(header)
        request_checks.message(sender, message)
        member = self._members.get(request_checks.name("name", name))
        if member is None:
            return _over(f"the rank at {self._worker.address} has ended its step, or never began")
        start_s = self._runtime.ledger.clock()
        try:
            answer = await member.take(sender, decoded, payload)
        except DamagedError as error:
            logger.warning("%s; the peer sends them again", str(error))
            return {"status": DAMAGED}
        except TransportError:
            return {"status": RELINK}
        except asyncio.CancelledError:
            # The task's thread is gone with the operation; unless this handler itself is cancelled.
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            return _over("the operation has ended")
        if answer["status"] != OVER:
            nbytes = decoded.nbytes if answer["status"] == "OK" else 0
            enter_receipt(self._runtime.ledger, nbytes, start_s, sender, 0, message, COLLECTIVE)
        return answer

    async def gpurt_collective_abort(self, name: str, failure: Any) -> None:
        """Handler: end a group that has failed elsewhere."""
        found = GroupFailure.checked(failure)
        member = self._members.get(request_checks.name("name", name))
        if member is not None:
            member.end_with(found)

    def open(self) -> None:
        """Let ranks begin: the runtime is switched on here."""
        self._is_closed = False

    def close(self) -> None:
        """End all groups: the runtime is switched off here, or the worker closes."""
        self._is_closed = True
        failure = GroupFailure("failed", f"the runtime was switched off at {self._worker.address}")
        for member in self._members.values():
            member.end_with(failure)


def _over(why: str) -> dict[str, Any]:
    return {"status": OVER, "failure": GroupFailure("failed", why).plain()}
