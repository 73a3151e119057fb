"""The sockets that UCX listens on: at which address, and when.

UCX takes any connection and keeps what comes by it before anybody can ask who sent it. So nobody
gets that far unless a peer has announced itself by Dask's own comms. At all other times a filter
in the kernel drops whatever comes to the listening sockets. Connections that are there go on.

UCX makes more sockets than the one that was asked for: each network device of its transport over
TCP has one, at the address of the device. The one that was asked for is at all addresses, and
`ucxx` offers no other; it is moved here.
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

#: Numbers of options that Python has no names for.
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
#: The program "keep 0 bytes of it", as an instruction of the kernel's packet filter.
_DROP_ALL = np.frombuffer(struct.pack("HBBI", 6, 0, 0, 0), dtype=np.uint8)
#: Where the kernel lists devices of InfiniBand, RoCE and EFA.
_FAST_DEVICES = "/sys/class/infiniband"
#: Connections that wait to be taken.
_BACKLOG = 128


class Door:
    """Listening sockets, and whether anybody may connect to them.

    Parameters
    ----------
    fds
        Of the sockets. They stay open as long as the process.
    """

    def __init__(self, fds: Iterable[int]) -> None:
        self._fds = list(fds)
        self.is_open = True
        #: Whether the kernel keeps others out. If not, UCX lets them in and they are turned away.
        self.has_filter = True
        self.close()

    def open(self) -> None:
        """Let others connect. An attempt from a little earlier is repeated by their kernel."""
        if not self.is_open:
            self._each(_SO_DETACH_FILTER, struct.pack("i", 0))
            self.is_open = True

    def close(self) -> None:
        """Let nobody connect any more."""
        if self.is_open:
            program = struct.pack("HxxxxxxP", 1, _DROP_ALL.__array_interface__["data"][0])
            self._each(_SO_ATTACH_FILTER, program)
            self.is_open = False

    def _each(self, option: int, value: bytes) -> None:
        for fd in self._fds:
            try:
                with socket.socket(fileno=os.dup(fd)) as one:
                    one.setsockopt(socket.SOL_SOCKET, option, value)
            except OSError:
                self.has_filter = False  # a sandbox, or a kernel without

    def leave_to_parent(self) -> None:
        """In a forked child: listen no more, or peers of a parent that died would wait for it."""
        with open(os.devnull, "rb") as nothing:
            for fd in self._fds:
                os.dup2(nothing.fileno(), fd, inheritable=False)
        self._fds.clear()


def listening() -> dict[int, int]:
    """Descriptors of listening TCP sockets that a started program would inherit, and their ports.

    UCX makes such sockets, and Python never does.
    """
    found = {}
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        with contextlib.suppress(OSError):
            # A copy of anything else would stay open, and keep it in every epoll that it is in.
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
    """Have a listening socket that somebody waits for in an epoll listen at one address alone.

    Parameters
    ----------
    fd
        Of the socket.
    host
        The address, of IPv4.

    Returns
    -------
    int or None
        Its new port; None if it stays where it is: the address is not one of this host's, or
        nobody waits for the socket.
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
        # Whoever has the number has the new socket then. The old one is closed by this, and leaves
        # every epoll by itself.
        os.dup2(new.fileno(), fd, inheritable=False)
        for epoll_fd, events in waits:
            # One epoll may have several numbers.
            with (
                select.epoll.fromfd(os.dup(epoll_fd)) as epoll,
                contextlib.suppress(FileExistsError),
            ):
                epoll.register(fd, events)
        return int(new.getsockname()[1])


def _waits_for(fd: int) -> list[tuple[int, int]]:
    """Descriptors of epolls of this process that a descriptor is in, and for which events."""
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
    """Option that keeps UCX off the network devices of other addresses.

    On a host with a faster network there is none, as it would have to name that network's devices.
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
