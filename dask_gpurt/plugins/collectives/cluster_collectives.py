"""The scheduler's side of all collective operations: broadcasts, groups of ranks, reductions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from typing import TYPE_CHECKING, Any

from dask_gpurt.plugins.collectives.broadcasts.broadcaster import Broadcaster
from dask_gpurt.plugins.collectives.groups.gangs import Gangs
from dask_gpurt.plugins.collectives.reductions import SlicedReductions

if TYPE_CHECKING:
    from distributed import Scheduler

    from dask_gpurt.config import Settings

#: What `ClusterCollectives.report` returns if they are off.
NO_COLLECTIVES = {"broadcasts": None, "collectives": None, "reductions": None}


class ClusterCollectives:
    """The collective operations of one cluster, until `uninstall`.

    Parameters
    ----------
    ready
        Addresses of workers that run the runtime.
    reported
        Waits until workers that join have said whether they are ready.
    settings
        Returns the settings of now.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        ready: Collection[str],
        reported: Callable[[], Awaitable[None]],
        settings: Callable[[], Settings],
    ) -> None:
        self.broadcaster = Broadcaster(scheduler, ready)
        self.gangs = Gangs(scheduler, ready, reported)
        self.reductions = SlicedReductions(scheduler, lambda: settings().collectives.order == "any")

    def uninstall(self) -> None:
        """Restore stock Dask's functions, and end what goes on."""
        self.broadcaster.uninstall()
        self.gangs.uninstall()
        self.reductions.uninstall()

    def close(self) -> None:
        """Remove what workers need until they have left the runtime."""
        self.broadcaster.close()

    def explain(self, key: Any) -> dict[str, Any] | None:
        """Return how a value was broadcast. See `Broadcaster.explain`."""
        return self.broadcaster.explain(key)

    def report(self) -> dict[str, Any]:
        """Return what was done, by kind."""
        return {
            "broadcasts": self.broadcaster.report(),
            "collectives": self.gangs.report(),
            "reductions": self.reductions.report(),
        }
