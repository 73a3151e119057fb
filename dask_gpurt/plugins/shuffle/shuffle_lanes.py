"""The threads of a worker for all work of shuffles that touches every byte."""

from __future__ import annotations

from dask_gpurt.devices.lanes import Lane
from dask_gpurt.devices.ledger import Ledger


class ShuffleLanes:
    """Threads in which runs encode and spill.

    Parameters
    ----------
    n_threads
        Threads for codecs: as many as the worker has for tasks.
    """

    def __init__(self, n_threads: int, ledger: Ledger) -> None:
        self.codec = Lane("codec", n_threads, ledger)
        self.spill = Lane("spill", 1, ledger)

    def close(self) -> None:
        self.codec.close()
        self.spill.close()
