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
from collections.abc import Collection, Iterable

from dask_gpurt.transport.rate import TCP_INFO_NBYTES, acked_nbytes, delivery_rate

_DESCRIPTORS = "/proc/self/fd"

#: A connection carried a message if it took this share of it since the last look. Others may be
#: under way beside it, and the last packets need not be acknowledged yet.
_SHARE = 0.5

#: Where no connection carries messages, all of them are looked at again after twice as many bytes
#: each time, up to this: a process may have thousands.
_REST_AT_MOST_NBYTES = 4 * 2**30


class HostReadings:
    """Readings of connections from this process to one host.

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
        #: Bytes that a connection had brought there at the last look, by descriptor.
        self._acked: dict[int, int] = {}
        self._missed_nbytes = self._rest_nbytes = 0
        self._looked_at(_descriptors(), 0)

    def after(self, nbytes: int) -> int | None:
        """Bytes a second of the connection that took a message of so many bytes.

        None where there is none, or it was not put to the test.
        """
        carriers = self._looked_at(list(self._acked), nbytes)
        if not carriers:
            self._missed_nbytes += nbytes
            if self._missed_nbytes < self._rest_nbytes:
                return None
            carriers = self._looked_at(_descriptors(), nbytes)
            rest_nbytes = 2 * (self._rest_nbytes or nbytes)
            self._rest_nbytes = 0 if carriers else min(rest_nbytes, _REST_AT_MOST_NBYTES)
            self._missed_nbytes = 0
        return max((delivery_rate(info) or 0 for info in carriers), default=0) or None

    def _looked_at(self, descriptors: Iterable[int], nbytes: int) -> list[bytes]:
        """What the kernel says of those that took much of so many bytes."""
        carriers = []
        for number in descriptors:
            info = self._info(number)
            if not info:
                self._acked.pop(number, None)
                continue
            acked = acked_nbytes(info)
            before, self._acked[number] = self._acked.get(number, 0), acked
            if acked - before >= _SHARE * nbytes:
                carriers.append(info)
        return carriers

    def _info(self, number: int) -> bytes:
        """Of a descriptor that is a connection to the host; else nothing."""
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


def _descriptors() -> list[int]:
    """All of this process, where the system says so."""
    # With a default timeout, to look at a socket would be to change how it blocks.
    if sys.platform == "linux" and socket.getdefaulttimeout() is None:
        with contextlib.suppress(OSError):
            return [int(name) for name in os.listdir(_DESCRIPTORS)]
    return []
