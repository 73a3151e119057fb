"""A UCX context with its worker and listener, created once and never destroyed.

UCX frees a listener while connections that its own thread has just accepted still point to it. If
the first bytes of one arrive an instant later, the process crashes, and peers may connect at any
time. So these objects live until the process ends, and serve one engine after another
(`transport.ucx_thread` drives them). Only this module imports `ucxx`.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any

from dask_gpurt.transport.ucx_door import Door, listening, move


@dataclass
class UcxContext:
    """The UCX objects that live as long as the process. For one thread.

    Attributes
    ----------
    library
        The classes of `ucxx`'s own layer below its asyncio.
    array
        Wrapper that `ucxx` needs around buffers.
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
    """

    library: Any
    array: Any
    worker: Any
    transports: list[str]
    callers: deque[int] = field(default_factory=deque)
    host: str = ""
    before: Container[int] = ()

    def __post_init__(self) -> None:
        # Port 0: any free port.
        self._listener = self.library.UCXListener.create(self.worker, 0, self.callers.append)
        #: Port of the listener.
        self.port = int(self._listener.port)
        sockets = {fd: port for fd, port in listening().items() if fd not in self.before}
        for fd, port in sockets.items():
            if port == self.port and self.host:
                self.port = move(fd, self.host) or self.port
        self.door = Door(sockets)

    def endpoint_to(self, host: str, port: int) -> Any:
        """Return an endpoint to another listener, connected or not."""
        return self.worker.create_endpoint_from_hostname(host, port, True)

    def endpoint_of(self, caller: int) -> Any:
        """Return an endpoint for a connection request."""
        return self._listener.create_endpoint_from_conn_request(caller, True)


def load(options: Mapping[str, str], host: str = "") -> UcxContext:
    """Load UCX, and listen with the door closed.

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
    before = set(listening())
    library = ucxx.libucxx
    feature = library.Feature
    features = (feature.TAG, feature.WAKEUP, feature.STREAM)
    context = library.UCXContext(dict(options), features)
    rows = [line.split() for line in context.info.splitlines() if "resource" in line]
    transports = sorted({row[-1].split("/")[0] for row in rows if "flags" in row})
    worker = library.UCXWorker(context)
    worker.init_blocking_progress_mode()
    return UcxContext(library, Array, worker, transports, host=host, before=before)


def _make_device_current() -> None:
    """Make the process's CUDA device current in this thread, before UCX looks for one.

    UCX copies device memory in the current context of its thread. A process without a context
    computes on the host and must not get one: it takes hundreds of MB of device memory.
    """
    # Without the library, driver or device, UCX finds no device either.
    with contextlib.suppress(Exception):
        from cuda.bindings import driver

        driver.cuInit(0)
        _, device = driver.cuDeviceGet(0)
        _, _, is_active = driver.cuDevicePrimaryCtxGetState(device)
        if is_active:
            from cuda.core import Device

            Device(0).set_current()
