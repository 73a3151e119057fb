"""What the kernel says of TCP connections that a library made for itself: UCX's to one host.

UCX tells neither what a link carries nor which sockets are its own. But the connection that took a
message's bytes is the one that carried it, and the kernel knows its rate (`transport.rate`). Where
no connection took them UCX went another way, by shared memory or a network card of its own, and
nothing has to be known of it: no codec keeps up with those.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import sys
import threading
from collections.abc import Collection, Iterable, Mapping

from dask_gpurt.transport.rate import TCP_INFO_NBYTES, acked_nbytes, delivery_rate

_DESCRIPTORS = "/proc/self/fd"

#: Of smaller messages nothing is concluded: many other things take as many bytes.
LEAST_NBYTES = 256 << 10

#: A connection carried messages if it took this share of them since the last look, at the least
#: and at the most. Another one may be under way beside them, and the last packets need not be
#: acknowledged yet.
_SHARES = (0.5, 3.0)

#: Where no connection carries messages, all of them are looked at again after so many bytes, and
#: after twice as many each time: a process may have thousands.
_FIRST_REST_NBYTES = 64 << 20
_REST_AT_MOST_NBYTES = 4 << 30
#: UCX may make its connections with the first message; with the second they are known.
_N_FIRST_LOOKS = 2


class HostReadings:
    """Readings of connections from this process to one host. Safe to use from any thread.

    Parameters
    ----------
    host
        Address that the library connects to.
    not_ports
        Connections from or to these are somebody else's, and may go by another network.
    """

    def __init__(self, host: str, not_ports: Collection[int]) -> None:
        self._host = ipaddress.ip_address(host)
        self._not_ports = not_ports
        self._lock = threading.Lock()
        #: Bytes that a connection had brought there when it was looked at, by descriptor.
        self._acked: dict[int, int] = {}
        self._carriers: list[int] = []
        self._n_looks = 0
        #: Since messages were last seen on a connection.
        self._missed_nbytes = 0
        self._rest_nbytes = _FIRST_REST_NBYTES

    def is_quick(self, nbytes: int) -> bool:
        """Whether `after` does not look at all connections of the process."""
        return not self._is_due(self._missed_nbytes + nbytes)

    def after(self, nbytes: int) -> int | None:
        """Bytes a second of the connection that took a message of so many bytes.

        0 where none did, and None where it was not looked for, or is not known.
        """
        if nbytes < LEAST_NBYTES:
            return None
        with self._lock:
            self._missed_nbytes += nbytes
            found = self._seen_on(self._infos(self._carriers))
            if found:
                for number, info in found.items():
                    self._acked[number] = acked_nbytes(info)
                self._missed_nbytes = 0
                return _rate(found)
            return self._looked_everywhere() if self._is_due(self._missed_nbytes) else None

    def _is_due(self, missed_nbytes: int) -> bool:
        return self._n_looks < _N_FIRST_LOOKS or missed_nbytes >= self._rest_nbytes

    def _looked_everywhere(self) -> int | None:
        infos = self._infos(_descriptors())
        found = self._seen_on(infos)
        self._acked = {number: acked_nbytes(info) for number, info in infos.items()}
        self._carriers = list(found)
        self._missed_nbytes = 0
        self._n_looks += 1
        if found or self._n_looks < _N_FIRST_LOOKS:
            self._rest_nbytes = _FIRST_REST_NBYTES
            return _rate(found)
        if self._n_looks > _N_FIRST_LOOKS:
            self._rest_nbytes = min(2 * self._rest_nbytes, _REST_AT_MOST_NBYTES)
        return 0

    def _seen_on(self, infos: Mapping[int, bytes]) -> dict[int, bytes]:
        """Those that took about as many bytes as were missed."""
        least, most = (share * self._missed_nbytes for share in _SHARES)
        return {
            number: info
            for number, info in infos.items()
            # Of one that is new nobody knows when it took what it has taken.
            if number in self._acked and least <= acked_nbytes(info) - self._acked[number] <= most
        }

    def _infos(self, descriptors: Iterable[int]) -> dict[int, bytes]:
        """What the kernel says of those that are connections to the host."""
        return {number: info for number in descriptors if (info := self._info(number))}

    def _info(self, number: int) -> bytes:
        """Of a descriptor that is a connection to the host; else nothing."""
        if socket.getdefaulttimeout() is not None:
            return b""  # to look at a socket would be to change how it blocks
        # It may be closed, and be another file's, at any moment: then its kernel says no, or says
        # something of another connection to this host.
        try:
            sock = socket.socket(fileno=number)
        except OSError:
            return b""
        try:
            if sock.family not in (socket.AF_INET, socket.AF_INET6):
                return b""
            (host, port), own_port = sock.getpeername()[:2], sock.getsockname()[1]
            if port in self._not_ports or own_port in self._not_ports or not self._is_it(host):
                return b""
            return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_NBYTES)
        except OSError:
            return b""
        finally:
            sock.detach()  # it is not ours to close

    def _is_it(self, name: str) -> bool:
        host = ipaddress.ip_address(name.partition("%")[0])
        return self._host in (host, getattr(host, "ipv4_mapped", None))


def _rate(carriers: dict[int, bytes]) -> int | None:
    """Of the quickest of them; None where the kernel has put none to the test."""
    return max((delivery_rate(info) or 0 for info in carriers.values()), default=0) or None


def _descriptors() -> list[int]:
    """All of this process, where the system says so."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            return [int(name) for name in os.listdir(_DESCRIPTORS)]
    return []
