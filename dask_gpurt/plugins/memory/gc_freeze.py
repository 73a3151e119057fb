"""Freeze of long-lived objects, so that full garbage collections skip them.

A full collection visits every object. Dask, pandas, pyarrow and similar libraries have 120,000,
which takes 60 to 120 ms. The collecting thread holds the interpreter lock, so the event loop stands
still. Python runs full collections now and then, and Dask runs one whenever the process is above
`pause`. Objects that exist when the runtime starts hardly ever become garbage. Once they are
frozen, a full collection takes a few milliseconds.

Nothing is frozen in a process that the worker shares, or if the worker already has values. Objects
of users exist there, and those that become garbage must be found.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distributed import Worker


class GcFreeze:
    """The frozen objects of one worker's process, until `close`."""

    def __init__(self, worker: Worker) -> None:
        # A worker with a nanny has its process to itself. If objects are frozen already, other code
        # did it and relies on it: `gc.unfreeze` would thaw those too.
        self._is_ours = bool(worker.nanny) and not worker.data and not gc.get_freeze_count()
        if self._is_ours:
            gc.collect()
            gc.freeze()

    def close(self) -> None:
        """Let collections visit all objects again."""
        if self._is_ours:
            self._is_ours = False
            gc.unfreeze()
