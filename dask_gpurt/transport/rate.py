"""Bandwidth of a link, from the delivery rates that the kernel's TCP measures.

Pure: the caller reads the socket. Timing messages would mislead: on busy hosts messages wait for
processors. Such a link looks slow, and compression would then be added to processors that have no
time to spare. For each acknowledged packet the kernel computes the rate at which data was delivered
while there was enough to send. Its own congestion control relies on this rate (Cardwell et al.,
BBR: Congestion-Based Congestion Control, ACM Queue 14(5), 2016).
"""

from __future__ import annotations

import struct
from collections import deque

#: Number of readings kept, and the minimum needed for a result.
_N_READINGS = 16
_N_ENOUGH = 3

#: In Linux's `struct tcp_info`: offsets of the flag for a rate limited by the application, of the
#: acknowledged bytes, and of the rate.
_APP_LIMITED = 7
_NUMBER = struct.Struct("=Q")
_ACKED_FROM = 120
_DELIVERY_RATE_FROM = 160
#: Length of the part that is read.
TCP_INFO_NBYTES = _DELIVERY_RATE_FROM + _NUMBER.size


def delivery_rate(tcp_info: bytes) -> int | None:
    """Return a connection's delivery rate in bytes a second, None if the application limited it.

    Parameters
    ----------
    tcp_info
        Result of `getsockopt(IPPROTO_TCP, TCP_INFO)` on Linux.
    """
    if len(tcp_info) < TCP_INFO_NBYTES or tcp_info[_APP_LIMITED] & 1:
        return None
    (rate,) = _NUMBER.unpack_from(tcp_info, _DELIVERY_RATE_FROM)
    return rate or None


def acked_nbytes(tcp_info: bytes) -> int:
    """Return the acknowledged bytes of a connection, 0 if the kernel does not report them."""
    if len(tcp_info) < TCP_INFO_NBYTES:
        return 0
    (nbytes,) = _NUMBER.unpack_from(tcp_info, _ACKED_FROM)
    return int(nbytes)


class LinkRate:
    """The bandwidth of a link, from readings of its connections after each message."""

    def __init__(self) -> None:
        self._readings: deque[int] = deque(maxlen=_N_READINGS)

    def add(self, reading: int | None) -> None:
        """Add a reading. None is ignored; 0 discards earlier readings, which were of another
        connection.
        """
        if reading:
            self._readings.append(reading)
        elif reading == 0:
            self._readings.clear()

    @property
    def bandwidth(self) -> float | None:
        """Bytes a second, None until there are enough readings.

        It is the upper quartile of the readings. Most are too low, because the receiver was late.
        A few are too high, because a burst passed at once.
        """
        if len(self._readings) < _N_ENOUGH:
            return None
        return float(sorted(self._readings)[len(self._readings) * 3 // 4])
