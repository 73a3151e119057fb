"""Stands in for a Dask client until something is computed; then there is one, with its cluster.

`LazyClient` is put into Dask's configuration as `scheduler`. Dask asks it for its `get` when a
computation starts, and takes the real client's from it. Some decisions come before that: what a
shuffle is made of is decided by whether there is a default client, which `default_client` below
therefore answers for. The cluster is `dask_gpurt.command.embedded`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

import dask.config
from dask.base import compute, persist

from dask_gpurt.errors import GpurtError

if TYPE_CHECKING:
    from distributed import Client

    from dask_gpurt.command.embedded import EmbeddedCluster

CLOSE_TIMEOUT_S = 10.0


class LazyClient(str):
    """Starts a cluster and a client for it on first use.

    It is an empty string to everyone but Dask's scheduler lookup, which goes by the name of the
    class. Configuration is sent to other processes as JSON or as a pickle, and arrives there as a
    setting that is not set.
    """

    _start: Callable[[], EmbeddedCluster]
    _lock: threading.Lock
    _cluster: EmbeddedCluster | None
    _own: Client | None

    def __new__(cls, start: Callable[[], EmbeddedCluster]) -> LazyClient:
        self = super().__new__(cls, "")
        self._start = start
        self._lock = threading.Lock()
        self._cluster = None
        self._own = None
        return self

    def __bool__(self) -> bool:
        return True

    def __reduce__(self) -> tuple[Any, ...]:
        return str, ("",)

    # Equal only to itself: to compare with an empty string is not to ask for one.
    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other

    def __hash__(self) -> int:
        return id(self)

    @property
    def own(self) -> Client | None:
        """The client that was started here, if one was and is still open."""
        client = self._own
        return client if client is not None and client.status == "running" else None

    def client(self) -> Client:
        """The client to compute with: the script's own if it has one that is current."""
        from distributed import Client, get_client

        try:
            current: Client = get_client()
            return current
        except ValueError:
            pass
        with self._lock:
            # Another thread may have waited here for the same.
            if (client := self.own) is not None:
                return client
            self._close()
            self._cluster = self._start()
            try:
                self._own = Client(  # type: ignore[no-untyped-call]
                    self._cluster.address, security=self._cluster.security
                )
            except Exception as error:
                self._close()
                raise GpurtError(f"the cluster for this script does not answer: {error}") from error
            return self._own

    @property
    def get(self) -> Any:
        """The method that Dask computes with, bound to the real client."""
        return self.client().get

    @property
    def asynchronous(self) -> bool:
        """Whether that is a client for coroutines. Dask asks before it takes `get`."""
        return bool(self.client().asynchronous)

    def close(self, at_once: bool = False) -> None:
        """End what was started here. A later computation starts it again.

        Parameters
        ----------
        at_once
            Do not wait for tasks that run.
        """
        with self._lock:
            if at_once and self._cluster is not None:
                self._cluster.grace_s = 0.0
            self._close()

    def forget(self) -> None:
        """Be as new, in a process that was forked off: what was started is its parent's."""
        self._lock = threading.Lock()
        if self._own is not None:
            # Nobody runs its loop here: Dask would wait for it as the process ends.
            self._own.status = "closed"
            if dask.config.get("scheduler", None) == "dask.distributed":
                dask.config.set({"scheduler": self})
        self._own = self._cluster = None

    def _close(self) -> None:
        client, cluster = self._own, self._cluster
        self._own = self._cluster = None
        try:
            if client is not None:
                client.close(timeout=CLOSE_TIMEOUT_S)  # type: ignore[no-untyped-call]
        finally:
            if cluster is not None:
                cluster.close()


def install(lazy: LazyClient) -> None:
    """Make Dask compute with this client where the script names no other way.

    `distributed.default_client` is replaced: with the stock one a `persist`, a `sort_values` or a
    rechunk that comes before the first computation would be planned for threads of one process,
    and never become a shuffle between workers.
    """
    import distributed

    stock = distributed.default_client

    def default_client(c: Client | None = None) -> Any:
        if c is not None:
            return c
        scheduler = _scheduler_argument() or dask.config.get("scheduler", None)
        if scheduler is lazy:
            # Dask only wants to know whether there is one, and starting it can wait until
            # something is computed. Whoever else asks is going to use it.
            asker = str(sys._getframe(1).f_globals.get("__name__"))
            return lazy if asker.split(".")[0] == "dask" else lazy.client()
        client = stock()  # type: ignore[no-untyped-call]
        if client is lazy.own and not _is_distributed(scheduler):
            # The script chose threads or the like for a while. Without this runtime there would
            # be no client at all, and what is planned now must run there.
            raise ValueError(f"the scheduler is {scheduler!r}")
        return client

    distributed.default_client = default_client
    dask.config.set({"scheduler": lazy})


def _is_distributed(scheduler: Any) -> bool:
    if scheduler is None or "Client" in type(scheduler).__name__:
        return True
    return scheduler in ("dask.distributed", "distributed")


def _scheduler_argument() -> Any:
    """The `scheduler=` of the computation that is being planned, if it has one.

    Nothing that Dask asks on the way to a plan is told about it, so that only the call itself
    knows. A plan for workers would fail on the threads that the script asked for.
    """
    computing = {compute.__code__, persist.__code__}
    if (frames := sys.modules.get("dask.dataframe")) is not None:
        computing.add(frames.DataFrame.persist.__code__)
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code not in computing:
        frame = frame.f_back
    if frame is None:
        return None
    found = frame.f_locals
    return found["scheduler"] if "scheduler" in found else found["kwargs"].get("scheduler")
