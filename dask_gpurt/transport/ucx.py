"""UCX endpoints of our own between two workers: payload past Dask's comms.

`UcxEngine` is what a worker's event loop sees of it. It keeps deadlines and cancellation; the work
is done by a thread of its own (`transport.ucx_thread`) and what that drives
(`transport.ucx_switchboard`), so that neither waits for the other. Over TCP, or whatever faster UCX
finds between hosts and between devices. Not encrypted: a cluster that requires encryption must not
use it.

Control messages (who sends which number, how long its buffers are) are the caller's business and
travel elsewhere. UCX is optional: without the package `ucxx` an engine does not start.
"""

from __future__ import annotations

import asyncio
import importlib.util
import ipaddress
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np

from dask_gpurt.errors import LateError, ProtocolError, TransportError
from dask_gpurt.transport.forked import guard
from dask_gpurt.transport.ucx_door import devices_for
from dask_gpurt.transport.ucx_links import reject
from dask_gpurt.transport.ucx_protocol import (
    LEAST_DEVICE_NBYTES,
    N_NUMBERS,
    TOKEN_NBYTES,
    Buffer,
    Descriptor,
)
from dask_gpurt.transport.ucx_switchboard import Switchboard
from dask_gpurt.transport.ucx_thread import Session, UcxThread

#: Options of the engine's own context, where the environment does not say otherwise.
#:
#: Without UCX's queues in shared memory. A process has one for all who send to it, and one of them
#: that is killed between taking a place there and filling it blocks it for ever: from nobody does
#: anything arrive any more. Host memory inside a host goes over loopback then, where somebody asks
#: for UCX; `transport.shared` is what is meant for it.
#:
#: Copies into buffers of UCX's own cost what they do beside tasks that compute. UCX counts with the
#: speed of an idle processor, and then sends over TCP by way of such buffers at both ends instead
#: of from the message's memory into the receiver's: 1.4 times the time, for messages of 16 MiB.
_OPTIONS = {
    "TLS": "^posix,sysv,xpmem",
    "BCOPY_BW": "1GBs",
    "TCP_TX_SEG_SIZE": "64k",
    "TCP_RX_SEG_SIZE": "256k",
}

#: `ucxx` makes a listener of IPv4. A peer that connected to it over IPv6 crashed the process.
_IP_VERSION = 4

#: How the names of UCX's transports over InfiniBand, RoCE, EFA and Cray's networks begin.
_FAST = ("rc_", "dc_", "ud_", "srd", "gga", "ugni")


class UcxEngine:
    """This process's end of all UCX links. Made by `start`.

    All methods are for one event loop. A message is a list of one-dimensional `uint8` arrays, or of
    device memory where UCX knows that at both ends, under a number below 2**31 that the sender does
    not use twice. Waits can be cancelled. Memory of a transfer that failed, was cancelled or ran
    out of time stays referenced until UCX is done with it, and what is still written goes there; so
    memory must be lent to somebody else only when nothing references the arrays any more.
    """

    def __init__(self, session: Session, board: Switchboard) -> None:
        self._session = session
        self._board = board
        self._numbers = itertools.count()

    @classmethod
    async def start(cls, host: str, options: Mapping[str, str] | None = None) -> UcxEngine:
        """Load UCX and listen.

        Parameters
        ----------
        host
            IPv4 address under which peers reach this process, and at which it listens if it is
            one of this host's.
        options
            Options of UCX without their prefix, such as ``{"TLS": "tcp"}``. They hold for this
            engine alone, and come before variables of the environment.

        Raises
        ------
        TransportError
            UCX is not installed or does not start, or the address is of IPv6.
        """
        if ipaddress.ip_address(host).version != _IP_VERSION:
            raise TransportError(
                f"UCX takes connections over IPv4 alone, and peers reach this process at {host}"
            )
        guard(asyncio.get_running_loop())
        # Else UCX complains on stderr of a variable that `ucxx` sets and UCX no longer knows.
        os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
        own = {key: on for key, on in _OPTIONS.items() if f"UCX_{key}" not in os.environ}
        try:
            own = {**own, **devices_for(host, os.environ), **(options or {})}
            session = UcxThread.begin(host, own)
        except (OSError, RuntimeError) as error:
            raise TransportError(f"UCX does not start: {error}") from error
        try:
            # Shielded: a session that has begun to start has to be told to end.
            return cls(session, await asyncio.shield(asyncio.wrap_future(session.started)))
        except asyncio.CancelledError:
            session.close()
            raise

    @property
    def descriptor(self) -> dict[str, str | int]:
        """What a peer needs to connect: plain values."""
        return self._board.descriptor.to_plain()

    @property
    def takes_device_memory(self) -> bool:
        """Whether buffers may lie in the memory of a CUDA device.

        UCX may be built for CUDA and find no device, or be told not to use one: what counts is that
        it has the transport without which it can read no device memory.
        """
        return "cuda_copy" in self._session.transports

    @property
    def has_fast_network(self) -> bool:
        """Whether UCX has something between hosts that it prefers to TCP."""
        return any(name.startswith(_FAST) for name in self._session.transports)

    @property
    def token(self) -> str:
        """Names this engine."""
        return self._board.descriptor.token

    @property
    def is_closing(self) -> bool:
        """Whether it is, or was closed, or its thread ended of an error: it serves nobody."""
        return self._board.is_closing

    @property
    def why_ended(self) -> str:
        """What those are told who want something of it afterwards."""
        return self._session.why_ended

    def next_number(self) -> int:
        """A number that no message of this engine has had."""
        return next(self._numbers)

    async def connect(self, descriptor: Mapping[str, object], deadline_s: float) -> str:
        """Have a link to the engine that the descriptor describes; returns its token.

        Each of two engines has one link to the other, which its callers share, and sends on that.

        Raises
        ------
        ProtocolError
            The descriptor is malformed or of another version.
        TransportError
            The engine is not there, another one is, or it did not answer in time.
        """
        wanted = Descriptor.from_plain(descriptor)
        await self._ask(
            partial(self._board.connect, wanted),
            partial(self._board.give_up_connecting, wanted.token),
            deadline_s,
            f"connecting to {wanted.token} at {wanted.host}:{wanted.port}",
        )
        return wanted.token

    async def invite(self, token: object, deadline_s: float) -> dict[str, str | int]:
        """Let another engine connect for some time; returns what it needs for that.

        UCX cannot tell strangers from peers before it has taken what they send. So nobody can
        connect whom nobody has announced.

        Parameters
        ----------
        token
            Of the other engine, as it says.

        Raises
        ------
        ProtocolError
            That is no token.
        """
        if not isinstance(token, str) or len(token) != 2 * TOKEN_NBYTES:
            raise ProtocolError("an offer of UCX without a token")
        await self._ask(partial(self._board.invite, token, deadline_s), None, None, "inviting")
        return self.descriptor

    async def send(
        self, peer_token: str, number: int, buffers: Sequence[Buffer], deadline_s: float
    ) -> None:
        """Send a message; returns when the buffers may be changed again.

        That the receiver has all of it is for the receiver to say.

        Raises
        ------
        TransportError
            There is no link, or it broke.
        LateError
            The receiver did not take the message in time.
        """
        buffers = _checked(number, buffers)
        await self._ask(
            partial(self._board.send, peer_token, number, buffers),
            self._board.give_up_sending,
            deadline_s,
            f"sending message {number} to {peer_token}",
        )

    def retract(self, peer_token: str, number: int) -> None:
        """Have the receiver drop a message that it will not ask for, sent in full or not."""
        self._session.call(partial(self._board.retract, peer_token, number))

    async def receive(
        self, peer_token: str, number: int, buffers: Sequence[Buffer], deadline_s: float
    ) -> None:
        """Fill these buffers with a message, whether it is already here or still to come.

        Raises
        ------
        ProtocolError
            The message's buffers do not have exactly these lengths. Nothing is written outside
            of the buffers; what is in them is undefined.
        TransportError
            There is no link, it broke, or the message was taken back or not here in time.
        """
        if not isinstance(peer_token, str):
            raise ProtocolError(f"a message of {peer_token!r}")  # it came from the network
        buffers = _checked(number, buffers)
        if any(isinstance(buffer, np.ndarray) and not buffer.flags.writeable for buffer in buffers):
            raise ValueError("cannot receive into read-only memory")
        await self._ask(
            partial(self._board.receive, peer_token, number, buffers),
            partial(self._board.give_up_receiving, peer_token, number),
            deadline_s,
            f"receiving message {number} of {peer_token}",
        )

    async def disconnect(self, peer_token: str) -> None:
        """Close what links there are to a peer; what is under way on them fails."""
        await self._ask(partial(self._board.disconnect, peer_token), None, None, "disconnecting")

    async def close(self, deadline_s: float) -> None:
        """Fail what is under way, and close all links. UCX stays, for the next engine.

        Memory that a hung peer still uses stays referenced, see `held_nbytes` of the report.

        Raises
        ------
        TransportError
            Links were not closed in time. That goes on.
        """
        self._session.close()
        try:
            async with asyncio.timeout(deadline_s):
                await asyncio.shield(asyncio.wrap_future(self._session.finished))
        except TimeoutError as error:
            raise TransportError(f"UCX did not close within {deadline_s:g} s") from error

    def report(self) -> dict[str, Any]:
        """Counters and state, as plain values."""
        session, board = self._session, self._board
        return {
            "token": self.token,
            "is_closed": session.finished.done(),
            "transports": list(session.transports),
            "peers": board.peers(),
            "under_way": board.under_way(),
            "held_nbytes": board.held_nbytes(),
            "problems": list(board.problems),
            **dict(board.counters),
        }

    async def _ask(
        self,
        start: Callable[[Future[None]], None],
        give_up: Callable[[Future[None]], None] | None,
        deadline_s: float | None,
        what: str,
    ) -> None:
        """Have the thread do something and wait for it, but not for ever."""
        future: Future[None] = Future()

        def begin() -> None:
            try:
                start(future)
            except Exception as error:  # which ends the thread
                reject(future, TransportError(f"{what}: {error!r}"))
                raise

        if not self._session.call(begin):
            raise TransportError(f"{what}: {self.why_ended}")
        try:
            async with asyncio.timeout(deadline_s):
                await asyncio.wrap_future(future)
        except TimeoutError as error:
            raise LateError(f"{what}: not done within {deadline_s:g} s") from error
        finally:
            if give_up is not None and future.cancelled():
                self._session.call(partial(give_up, future))


def why_not() -> str | None:
    """Why no engine can start here, as far as can be said without loading UCX."""
    if importlib.util.find_spec("ucxx") is None:
        return "no UCX without ucxx (dask-gpurt[ucx] installs it)"
    return None


def _checked(number: int, buffers: Sequence[Any]) -> list[Buffer]:
    if not 0 <= number < N_NUMBERS:
        raise ValueError(f"message {number}: numbers are below {N_NUMBERS}")
    for buffer in buffers:
        if not isinstance(buffer, np.ndarray):
            if len(buffer) < LEAST_DEVICE_NBYTES:
                raise ValueError(f"{len(buffer)} bytes of device memory are too few for a message")
        elif buffer.dtype != np.uint8 or buffer.ndim != 1 or not buffer.flags.c_contiguous:
            raise ValueError("a message is made of contiguous one-dimensional uint8 arrays")
    return list(buffers)
