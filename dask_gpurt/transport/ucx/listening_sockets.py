"""The sockets that UCX listens on: their addresses, and a filter that admits announced peers only.

UCX accepts any connection, and keeps its data before the sender can be verified. So connections are
possible only after a peer was announced through Dask's own comms. At all other times a filter in
the kernel drops packets to the listening sockets. Existing connections continue.

UCX creates one socket for the listener, and one for each network device of its TCP transport, at
the device's address. The listener's socket is bound to all addresses, and `ucxx` offers no other
way; this module moves it.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import select
import socket
import stat
import struct
from collections.abc import Iterable, Mapping

import numpy as np
import psutil

#: Socket options that Python has no names for.
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
#: The packet filter "keep 0 bytes", as one instruction.
_DROP_ALL = np.frombuffer(struct.pack("HBBI", 6, 0, 0, 0), dtype=np.uint8)
#: Folder in which the kernel lists InfiniBand, RoCE and EFA devices.
_FAST_DEVICES = "/sys/class/infiniband"
#: Limit of pending connections.
_BACKLOG = 128


class ListeningSockets:
    """Listening sockets that can be opened and closed to new connections.

    Parameters
    ----------
    fds
        Descriptors of the sockets. They stay open as long as the process.
    """

    def __init__(self, fds: Iterable[int]) -> None:
        self._fds = list(fds)
        self.is_open = True
        self.close()

    def open(self) -> None:
        """Admit new connections. The kernel of an earlier caller repeats its attempt."""
        if not self.is_open:
            self._each(_SO_DETACH_FILTER, struct.pack("i", 0))
            self.is_open = True

    def close(self) -> None:
        """Admit no new connections."""
        if self.is_open:
            program = struct.pack("HxxxxxxP", 1, _DROP_ALL.__array_interface__["data"][0])
            self._each(_SO_ATTACH_FILTER, program)
            self.is_open = False

    def _each(self, option: int, value: bytes) -> None:
        for fd in self._fds:
            # In a sandbox, or with a kernel without filters, the switchboard rejects connections.
            with (
                contextlib.suppress(OSError),
                socket.socket(fileno=os.dup(fd)) as one,
            ):
                one.setsockopt(socket.SOL_SOCKET, option, value)

    def leave_to_parent(self) -> None:
        """Stop listening in a forked child, or peers of a dead parent would wait for it."""
        with open(os.devnull, "rb") as nothing:
            for fd in self._fds:
                os.dup2(nothing.fileno(), fd, inheritable=False)
        self._fds.clear()


def listening() -> dict[int, int]:
    """Return inheritable listening TCP sockets: descriptor to port.

    UCX makes inheritable sockets, and Python never does.
    """
    found = {}
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        with contextlib.suppress(OSError):
            # A copy of another descriptor would stay open, and stay in every epoll it is in.
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            if fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC:
                continue
            with socket.socket(fileno=os.dup(fd)) as one:
                is_tcp = one.family in (socket.AF_INET, socket.AF_INET6)
                if is_tcp and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found[fd] = int(one.getsockname()[1])
    return found


def move(fd: int, host: str) -> int | None:
    """Rebind a listening socket that is registered in an epoll to a single address.

    Parameters
    ----------
    fd
        Descriptor of the socket.
    host
        The IPv4 address.

    Returns
    -------
    int or None
        The new port. None if the socket stays: the address is not one of this host's, or no epoll
        has the socket.
    """
    waits = _waits_for(fd)
    if not waits:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as new:
        try:
            new.bind((host, 0))
        except OSError:
            return None
        new.listen(_BACKLOG)
        new.setblocking(False)
        # The descriptor now names the new socket. This closes the old one, and removes it from
        # every epoll.
        os.dup2(new.fileno(), fd, inheritable=False)
        for epoll_fd, events in waits:
            # One epoll may have several descriptors.
            with (
                select.epoll.fromfd(os.dup(epoll_fd)) as epoll,
                contextlib.suppress(FileExistsError),
            ):
                epoll.register(fd, events)
        return int(new.getsockname()[1])


def _waits_for(fd: int) -> list[tuple[int, int]]:
    """Return the epolls of this process that have a descriptor registered, with its events."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}") != "anon_inode:[eventpoll]":
                continue
            with open(f"/proc/self/fdinfo/{name}") as file:
                rows = [line.split() for line in file if line.startswith("tfd:")]
            found += [(int(name), int(row[3], 16)) for row in rows if int(row[1]) == fd]
    return found


def devices_for(host: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the option that restricts UCX to the network device of an address.

    On a host with a faster network it is empty, because it would have to name that network's
    devices.
    """
    found = [
        name
        for name, addresses in psutil.net_if_addrs().items()
        if any(one.address.partition("%")[0] == host for one in addresses)
    ]
    has_fast_network = os.path.isdir(_FAST_DEVICES) and bool(os.listdir(_FAST_DEVICES))
    if "UCX_NET_DEVICES" in environment or len(found) != 1:
        return {}
    if has_fast_network and not ipaddress.ip_address(host).is_loopback:
        return {}
    return {"NET_DEVICES": found[0]}
