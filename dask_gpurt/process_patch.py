"""Patches of a whole process, which several workers or schedulers of it may need at once."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable


class ProcessPatch:
    """A patch that the first of its holders installs, and the last one takes back.

    Parameters
    ----------
    install
        Replaces something of the process, and returns the function that restores it.
    """

    def __init__(self, install: Callable[[], Callable[[], None]]) -> None:
        self._install = install
        # Reentrant: garbage collection may finalize a holder while this thread holds the lock.
        self._lock = threading.RLock()
        self._n_holders = 0

    def hold(self, holder: object) -> weakref.finalize[[], object]:
        """Keep the patch until the returned function is called or `holder` is garbage collected."""
        with self._lock:
            if not self._n_holders:
                self._restore = self._install()
            self._n_holders += 1
        return weakref.finalize(holder, self._release)

    def _release(self) -> None:
        with self._lock:
            self._n_holders -= 1
            if not self._n_holders:
                self._restore()
