"""A stand-in for a Dask client that starts a cluster on the first computation.

`LazyClient` is the value of `scheduler` in Dask's configuration. Dask asks it for `get` when a
computation starts, and receives that of the real client. Dask makes some decisions earlier: the
kind of shuffle depends on whether there is a default client. So `default_client` is replaced too.
The cluster is `dask_gpurt.command.embedded`.
"""

from __future__ import annotations

import sys
import threading
import time
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
    """A stand-in that starts a cluster and its client on first use.

    It is an empty string for all code except Dask's scheduler lookup, which checks the name of the
    class. Configuration travels to other processes as JSON or pickle, and there the setting must
    look unset.
    """

    _start: Callable[[], EmbeddedCluster]
    _lock: threading.Lock
    _cluster: EmbeddedCluster | None
    _own: Client | None
    #: Seconds in which clusters started.
    start_s: float

    def __new__(cls, start: Callable[[], EmbeddedCluster]) -> LazyClient:
        self = super().__new__(cls, "")
        self._start = start
        self._lock = threading.Lock()
        self._cluster = None
        self._own = None
        self.start_s = 0.0
        return self

    def __bool__(self) -> bool:
        return True

    def __reduce__(self) -> tuple[Any, ...]:
        return str, ("",)

    # Equal only to itself: a comparison with an empty string must not start a cluster.
    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other

    def __hash__(self) -> int:
        return id(self)

    @property
    def own(self) -> Client | None:
        """The client started here, if it is open."""
        client = self._own
        return client if client is not None and client.status == "running" else None

    def client(self) -> Client:
        """Return the client to compute with: the script's current one, or else our own."""
        from distributed import Client, get_client

        try:
            current: Client = get_client()
            return current
        except ValueError:
            pass
        with self._lock:
            # Another thread may have started the client meanwhile.
            if (client := self.own) is not None:
                return client
            self._close()
            began_s = time.perf_counter()
            self._cluster = self._start()
            try:
                self._own = Client(  # type: ignore[no-untyped-call]
                    self._cluster.address, security=self._cluster.security
                )
            except Exception as error:
                self._close()
                raise GpurtError(f"the cluster for this script does not answer: {error}") from error
            self.start_s += time.perf_counter() - began_s
            return self._own

    @property
    def get(self) -> Any:
        """The real client's method that Dask computes with."""
        return self.client().get

    @property
    def asynchronous(self) -> bool:
        """Whether the real client is asynchronous. Dask asks before it uses `get`."""
        return bool(self.client().asynchronous)

    def close(self, at_once: bool = False) -> None:
        """Close what was started here. A later computation starts it again.

        Parameters
        ----------
        at_once
            Do not wait for running tasks.
        """
        with self._lock:
            if at_once and self._cluster is not None:
                self._cluster.grace_s = 0.0
            self._close()

    def forget(self) -> None:
        """Reset in a forked process: what was started belongs to the parent."""
        self._lock = threading.Lock()
        if self._own is not None:
            # The client's loop does not run here, and Dask would wait for it at exit.
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
    """Make Dask compute with this client unless the script chooses a scheduler.

    This replaces `distributed.default_client`. With the stock function, Dask would plan a
    `persist`, `sort_values` or rechunk before the first computation for threads of one process. It
    would then never become a shuffle between workers.
    """
    import distributed

    stock = distributed.default_client

    def default_client(c: Client | None = None) -> Any:
        if c is not None:
            return c
        scheduler = _scheduler_argument() or dask.config.get("scheduler", None)
        if scheduler is lazy:
            # Dask only asks whether there is a client, so the start can wait for a computation. Any
            # other caller is going to use the client.
            asker = str(sys._getframe(1).f_globals.get("__name__"))
            return lazy if asker.split(".")[0] == "dask" else lazy.client()
        client = stock()  # type: ignore[no-untyped-call]
        if client is lazy.own and not _is_distributed(scheduler):
            # The script chose another scheduler, such as threads, for a while. Without this runtime
            # there would be no client, and the plan must run on that scheduler.
            raise ValueError(f"the scheduler is {scheduler!r}")
        return client

    distributed.default_client = default_client
    dask.config.set({"scheduler": lazy})


def _is_distributed(scheduler: Any) -> bool:
    if scheduler is None or "Client" in type(scheduler).__name__:
        return True
    return scheduler in ("dask.distributed", "distributed")


def _scheduler_argument() -> Any:
    """Return the `scheduler=` argument of the computation that Dask is planning, if any.

    Dask does not pass the argument on during planning, so only the caller's frame has it. A plan
    for workers would fail on the threads that the script asked for.
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
