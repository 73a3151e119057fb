"""A context of UCX with its worker and its listener: made once, and never taken apart.

UCX frees a listener while connections that its own thread has just accepted still point to it. If
the first bytes of one come an instant later, the process crashes, and peers connect whenever they
like. So what is here stays until the process ends, and serves one engine after another
(`transport.ucx_thread`), which is what drives it. The one place that imports `ucxx`.
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
    """What of UCX is there for as long as the process. For one thread.

    Attributes
    ----------
    library
        The classes of `ucxx`'s own layer below its asyncio.
    array
        What `ucxx` wants buffers wrapped in.
    worker
        UCX's worker, which makes progress and can be waited for.
    transports
        Names of the transports that UCX has to choose from.
    callers
        Who wants to connect: what UCX takes to make an endpoint of.
    host
        Address to listen at; empty for all of the host.
    before
        Sockets that others listened on before UCX made any.
    """

    library: Any
    array: Any
    worker: Any
    transports: list[str]
    callers: deque[int] = field(default_factory=deque)
    host: str = ""
    before: Container[int] = ()

    def __post_init__(self) -> None:
        # Port 0: any that is free.
        self._listener = self.library.UCXListener.create(self.worker, 0, self.callers.append)
        #: What the listener listens on.
        self.port = int(self._listener.port)
        sockets = {fd: port for fd, port in listening().items() if fd not in self.before}
        for fd, port in sockets.items():
            if port == self.port and self.host:
                self.port = move(fd, self.host) or self.port
        self.door = Door(sockets)

    def endpoint_to(self, host: str, port: int) -> Any:
        """Endpoint to another listener, connected or not."""
        return self.worker.create_endpoint_from_hostname(host, port, True)

    def endpoint_of(self, caller: int) -> Any:
        """Endpoint to somebody who connected here."""
        return self._listener.create_endpoint_from_conn_request(caller, True)


def load(options: Mapping[str, str], host: str = "") -> UcxContext:
    """Load UCX, and listen behind a closed door.

    Parameters
    ----------
    options
        Options of UCX without the prefix `UCX_`, for this context alone.
    host
        Address to listen at; all of the host if that is not one of them.

    Raises
    ------
    Exception
        UCX is not installed or does not start; `ucxx` has a class per reason.
    """
    import ucxx  # here: it loads UCX, and costs half a second
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
    """Have this thread use the device that the process computes on, before UCX looks for one.

    UCX copies device memory in the context that is current in its thread. A process that has none
    computes on the host, and must not get one for this: it costs hundreds of MB of a device.
    """
    # No library, no driver or no device: UCX will find none either.
    with contextlib.suppress(Exception):
        from cuda.bindings import driver

        driver.cuInit(0)
        _, device = driver.cuDeviceGet(0)
        _, _, is_active = driver.cuDevicePrimaryCtxGetState(device)
        if is_active:
            from cuda.core import Device

            Device(0).set_current()
