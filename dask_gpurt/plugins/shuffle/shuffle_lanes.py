"""The threads of a worker that process the messages of shuffles and spill shards."""

from __future__ import annotations

from dask_gpurt.devices.lanes import Lane
from dask_gpurt.devices.ledger import Ledger


class ShuffleLanes:
    """Threads that encode, decode and copy messages, and one thread that spills.

    Parameters
    ----------
    n_threads
        Number of threads for messages: as many as the worker has for tasks.
    """

    def __init__(self, n_threads: int, ledger: Ledger) -> None:
        self.codec = Lane("codec", n_threads, ledger)
        self.spill = Lane("spill", 1, ledger)

    def close(self) -> None:
        self.codec.close()
        self.spill.close()
