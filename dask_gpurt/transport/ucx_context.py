"""A context of UCX with its worker and its listener: made once, and never taken apart.

UCX frees a listener while connections that its own thread has just accepted still point to it. If
the first bytes of one come an instant later, the process crashes, and peers connect whenever they
like. So what is here stays until the process ends, and serves one engine after another
(`transport.ucx_thread`), which is what drives it. The one place that imports `ucxx`.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


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
    """

    library: Any
    array: Any
    worker: Any
    transports: list[str]
    callers: deque[int] = field(default_factory=deque)

    def __post_init__(self) -> None:
        # Port 0: any that is free.
        self._listener = self.library.UCXListener.create(self.worker, 0, self.callers.append)

    @property
    def port(self) -> int:
        """What the listener listens on, at all addresses of the host."""
        return int(self._listener.port)

    def endpoint_to(self, host: str, port: int) -> Any:
        """Endpoint to another listener, connected or not."""
        return self.worker.create_endpoint_from_hostname(host, port, True)

    def endpoint_of(self, caller: int) -> Any:
        """Endpoint to somebody who connected here."""
        return self._listener.create_endpoint_from_conn_request(caller, True)


def load(options: Mapping[str, str]) -> UcxContext:
    """Load UCX, and listen.

    Parameters
    ----------
    options
        Options of UCX without the prefix `UCX_`, for this context alone.

    Raises
    ------
    Exception
        UCX is not installed or does not start; `ucxx` has a class per reason.
    """
    import ucxx  # here: it loads UCX, and costs half a second
    from ucxx._lib.arr import Array

    _make_device_current()
    library = ucxx.libucxx
    feature = library.Feature
    features = (feature.TAG, feature.WAKEUP, feature.STREAM)
    context = library.UCXContext(dict(options), features)
    rows = [line.split() for line in context.info.splitlines() if "resource" in line]
    transports = sorted({row[-1].split("/")[0] for row in rows if "flags" in row})
    worker = library.UCXWorker(context)
    worker.init_blocking_progress_mode()
    return UcxContext(library, Array, worker, transports)


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
