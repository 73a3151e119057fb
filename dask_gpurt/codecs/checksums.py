"""A checksum at the speed of memory, for bytes that a process reads back from its own disk.

The transport has a similar one for messages. This one also notices blocks that changed places, as
a disk may do to them, and can be taken piece by piece.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

#: 64-bit words that are summed side by side, and how many rows of them make one sum.
_LANES = 128
_ROWS = 64
#: Pieces of one checksum are multiples of this, but for the last.
STEP_NBYTES = 8 * _LANES * _ROWS
#: As many steps at once as leave their sums in the cache.
_AT_ONCE_NBYTES = 64 * STEP_NBYTES


def checksum(data: npt.NDArray[Any], before: int = 0) -> int:
    """CRC-32 of the sums of each 64 KiB and of what is left at the end.

    In each 64 KiB the words that stand in one lane of 128 are summed. A word that changed, is
    missing or stands in another lane is noticed, and so is a block that stands in another 64 KiB;
    blocks of 1 KiB that changed places within 64 KiB are not. CRC-32 of the bytes themselves would
    notice these too, at a quarter of the speed.

    Parameters
    ----------
    before
        Checksum of the bytes before these, a multiple of `STEP_NBYTES`.
    """
    whole_nbytes = data.nbytes // STEP_NBYTES * STEP_NBYTES
    for start in range(0, whole_nbytes, _AT_ONCE_NBYTES):
        piece = data[start : min(start + _AT_ONCE_NBYTES, whole_nbytes)]
        words = piece.view("<u8").reshape(-1, _ROWS, _LANES)
        before = zlib.crc32(np.add.reduce(words, axis=1, dtype="<u8").data, before)
    return zlib.crc32(data[whole_nbytes:].data, before)
