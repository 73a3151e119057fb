"""Zero-copy hand-over of shards between processes of one host, in memory that both can read.

A `Lender` signs the memory file of its outgoing shards (`devices.host_memory.pages`), and tells the
places of a buffer in it. A `Borrower` opens the files of its peers through `/proc`. That works only
if both run for the same user, on the same host and in view of each other. The signature proves that
it is the right file. Two containers do not see each other's processes, and may use the same process
ids. So the borrower first compares the namespaces of process ids. A message then carries places
instead of bytes, and the borrower reads each shard once, directly into its own memory.

The loan ends with the answer to the message: the lender keeps the buffer until then. A peer that
dies leaves nothing behind. The file has no name. A borrower asks every second which processes still
run, and closes the files of the others. It keeps few files open, and opens the others again when it
reads them. A lender whose borrower dies gets an error instead of an answer.

The borrower reads by position instead of mapping the file. A mapped copy is up to twice as fast.
But Dask's memory monitor would count the peer's memory as this worker's own. And a peer that
truncates its file would kill this process instead of causing an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dask_gpurt.errors import ProtocolError, TransportError
from dask_gpurt.system_calls import (
    is_memory_file,
    preadv,
    process_namespace,
    process_start,
)

Buffer = npt.NDArray[np.uint8]
_TOKEN_NBYTES = 16
#: Whether the message carries a part itself, and the part's length.
_PART = struct.Struct("<?Q")
#: Files of peers that stay open between reads. Opening one takes some 10 us. A process may only
#: have so many, and each of 64 workers on one host would hold the files of all.
MOST_OPEN = 16
#: Interval of checks for dead peers. Rejected: a descriptor of each process, with which the system
#: reports its end at once. It is one more open file for each peer.
_POLL_S = 1.0
_NOT_OFFERED = "shared memory that was not offered, or whose process has ended"
_ELSEWHERE = "it runs in another container, or on another host"


class SharedMemory(Protocol):
    """Memory that a lender lends from: `devices.host_memory.pages.SharedPages`."""

    fd: int

    def extents(self, address: int, nbytes: int) -> list[tuple[int, int]]:
        """Return the places of some bytes in the file; raise `KeyError` if they are not in it."""


class Lender:
    """The sending end of shared memory, one per worker."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        token = os.urandom(_TOKEN_NBYTES)
        os.pwrite(memory.fd, token, 0)
        #: Plain values with which a peer can open the file.
        self.descriptor: dict[str, Any] = {
            "pid": os.getpid(),
            "pid_namespace": process_namespace(),
            "fd": memory.fd,
            "token": token,
        }

    def place(self, buffer: Buffer) -> list[tuple[int, int]] | None:
        """Return the places of a buffer in the file, or None if it is not in the file."""
        try:
            return self._memory.extents(buffer.__array_interface__["data"][0], buffer.nbytes)
        except KeyError:
            return None


class _OpenFile:
    """An open file of a peer, held by the borrower and by each running read."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.n_holders = 1


@dataclass(frozen=True)
class _Loan:
    """What names a peer's file, and the process that has it."""

    pid: int
    number: int
    #: A process's number may be used again, but not with the same start time.
    started: str

    @property
    def path(self) -> str:
        return f"/proc/{self.pid}/fd/{self.number}"

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        try:
            return process_start(self.pid) != self.started
        except OSError:
            return True


class Borrower:
    """The receiving end of shared memory, one per worker.

    Runs on the event loop, except `read`, which threads may call. A file that is closed during a
    read stays open until the read ends: its descriptor may be reused the moment it is closed.

    Parameters
    ----------
    loop
        Runs the checks for peers that have ended.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._loans: dict[bytes, _Loan] = {}
        #: Open files by token, the one that was read last at the end.
        self._files: dict[bytes, _OpenFile] = {}
        self._polling: asyncio.TimerHandle | None = None
        # Guards the files and their holders; not held over a read.
        self._lock = threading.Lock()

    def open(self, descriptor: Mapping[str, Any]) -> bytes:
        """Open a peer's file; return the token that names it.

        Raises
        ------
        TransportError
            This process cannot open the file, or it is not that peer's.
        ProtocolError
            The descriptor is malformed.
        """
        try:
            pid, number = int(descriptor["pid"]), int(descriptor["fd"])
            namespace = int(descriptor["pid_namespace"])
            token: bytes = descriptor["token"]
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            raise ProtocolError("not an offer of shared memory") from error
        is_token = isinstance(token, bytes) and len(token) == _TOKEN_NBYTES
        if not (0 < pid < 1 << 31 and 0 <= number < 1 << 31 and is_token):
            raise ProtocolError("not an offer of shared memory")
        if token in self._loans:
            return token
        if namespace != process_namespace():
            raise TransportError(_ELSEWHERE)
        try:
            # First: if the process ends before the file is open, a later check notices that.
            loan = _Loan(pid, number, process_start(pid))
        except OSError as error:
            raise TransportError(
                f"its process {pid} is not visible here ({error.strerror})"
            ) from error
        with self._lock:
            self._files[token] = _OpenFile(_open_signed(loan.path, token))
            self._loans[token] = loan
            self._close_oldest()
        if self._polling is None:
            self._polling = self._loop.call_later(_POLL_S, self._poll)
        return token

    def _poll(self) -> None:
        """Forget processes that have ended."""
        for token in [token for token, loan in self._loans.items() if loan.has_ended]:
            self.forget(token)
        self._polling = self._loop.call_later(_POLL_S, self._poll) if self._loans else None

    def checked(self, token: bytes, extents: Any, nbytes: int) -> list[tuple[int, int]]:
        """Return the places that a peer named, once they are known to hold `nbytes`.

        Raises
        ------
        TransportError
            No file with that token is known, or its process has ended: the peer must offer it
            again.
        ProtocolError
            The places do not add up to `nbytes`, or are outside the file.
        """
        with self._held(token) as fd:
            end = os.fstat(fd).st_size
        try:
            places = [(int(position), int(length)) for position, length in extents]
        except (OverflowError, TypeError, ValueError) as error:
            raise ProtocolError("not places in shared memory") from error
        if any(first < 0 or length <= 0 or first + length > end for first, length in places):
            raise ProtocolError("places outside of shared memory")
        if sum(length for _, length in places) != nbytes:
            raise ProtocolError(f"places in shared memory that are not {nbytes} bytes")
        return places

    def read(
        self, token: bytes, wanted: Iterable[tuple[Sequence[tuple[int, int]], Buffer]]
    ) -> None:
        """Copy a peer's bytes into memory of this process.

        Parameters
        ----------
        wanted
            Pairs of checked places and the memory to fill.

        Raises
        ------
        TransportError
            The file cannot be read any more, or was forgotten before this call.
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
            file = self._files.pop(token, None) or _OpenFile(_open_signed(loan.path, token))
            file.n_holders += 1
            self._files[token] = file
            self._close_oldest()
        try:
            yield file.fd
        finally:
            with self._lock:
                _release(file)

    def _close_oldest(self) -> None:
        while len(self._files) > MOST_OPEN:
            _release(self._files.pop(next(iter(self._files))))

    def forget(self, token: bytes) -> None:
        """Close a peer's file. Reads in progress finish."""
        with self._lock:
            self._loans.pop(token, None)
            if (file := self._files.pop(token, None)) is not None:
                _release(file)

    def close(self) -> None:
        if self._polling is not None:
            self._polling.cancel()
            self._polling = None
        for token in list(self._loans):
            self.forget(token)


def _release(file: _OpenFile) -> None:
    """Let go of a file; the last holder closes it."""
    file.n_holders -= 1
    if not file.n_holders:
        os.close(file.fd)


def seal(token: bytes, parts: Iterable[Any]) -> int:
    """Return the CRC-32 of a message's places in shared memory, and of the bytes it carries.

    The memory of a host has its own checks, but a message's content has none. A damaged position
    would read other rows without an error.

    Parameters
    ----------
    parts
        For each buffer, its places or its bytes.

    Raises
    ------
    ProtocolError
        The parts are malformed.
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
                raise TransportError("the peer truncated its memory file")
            view = view[count:]
            position += count


def _open_signed(path: str, token: bytes) -> int:
    try:
        # A wrong number may name any file: do not block on it, nor make it the terminal.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise TransportError(f"its memory is not visible here ({error.strerror})") from error
    try:
        if not is_memory_file(fd) or os.pread(fd, len(token), 0) != token:
            raise TransportError("the file found there is not its memory: not the same host")
    except BaseException:
        os.close(fd)
        raise
    return fd
