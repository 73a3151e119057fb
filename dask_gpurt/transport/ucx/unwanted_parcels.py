"""Disposal of unwanted parcels: receive them into throw-away memory, or leave them unread."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from dask_gpurt.transport.ucx.context import UcxContext
from dask_gpurt.transport.ucx.links import Transfer, UcxLink
from dask_gpurt.transport.ucx.protocol import SMALL_NBYTES

#: A larger parcel stays at its sender, because dropping it would take this much memory.
_LARGEST_DROPPED_NBYTES = 1 << 30


class UnwantedParcels:
    """Receiver of unwanted parcels. In the thread of UCX.

    Parameters
    ----------
    hold
        Keeps memory until UCX is done with it.
    """

    def __init__(
        self, ucx: UcxContext, counters: Counter[str], hold: Callable[[Transfer], None]
    ) -> None:
        self._worker, self._array = ucx.worker, ucx.array
        self._counters = counters
        self._hold = hold

    def drop(self, probe: Any, link: UcxLink | None) -> None:
        """Receive an unwanted parcel, so that its sender is done with it."""
        self._counters["dropped_parcels"] += 1
        if probe.length > _LARGEST_DROPPED_NBYTES:
            return  # it stays at its sender until the link ends
        sink = np.empty(max(1, probe.length), dtype=np.uint8)
        transfer = Transfer(link)
        transfer.add(self._worker.tag_recv_with_handle(self._array(sink), probe), sink)
        self._hold(transfer)

    def refuse(self, probe: Any) -> None:
        """Spend next to nothing on a parcel of an unverified sender.

        A large parcel stays in UCX, which holds only its beginning.
        """
        self._counters["refused_parcels"] += 1
        if probe.length < SMALL_NBYTES:
            self.drop(probe, None)
