"""UCX links between workers, beside Dask's own connections: the asyncio side.

A worker's event loop uses a `UcxEngine`, which handles timeouts and cancellation. A thread
(`transport.ucx.thread`) and the code that it drives (`transport.ucx.switchboard`) call UCX, so
neither side blocks the other. UCX uses TCP, or a faster network between hosts and between devices.
It does not encrypt: a cluster that requires encryption must not use it.

Control messages (the sender, the number and the buffer lengths of a message) are the caller's
business and travel elsewhere. UCX is optional: without the package `ucxx` an engine does not start.
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
from dask_gpurt.transport.ucx.links import reject
from dask_gpurt.transport.ucx.listening_sockets import devices_for
from dask_gpurt.transport.ucx.protocol import (
    LEAST_DEVICE_NBYTES,
    N_NUMBERS,
    TOKEN_NBYTES,
    Buffer,
    Descriptor,
)
from dask_gpurt.transport.ucx.switchboard import Switchboard
from dask_gpurt.transport.ucx.thread import Session, UcxThread

#: Options of the engine's own context, unless the environment sets them.
#:
#: TLS: no UCX queues in shared memory. A process has one queue for all its senders. A sender that
#: is killed between reserving a slot and filling it blocks the queue for ever, for all senders.
#: Host memory inside a host then uses loopback, if a user asks for UCX; `transport.shared` is the
#: transport meant for it.
#:
#: BCOPY_BW: the speed of copies into UCX's own buffers beside computing tasks. By default UCX
#: assumes an idle processor. Over TCP it then copies through such buffers at both ends, instead of
#: from the message into the receiver's memory: 1.4 times the time, for messages of 16 MiB.
#:
#: RNDV_FRAG_ALLOC_COUNT: buffers of 4 MiB on the device that UCX allocates at once, for a receiver
#: on the host. By default that is 512 MiB, and receivers are on the host when the device is full.
_OPTIONS = {
    "RNDV_FRAG_ALLOC_COUNT": "host:128,cuda:8",
    "TLS": "^posix,sysv,xpmem",
    "BCOPY_BW": "1GBs",
    "TCP_TX_SEG_SIZE": "64k",
    "TCP_RX_SEG_SIZE": "256k",
}

#: `ucxx` listens on IPv4. A peer that connected to it over IPv6 crashed the process.
_IP_VERSION = 4

#: Prefixes of UCX's transports over InfiniBand, RoCE, EFA and Cray's networks.
_FAST = ("rc_", "dc_", "ud_", "srd", "gga", "ugni")


class UcxEngine:
    """One process's end of all UCX links. Made by `start`.

    All methods run on one event loop. A message is a list of one-dimensional `uint8` arrays, or of
    device memory if UCX at both ends supports it. Its number is below 2**31, and the sender never
    reuses it. Waits can be cancelled. Memory of a failed, cancelled or timed-out transfer stays
    referenced until UCX is done with it, because UCX may still write to it. So reuse memory only
    when no reference to its arrays is left.
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
            IPv4 address under which peers reach this process. It listens there if the address is
            one of this host's.
        options
            UCX options without their prefix, such as ``{"TLS": "tcp"}``. They apply to this engine
            alone, and override environment variables.

        Raises
        ------
        TransportError
            UCX is not installed or does not start, or the address is IPv6.
        """
        if ipaddress.ip_address(host).version != _IP_VERSION:
            raise TransportError(
                f"UCX takes connections over IPv4 alone, and peers reach this process at {host}"
            )
        guard(asyncio.get_running_loop())
        # Otherwise UCX warns on stderr about a variable that `ucxx` sets and UCX no longer has.
        os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
        own = {key: on for key, on in _OPTIONS.items() if f"UCX_{key}" not in os.environ}
        try:
            own = {**own, **devices_for(host, os.environ), **(options or {})}
            session = UcxThread.begin(host, own)
        except (OSError, RuntimeError) as error:
            raise TransportError(f"UCX does not start: {error}") from error
        try:
            # Shielded: a session that is starting must be told to end.
            return cls(session, await asyncio.shield(asyncio.wrap_future(session.started)))
        except asyncio.CancelledError:
            session.close()
            raise

    @property
    def descriptor(self) -> dict[str, str | int]:
        """Plain values with which a peer can connect."""
        return self._board.descriptor.to_plain()

    @property
    def takes_device_memory(self) -> bool:
        """Whether buffers may be in the memory of a GPU.

        UCX built for GPUs may find none, or be configured not to use one. So this checks for the
        transports without which UCX cannot read the memory of NVIDIA's GPUs, or of AMD's.
        """
        return not {"cuda_copy", "rocm_copy"}.isdisjoint(self._session.transports)

    @property
    def has_fast_network(self) -> bool:
        """Whether UCX has a network between hosts that it prefers to TCP."""
        return any(name.startswith(_FAST) for name in self._session.transports)

    @property
    def token(self) -> str:
        """Unique name of this engine."""
        return self._board.descriptor.token

    @property
    def is_closing(self) -> bool:
        """Whether the engine was closed, or its thread ended with an error: it accepts no calls."""
        return self._board.is_closing

    @property
    def why_ended(self) -> str:
        """Error message for calls after the end."""
        return self._session.why_ended

    def next_number(self) -> int:
        """Return a message number that this engine has not used."""
        return next(self._numbers)

    async def connect(self, descriptor: Mapping[str, object], deadline_s: float) -> str:
        """Link to the engine of a descriptor; return its token.

        Each of two engines has one link to the other. It sends on that link, and its callers share
        it.

        Raises
        ------
        ProtocolError
            The descriptor is malformed or of another version.
        TransportError
            The engine is gone, another one answered, or none did in time.
        """
        wanted = Descriptor.from_plain(descriptor)
        await self._ask(
            partial(self._board.connect, wanted),
            partial(self._board.cancel_connect, wanted.token),
            deadline_s,
            f"connecting to {wanted.token} at {wanted.host}:{wanted.port}",
        )
        return wanted.token

    async def invite(self, token: object, deadline_s: float) -> dict[str, str | int]:
        """Allow another engine to connect for some time; return the descriptor it needs.

        UCX accepts data before it can verify the sender. So only announced peers can connect.

        Parameters
        ----------
        token
            Token of the other engine, as that engine states it.

        Raises
        ------
        ProtocolError
            The token is malformed.
        """
        if not isinstance(token, str) or len(token) != 2 * TOKEN_NBYTES:
            raise ProtocolError("an offer of UCX without a token")
        await self._ask(partial(self._board.invite, token, deadline_s), None, None, "inviting")
        return self.descriptor

    async def send(
        self, peer_token: str, number: int, buffers: Sequence[Buffer], deadline_s: float
    ) -> None:
        """Send a message; return when the buffers may be changed again.

        The return does not mean that the receiver has the whole message; the receiver's answer
        does.

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
            self._board.cancel_send,
            deadline_s,
            f"sending message {number} to {peer_token}",
        )

    def retract(self, peer_token: str, number: int) -> None:
        """Tell the receiver to drop a message that it will not ask for, sent in full or not."""
        self._session.call(partial(self._board.retract, peer_token, number))

    async def receive(
        self, peer_token: str, number: int, buffers: Sequence[Buffer], deadline_s: float
    ) -> None:
        """Fill these buffers with a message that has arrived or will arrive.

        Raises
        ------
        ProtocolError
            The lengths of the message's buffers differ. Nothing is written outside these buffers;
            their content is undefined.
        TransportError
            There is no link, it broke, or the message was retracted or late.
        """
        if not isinstance(peer_token, str):  # it came from the network
            raise ProtocolError(f"a message of an invalid peer: {peer_token!r}")
        buffers = _checked(number, buffers)
        if any(isinstance(buffer, np.ndarray) and not buffer.flags.writeable for buffer in buffers):
            raise ValueError("cannot receive into read-only memory")
        await self._ask(
            partial(self._board.receive, peer_token, number, buffers),
            partial(self._board.cancel_receive, peer_token, number),
            deadline_s,
            f"receiving message {number} of {peer_token}",
        )

    async def disconnect(self, peer_token: str) -> None:
        """Close the links to a peer; transfers in flight on them fail."""
        await self._ask(partial(self._board.disconnect, peer_token), None, None, "disconnecting")

    async def close(self, deadline_s: float) -> None:
        """Fail all transfers in flight, and close all links. UCX stays loaded for the next engine.

        Memory that a hung peer still uses stays referenced, see `held_nbytes` of the report.

        Raises
        ------
        TransportError
            Links did not close in time. Closing continues.
        """
        self._session.close()
        try:
            async with asyncio.timeout(deadline_s):
                await asyncio.shield(asyncio.wrap_future(self._session.finished))
        except TimeoutError as error:
            raise TransportError(f"UCX did not close within {deadline_s:g} s") from error

    def report(self) -> dict[str, Any]:
        """Return counters and state as plain values."""
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
        cancel: Callable[[Future[None]], None] | None,
        deadline_s: float | None,
        what: str,
    ) -> None:
        """Run a call in the thread and wait for its result, with a timeout."""
        future: Future[None] = Future()

        def begin() -> None:
            try:
                start(future)
            except Exception as error:  # it ends the thread
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
            if cancel is not None and future.cancelled():
                self._session.call(partial(cancel, future))


def why_not() -> str | None:
    """Return why no engine can start here, as far as is known without loading UCX."""
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
