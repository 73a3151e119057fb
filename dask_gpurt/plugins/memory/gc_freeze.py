"""Freeze of long-lived objects, so that full garbage collections skip them.

A full collection visits every object. Dask, pandas, pyarrow and similar libraries have 120,000,
which takes 60 to 120 ms. The collecting thread holds the interpreter lock, so the event loop stands
still. Python runs full collections now and then, and Dask runs one whenever the process is above
`pause`. Objects that exist when the runtime starts hardly ever become garbage. Once they are
frozen, a full collection takes a few milliseconds.

Nothing is frozen in a process that the worker shares, or if the worker already has values. Objects
of users exist there, and those that become garbage must be found. Libraries that tasks import are
frozen when the worker has no task. Objects that tasks keep, such as a model, are frozen with them.
So a worker without tasks collects all its garbage now and then.
"""

from __future__ import annotations

import gc
import sys
from typing import TYPE_CHECKING

from tornado.ioloop import PeriodicCallback

if TYPE_CHECKING:
    from distributed import Worker

#: Least number of new modules for which a freeze is worth its collection. pandas has 340.
MANY_MODULES = 150
_CHECK_INTERVAL_MS = 2_000
#: Checks without a task until frozen objects are collected, too: five minutes. It takes 0.1 s.
CHECKS_PER_COLLECTION = 150


class GcFreeze:
    """The frozen objects of one worker's process, until `close`."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._checks: PeriodicCallback | None = None
        # A worker with a nanny has its process to itself. If objects are frozen already, other code
        # did it and relies on it: `gc.unfreeze` would thaw those too.
        self._is_ours = bool(worker.nanny) and not worker.data and not gc.get_freeze_count()
        if self._is_ours:
            # Before the first task there is hardly any garbage. A search takes 60 ms.
            if worker.state.transition_counter:
                gc.collect()
            self._freeze()

    def _freeze(self) -> None:
        gc.freeze()
        self._n_modules = len(sys.modules)
        self._n_checks = 0

    def watch(self) -> None:
        """Call `renew` regularly from now on."""
        if self._is_ours:
            self._checks = PeriodicCallback(self.renew, _CHECK_INTERVAL_MS)
            self._checks.start()

    def renew(self) -> None:
        """Collect all garbage and freeze the rest, if the worker has no task and it is worth it."""
        if self._worker.state.tasks or self._worker.data:
            return
        self._n_checks += 1
        n_new = len(sys.modules) - self._n_modules
        if n_new >= MANY_MODULES or self._n_checks >= CHECKS_PER_COLLECTION:
            gc.unfreeze()
            gc.collect()
            self._freeze()

    def close(self) -> None:
        """Let collections visit all objects again."""
        if self._checks is not None:
            self._checks.stop()
        if self._is_ours:
            self._is_ours = False
            gc.unfreeze()
