"""Bandwidth of a link, as the system's TCP measures it. Pure: whoever has the socket asks it.

Timing messages would not do: where processors are busy, messages wait for them, and a link that
looks slow would have compression added to processors that have none to spare. The kernel knows
better. For each acknowledged packet it works out at what rate data was delivered while there was
enough to send, which is what its own congestion control goes by (Cardwell et al., BBR:
Congestion-Based Congestion Control, ACM Queue 14(5), 2016).
"""

from __future__ import annotations

import struct
from collections import deque

#: Readings that are remembered, and how many it takes to say anything.
_N_READINGS = 16
_N_ENOUGH = 3

#: In Linux's `struct tcp_info`: the flag for a rate that the application held down, the bytes that
#: were acknowledged, and the rate.
_APP_LIMITED = 7
_NUMBER = struct.Struct("=Q")
_ACKED_FROM = 120
_DELIVERY_RATE_FROM = 160
#: Bytes of it that are wanted.
TCP_INFO_NBYTES = _DELIVERY_RATE_FROM + _NUMBER.size


def delivery_rate(tcp_info: bytes) -> int | None:
    """Bytes a second that a connection delivered, None if it was not put to the test.

    Parameters
    ----------
    tcp_info
        What `getsockopt(IPPROTO_TCP, TCP_INFO)` gives on Linux.
    """
    if len(tcp_info) < TCP_INFO_NBYTES or tcp_info[_APP_LIMITED] & 1:
        return None
    (rate,) = _NUMBER.unpack_from(tcp_info, _DELIVERY_RATE_FROM)
    return rate or None


def acked_nbytes(tcp_info: bytes) -> int:
    """Bytes that a connection has brought to its other end, 0 where the kernel does not say."""
    if len(tcp_info) < TCP_INFO_NBYTES:
        return 0
    (nbytes,) = _NUMBER.unpack_from(tcp_info, _ACKED_FROM)
    return int(nbytes)


class LinkRate:
    """What a link carries, from readings of its connections after each message."""

    def __init__(self) -> None:
        self._readings: deque[int] = deque(maxlen=_N_READINGS)

    def add(self, reading: int | None) -> None:
        """Take in a reading, if there is one; 0 says that earlier ones were of something else."""
        if reading:
            self._readings.append(reading)
        elif reading == 0:
            self._readings.clear()

    @property
    def bandwidth(self) -> float | None:
        """Bytes a second, None while too little is known.

        The upper quartile: most readings err on the low side, when the receiver was late, and a
        few on the high side, when a burst went through at once.
        """
        if len(self._readings) < _N_ENOUGH:
            return None
        return float(sorted(self._readings)[len(self._readings) * 3 // 4])
