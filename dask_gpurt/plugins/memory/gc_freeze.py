"""What lives as long as its worker is not looked through for garbage over and over again.

A full collection looks at every object that there is. Those of Dask, pandas, pyarrow and the like
are 120,000, which takes 60 to 120 ms with the interpreter lock held, so that the event loop stands
still in whatever thread it happens. Python collects now and then, and Dask whenever the process is
above `pause`. What is there when the runtime comes is hardly ever garbage later: set apart, it is
not looked at any more, and a collection takes a few milliseconds.

Not in a process that is not the worker's own, nor where a worker has values already: there are
objects of a user's, and what of them becomes garbage has to be found.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distributed import Worker


class GcFreeze:
    """Objects of one worker's process that collections pass by, from now on until `end`."""

    def __init__(self, worker: Worker) -> None:
        # A nanny's worker has its process to itself. If some are set apart already, somebody else
        # did it, who would miss them: all of them come back at once.
        self._is_ours = bool(worker.nanny) and not worker.data and not gc.get_freeze_count()
        if self._is_ours:
            gc.collect()
            gc.freeze()

    def end(self) -> None:
        """Have collections look at everything again."""
        if self._is_ours:
            self._is_ours = False
            gc.unfreeze()
