"""TCP bandwidth of the connections that UCX makes to one host, as the kernel reports it.

UCX reports neither the bandwidth of a link nor its sockets. But the connection that carried a
message is the one whose acknowledged bytes grew by the message's size. The kernel knows its rate
(`transport.rate`). If no connection took the bytes, UCX used shared memory or a network card of its
own. No rate is needed then, because no codec keeps up with those.
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

#: Smaller messages prove nothing: many other things send as many bytes.
LEAST_NBYTES = 256 << 10

#: A connection carried messages if its acknowledged bytes grew by this share of theirs (minimum and
#: maximum). Another message may be in flight, and the last packets may not be acknowledged yet.
_SHARES = (0.5, 3.0)

#: If no connection carries messages, all connections are scanned again after this many bytes,
#: doubled each time: a process may have thousands.
_FIRST_PAUSE_NBYTES = 64 << 20
_MAX_PAUSE_NBYTES = 4 << 30
#: UCX may connect with the first message; the second scan knows the connections.
_N_FIRST_SCANS = 2


class HostReadings:
    """Readings of this process's connections to one host. Thread-safe.

    Parameters
    ----------
    host
        Address that the library connects to.
    not_ports
        Connections from or to these ports belong to other code, and may use another network.
    """

    def __init__(self, host: str, not_ports: Collection[int]) -> None:
        self._host = ipaddress.ip_address(host)
        self._not_ports = not_ports
        self._lock = threading.Lock()
        #: Acknowledged bytes of each connection at the last scan, by descriptor.
        self._acked: dict[int, int] = {}
        self._carriers: list[int] = []
        self._n_scans = 0
        #: Bytes of messages since one was last seen on a connection.
        self._missed_nbytes = 0
        self._pause_nbytes = _FIRST_PAUSE_NBYTES

    def is_quick(self, nbytes: int) -> bool:
        """Return whether `after` skips the scan of all connections."""
        return not self._is_due(self._missed_nbytes + nbytes)

    def after(self, nbytes: int) -> int | None:
        """Return the rate, in bytes a second, of the connection that took a message of this size.

        Return 0 if no connection took it, and None if this call did not scan, or the rate is
        unknown.
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
            return self._scan_all() if self._is_due(self._missed_nbytes) else None

    def _is_due(self, missed_nbytes: int) -> bool:
        return self._n_scans < _N_FIRST_SCANS or missed_nbytes >= self._pause_nbytes

    def _scan_all(self) -> int | None:
        infos = self._infos(_descriptors())
        found = self._seen_on(infos)
        self._acked = {number: acked_nbytes(info) for number, info in infos.items()}
        self._carriers = list(found)
        self._missed_nbytes = 0
        self._n_scans += 1
        if found or self._n_scans < _N_FIRST_SCANS:
            self._pause_nbytes = _FIRST_PAUSE_NBYTES
            return _rate(found)
        if self._n_scans > _N_FIRST_SCANS:
            self._pause_nbytes = min(2 * self._pause_nbytes, _MAX_PAUSE_NBYTES)
        return 0

    def _seen_on(self, infos: Mapping[int, bytes]) -> dict[int, bytes]:
        """Return the connections that took about as many bytes as the unseen messages have."""
        least, most = (share * self._missed_nbytes for share in _SHARES)
        return {
            number: info
            for number, info in infos.items()
            # It is unknown when a new connection took its bytes.
            if number in self._acked and least <= acked_nbytes(info) - self._acked[number] <= most
        }

    def _infos(self, descriptors: Iterable[int]) -> dict[int, bytes]:
        """Return the TCP info of the descriptors that are connections to the host."""
        return {number: info for number in descriptors if (info := self._info(number))}

    def _info(self, number: int) -> bytes:
        """Return the TCP info of a descriptor; empty if it is no connection to the host."""
        if socket.getdefaulttimeout() is not None:
            return b""  # a socket object would change the descriptor's blocking mode
        # The descriptor may be closed and reused at any moment. Then the kernel refuses, or
        # describes another connection to this host.
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
            sock.detach()  # this code does not own the descriptor

    def _is_it(self, name: str) -> bool:
        host = ipaddress.ip_address(name.partition("%")[0])
        return self._host in (host, getattr(host, "ipv4_mapped", None))


def _rate(carriers: dict[int, bytes]) -> int | None:
    """Return the rate of the fastest connection; None if the kernel has measured none."""
    return max((delivery_rate(info) or 0 for info in carriers.values()), default=0) or None


def _descriptors() -> list[int]:
    """Return all descriptors of this process; none where the system does not list them."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            return [int(name) for name in os.listdir(_DESCRIPTORS)]
    return []
