"""A UCX context with its worker and listener, created once and never destroyed.

UCX frees a listener while connections that its own thread has just accepted still point to it. If
the first bytes of one arrive an instant later, the process crashes, and peers may connect at any
time. So these objects live until the process ends, and serve one engine after another
(`transport.ucx.thread` drives them). Only this module imports `ucxx`.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dask_gpurt.transport.ucx.listening_sockets import ListeningSockets, listening, move

#: Held while a context makes its sockets: those that were not there before. Two contexts that start
#: together would each count the other's sockets too, and close both sets with their own.
_making_sockets = threading.Lock()
#: Values by which UCX's options are switched off.
_OFF = ("n", "no", "off", "0")


@dataclass
class UcxContext:
    """The UCX objects that live as long as the process. For one thread.

    Attributes
    ----------
    library
        The classes of `ucxx`'s own layer below its asyncio.
    wrapper
        Class that `ucxx` needs around buffers.
    worker
        UCX's worker, which makes progress and can be waited for.
    transports
        Names of the transports that UCX can choose from.
    callers
        Connection requests, from which UCX makes endpoints.
    host
        Address to listen at; empty for all addresses of the host.
    before
        Listening sockets that existed before UCX made any.
    problems
        What UCX has to do without here.
    """

    library: Any
    wrapper: Any
    worker: Any
    transports: list[str]
    callers: deque[int] = field(default_factory=deque)
    host: str = ""
    before: Container[int] = ()
    problems: list[str] = field(default_factory=list)
    _has_device: bool = False

    def __post_init__(self) -> None:
        # Port 0: any free port.
        self._listener = self.library.UCXListener.create(self.worker, 0, self.callers.append)
        #: Port of the listener.
        self.port = int(self._listener.port)
        sockets = {fd: port for fd, port in listening().items() if fd not in self.before}
        for fd, port in sockets.items():
            if port == self.port and self.host:
                self.port = move(fd, self.host) or self.port
        self.sockets = ListeningSockets(sockets)

    def array(self, buffer: Any) -> Any:
        """Wrap a buffer for `ucxx`. For the first one on a device, make the device current.

        UCX may have started before the process had a context. Then its calls on streams, which
        wake this thread, would fail.
        """
        if not self._has_device and not isinstance(buffer, np.ndarray):
            self._has_device = _make_device_current()
        return self.wrapper(buffer)

    def endpoint_to(self, host: str, port: int) -> Any:
        """Return an endpoint to another listener, connected or not."""
        return self.worker.create_endpoint_from_hostname(host, port, True)

    def endpoint_of(self, caller: int) -> Any:
        """Return an endpoint for a connection request."""
        return self._listener.create_endpoint_from_conn_request(caller, True)


def load(options: Mapping[str, str], host: str = "") -> UcxContext:
    """Load UCX, and listen with the sockets closed to connections.

    Parameters
    ----------
    options
        UCX options without the prefix `UCX_`, for this context alone.
    host
        Address to listen at; all addresses if it is not one of this host's.

    Raises
    ------
    Exception
        UCX is not installed or does not start; `ucxx` has a class per reason.
    """
    import ucxx  # here: it loads UCX, which takes half a second
    from ucxx._lib.arr import Array

    _make_device_current()
    library = ucxx.libucxx
    with _making_sockets:
        before = set(listening())
        context, problems = _context(library, dict(options))
        rows = [line.split() for line in context.info.splitlines() if "resource" in line]
        transports = sorted({row[-1].split("/")[0] for row in rows if "flags" in row})
        worker = library.UCXWorker(context)
        worker.init_blocking_progress_mode()
        return UcxContext(
            library, Array, worker, transports, host=host, before=before, problems=problems
        )


def _context(library: Any, options: dict[str, str]) -> tuple[Any, list[str]]:
    """Return UCX's context, with its registration cache or without CUDA; and what it lacks.

    UCX crashes if it drops a link during a transfer of device memory and has no such cache. It has
    none if it cannot hook into functions of the system that free memory.
    """
    feature = library.Feature
    features = (feature.TAG, feature.WAKEUP, feature.STREAM)

    def setting(key: str, default: str) -> str:
        return options.get(key) or os.environ.get(f"UCX_{key}") or default

    why_not = "it is switched off"
    if setting("RCACHE_ENABLE", "y").lower() not in _OFF:
        try:
            return library.UCXContext({**options, "RCACHE_ENABLE": "y"}, features), []
        except Exception as error:  # the second attempt fails, too, if this is not the cause
            why_not = str(error)
    options["TLS"] = without_devices(setting("TLS", "all"))
    problem = f"UCX takes no device memory without its registration cache: {why_not}"
    return library.UCXContext({**options, "RCACHE_ENABLE": "n"}, features), [problem]


def without_devices(transports: str) -> str:
    """Return UCX's option TLS, changed to leave out the transports of CUDA."""
    names = transports.removeprefix("^").split(",")
    if transports.startswith("^"):
        return f"{transports},cuda"
    kept = [name for name in names if not name.startswith(("cuda", "gdr_copy"))]
    return ",".join(kept) if kept and "all" not in names else "^cuda"


def _make_device_current() -> bool:
    """Make the process's CUDA device current in this thread; return whether there is one.

    UCX copies device memory in the current context of its thread. A process without a context
    computes on the host and must not get one: it takes hundreds of MB of device memory.
    """
    # Without the library, driver or device, UCX finds no device either.
    with contextlib.suppress(Exception):
        from cuda.bindings import driver

        driver.cuInit(0)
        _, n_devices = driver.cuDeviceGetCount()
        for device in range(n_devices):
            _, _, is_active = driver.cuDevicePrimaryCtxGetState(device)
            if is_active:
                from cuda.core import Device

                Device(device).set_current()
                return True
    return False
