"""Shards handed over between processes of one host, in memory that both can read.

A `Lender` signs the file in memory that its outgoing shards lie in (`devices.host_memory.pages`),
and says where in it a buffer is. A `Borrower` opens the files of its peers through `/proc`, which
works exactly where both run for the same user, on the same host and in view of each other, and
proves by the signature that it opened the right one. Then a message carries places instead of
bytes, and the borrower reads each shard once, straight into its own memory.

The loan ends with the answer to the message: the lender keeps the buffer until then. Nothing is
left behind by a peer that dies. The file has no name; a borrower watches the processes it borrows
from and lets go of the file when one ends; a lender whose borrower dies gets an error instead of an
answer.

Reading by position was chosen over mapping the file. Mapped, the copy is up to twice as fast, but
the peer's memory would count as this worker's own with Dask's memory monitor, and a peer that cuts
its file would kill this process instead of causing an error here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dask_gpurt.errors import ProtocolError, TransportError
from dask_gpurt.system_calls import is_memory_file, preadv, process_fd, process_start

Buffer = npt.NDArray[np.uint8]
_TOKEN_NBYTES = 16
#: Whether a part is carried, and its length.
_PART = struct.Struct("<?Q")
#: How often it is looked whether peers are alive, where the system does not tell.
_LOOK_S = 1.0
_NOT_OFFERED = "shared memory that was not offered, or whose process has ended"


class SharedMemory(Protocol):
    """What a lender lends from: `devices.host_memory.pages.SharedPages`."""

    fd: int

    def extents(self, address: int, nbytes: int) -> list[tuple[int, int]]:
        """Where in the file some bytes are; a `KeyError` if they are not in it."""


class Lender:
    """One a worker: lets peers read its outgoing shards."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        token = os.urandom(_TOKEN_NBYTES)
        os.pwrite(memory.fd, token, 0)
        #: What a peer needs in order to open the file; plain values.
        self.descriptor: dict[str, Any] = {"pid": os.getpid(), "fd": memory.fd, "token": token}

    def place(self, buffer: Buffer) -> list[tuple[int, int]] | None:
        """Where in the file a buffer is, or None if it is elsewhere."""
        try:
            return self._memory.extents(buffer.__array_interface__["data"][0], buffer.nbytes)
        except KeyError:
            return None


class _Loan:
    """A peer's file, and who has it open: the borrower until it forgets it, and whoever reads."""

    def __init__(self, fd: int, pid: int, pidfd: int | None, started: str) -> None:
        self.fd = fd
        self.pid = pid
        #: None where the system has none; then the start of the process tells it from others.
        self.pidfd = pidfd
        self.started = started
        self.n_holders = 1

    @property
    def has_ended(self) -> bool:
        """Whether the process has."""
        try:
            return process_start(self.pid) != self.started
        except OSError:
            return True


class Borrower:
    """One a worker: reads the outgoing shards of its peers.

    On the event loop, but for `read`, which threads may call: a file that is let go of while it is
    read stays open until then, as its number may be another file's the moment it is closed.

    Parameters
    ----------
    loop
        Tells when the process of a peer ends.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._loans: dict[bytes, _Loan] = {}
        self._looking: asyncio.TimerHandle | None = None
        # Guards who holds what; not held over a read.
        self._lock = threading.Lock()

    def open(self, descriptor: Mapping[str, Any]) -> bytes:
        """Open a peer's file; returns the token that names it from then on.

        Raises
        ------
        TransportError
            It cannot be opened from here, or is not that peer's.
        ProtocolError
            Not a descriptor.
        """
        try:
            pid, number = int(descriptor["pid"]), int(descriptor["fd"])
            token: bytes = descriptor["token"]
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            raise ProtocolError("not an offer of shared memory") from error
        is_token = isinstance(token, bytes) and len(token) == _TOKEN_NBYTES
        if not (0 < pid < 1 << 31 and 0 <= number < 1 << 31 and is_token):
            raise ProtocolError("not an offer of shared memory")
        if token in self._loans:
            return token
        try:
            # First the watch: a process that ends in between is seen, and its number not reused.
            pidfd = process_fd(pid)
            started = "" if pidfd is not None else process_start(pid)
        except OSError as error:
            raise TransportError(f"its process {pid} is not in view ({error.strerror})") from error
        try:
            fd = _open_signed(f"/proc/{pid}/fd/{number}", token)
        except BaseException:
            if pidfd is not None:
                os.close(pidfd)
            raise
        self._loans[token] = _Loan(fd, pid, pidfd, started)
        if pidfd is not None:
            self._loop.add_reader(pidfd, self.forget, token)
        elif self._looking is None:
            self._looking = self._loop.call_later(_LOOK_S, self._look)
        return token

    def _look(self) -> None:
        """Let go of the files of processes that have ended, where the system does not tell."""
        watched = {token: loan for token, loan in self._loans.items() if loan.pidfd is None}
        self._looking = self._loop.call_later(_LOOK_S, self._look) if watched else None
        for token, loan in watched.items():
            if loan.has_ended:
                self.forget(token)

    def checked(self, token: bytes, extents: Any, nbytes: int) -> list[tuple[int, int]]:
        """Places as a peer named them, once it is certain that `nbytes` are there.

        Raises
        ------
        TransportError
            No file of that token is open: the peer has to offer it again.
        ProtocolError
            The places do not add up to that, or are not in the file.
        """
        loan = self._loans.get(token)
        if loan is None:
            raise TransportError(_NOT_OFFERED)
        try:
            places = [(int(position), int(length)) for position, length in extents]
        except (OverflowError, TypeError, ValueError) as error:
            raise ProtocolError("not places in shared memory") from error
        end = os.fstat(loan.fd).st_size
        if any(first < 0 or length <= 0 or first + length > end for first, length in places):
            raise ProtocolError("places outside of shared memory")
        if sum(length for _, length in places) != nbytes:
            raise ProtocolError(f"places in shared memory that are not {nbytes} bytes")
        return places

    def read(
        self, token: bytes, wanted: Iterable[tuple[Sequence[tuple[int, int]], Buffer]]
    ) -> None:
        """Copy bytes of a peer into memory of this process.

        Parameters
        ----------
        wanted
            Places that were `checked`, and the memory for what is there.

        Raises
        ------
        TransportError
            The memory cannot be read any more, or was let go of before this began.
        """
        with self._held(token) as fd:
            for places, out in wanted:
                _read_into(out.data, fd, places)

    @contextlib.contextmanager
    def _held(self, token: bytes) -> Iterator[int]:
        with self._lock:
            loan = self._loans.get(token)
            if loan is None:
                raise TransportError(_NOT_OFFERED)
            loan.n_holders += 1
        try:
            yield loan.fd
        finally:
            self._release(loan)

    def _release(self, loan: _Loan) -> None:
        with self._lock:
            loan.n_holders -= 1
            is_last = not loan.n_holders
        if is_last:
            os.close(loan.fd)

    def forget(self, token: bytes) -> None:
        """Let go of a peer's file. Reads of it that are under way come to their end."""
        with self._lock:
            loan = self._loans.pop(token, None)
        if loan is not None:
            if loan.pidfd is not None:
                self._loop.remove_reader(loan.pidfd)
                os.close(loan.pidfd)
            self._release(loan)

    def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None
        for token in list(self._loans):
            self.forget(token)


def seal(token: bytes, parts: Iterable[Any]) -> int:
    """CRC-32 of what a message says of shared memory, with the bytes that it carries itself.

    The memory of a host has its own checks. What a message carries has none: another position
    would be read without complaint, as other rows.

    Parameters
    ----------
    parts
        For each buffer its places, or its bytes.

    Raises
    ------
    ProtocolError
        These are not such parts.
    """
    try:
        total = zlib.crc32(token)
        for part in parts:
            is_carried = isinstance(part, bytes)
            piece = part if is_carried else np.array(part, dtype="<u8").tobytes()
            total = zlib.crc32(piece, zlib.crc32(_PART.pack(is_carried, len(piece)), total))
    except (OverflowError, TypeError, ValueError) as error:
        raise ProtocolError("not places in shared memory") from error
    return total


def _read_into(view: memoryview, fd: int, places: Sequence[tuple[int, int]]) -> None:
    for position, nbytes in places:
        end = position + nbytes
        while position < end:
            try:
                count = preadv(fd, [view[: end - position]], position)
            except OSError as error:
                raise TransportError(f"cannot read the peer's memory: {error}") from error
            if not count:
                raise TransportError("the peer cut its memory short")
            view = view[count:]
            position += count


def _open_signed(path: str, token: bytes) -> int:
    try:
        # What a wrong number may stand for is neither waited for nor taken as a terminal.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise TransportError(f"its memory is not in view ({error.strerror})") from error
    try:
        if not is_memory_file(fd) or os.pread(fd, len(token), 0) != token:
            raise TransportError("what is in view there is not its memory: not the same host")
    except BaseException:
        os.close(fd)
        raise
    return fd
