"""A checksum at memory speed, for data that a process reads back from its own disk.

The transport has a similar checksum for messages. This one also detects swapped blocks, which a
disk may cause, and it can be computed piece by piece.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

#: Number of 64-bit lanes, and of rows that are summed into one sum per lane.
_LANES = 128
_ROWS = 64
#: All pieces of a checksum except the last have a multiple of this length.
STEP_NBYTES = 8 * _LANES * _ROWS
#: Bytes per NumPy call. The sums of one call stay in the cache.
_AT_ONCE_NBYTES = 64 * STEP_NBYTES


def checksum(data: npt.NDArray[Any], before: int = 0) -> int:
    """Return the CRC-32 of the lane sums of each 64 KiB block, and of the rest at the end.

    In each 64 KiB block, the words of each of 128 lanes are summed. The checksum detects changed
    words, missing words, words in another lane, and blocks of 64 KiB that changed places. It does
    not detect blocks of 1 KiB that changed places within 64 KiB. A CRC-32 of the bytes would, at a
    quarter of the speed.

    Parameters
    ----------
    before
        Checksum of the preceding bytes, whose number is a multiple of `STEP_NBYTES`.
    """
    whole_nbytes = data.nbytes // STEP_NBYTES * STEP_NBYTES
    for start in range(0, whole_nbytes, _AT_ONCE_NBYTES):
        piece = data[start : min(start + _AT_ONCE_NBYTES, whole_nbytes)]
        words = piece.view("<u8").reshape(-1, _ROWS, _LANES)
        before = zlib.crc32(np.add.reduce(words, axis=1, dtype="<u8").data, before)
    return zlib.crc32(data[whole_nbytes:].data, before)
