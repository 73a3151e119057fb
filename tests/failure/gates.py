"""Tools that stop a worker at a point of a shuffle, or make it repeat a step.

A *point* is a method or handler of distributed's worker plugin for shuffles. Every worker calls it,
with stock Dask and with the runtime. `replace` replaces it on one worker; `before` and `after` add
a call. A `Gate` stops a thread or coroutine of any process until the test opens it. Nothing here
depends on time, except for deadlines.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import socket
import tempfile
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dask_gpurt.plugins.worker.worker_runtime import runtime_of

#: Seconds after which a test stops waiting and fails.
DEADLINE_S = 150.0


class Gate:
    """A gate that is closed until the test opens it, and tells the test when a visitor waits.

    A visitor connects to a socket and waits until the gate closes it. So the gate works across
    processes and needs no thread, and a visitor that is killed blocks no other.
    """

    def __init__(self) -> None:
        # pytest's temporary directory has a path that is too long for a socket.
        self._directory = tempfile.mkdtemp(prefix="gate-")
        self.path = os.path.join(self._directory, "gate")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen(128)
        self._listener.settimeout(DEADLINE_S)
        self._visitors: list[socket.socket] = []

    def wait_for(self, n_visitors: int = 1) -> None:
        """Return once this many visitors wait here."""
        while len(self._visitors) < n_visitors:
            try:
                visitor, _ = self._listener.accept()
            except TimeoutError:
                missing = n_visitors - len(self._visitors)
                raise AssertionError(f"{missing} did not come to the gate") from None
            self._visitors.append(visitor)

    def open(self) -> None:
        """Let all visitors through from now on."""
        shutil.rmtree(self._directory, ignore_errors=True)
        self._listener.close()
        for visitor in self._visitors:
            visitor.close()

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, *error: object) -> None:
        self.open()


def pass_gate(path: str) -> None:
    """Wait until the gate at `path` is open."""
    with contextlib.suppress(ConnectionError, FileNotFoundError):
        with socket.socket(socket.AF_UNIX) as conn:
            conn.connect(path)
            conn.recv(1)


def until(is_so: Callable[[], Any], what: str) -> None:
    """Poll until a condition holds, or fail at the deadline."""
    give_up = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < give_up, what


#: Points that task threads pass are methods of the plugin, the others are handlers on the loop.
METHODS = {"transfer": "add_partition", "conclude": "barrier", "unpack": "get_output_partition"}
HANDLERS = {"receive": "shuffle_receive", "barrier": "shuffle_inputs_done"}
#: The point through which a worker sends every message, on any transport; on the loop, too.
DELIVER = "deliver"
#: Points that every participating worker reaches. Only one worker concludes a shuffle.
POINTS = ("transfer", "unpack", *HANDLERS)

#: The originals of replaced points, for each worker of this process.
_stock: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
# Visitors could block all of the loop's own threads, which also close runs.
_waiting_room = ThreadPoolExecutor(64, thread_name_prefix="waiting-room")


def _look_up(worker: Any, point: str) -> Any:
    if point == DELIVER:
        return runtime_of(worker).links.deliver
    if point in METHODS:
        return getattr(worker.plugins["shuffle"], METHODS[point])
    return worker.handlers[HANDLERS[point]]


def _put(worker: Any, point: str, function: Any) -> None:
    if point == DELIVER:
        runtime_of(worker).links.deliver = function
    elif point in METHODS:
        setattr(worker.plugins["shuffle"], METHODS[point], function)
    else:
        worker.handlers[HANDLERS[point]] = function


def replace(worker: Any, point: str, make: Callable[[Any], Any]) -> None:
    """Replace a point on a worker by `make(original)`, until `restore`."""
    there = _look_up(worker, point)
    _stock.setdefault(worker, {}).setdefault(point, there)
    _put(worker, point, make(there))


def restore(dask_worker: Any) -> None:
    """Undo all replacements on a worker."""
    for point, function in _stock.pop(dask_worker, {}).items():
        _put(dask_worker, point, function)


def before(worker: Any, point: str, visit: Callable[[], None]) -> None:
    """Call `visit`, which may block, whenever a worker reaches a point."""

    def make(proceed: Any) -> Any:
        def in_thread(*args: Any, **kwargs: Any) -> Any:
            visit()
            return proceed(*args, **kwargs)

        async def on_loop(*args: Any, **kwargs: Any) -> Any:
            await asyncio.get_running_loop().run_in_executor(_waiting_room, visit)
            return await proceed(*args, **kwargs)

        return in_thread if point in METHODS else on_loop

    replace(worker, point, make)


def hold(worker: Any, point: str, path: str) -> None:
    """Make a worker wait at a gate whenever it reaches a point."""
    before(worker, point, lambda: pass_gate(path))


def after(worker: Any, point: str, visit: Callable[[], None]) -> None:
    """Call `visit` when a task's call has ended or failed, before its result is known."""
    assert point in METHODS

    def make(proceed: Any) -> Any:
        def in_thread(*args: Any, **kwargs: Any) -> Any:
            try:
                return proceed(*args, **kwargs)
            finally:
                visit()

        return in_thread

    replace(worker, point, make)


def from_call(nth: int, visit: Callable[[], None]) -> Callable[[], None]:
    """Return a function that calls `visit` from its n-th call on."""
    calls = itertools.count(1)

    def counted() -> None:
        if next(calls) >= nth:
            visit()

    return counted


def deliver_again(worker: Any, times: int, peers: list[str]) -> None:
    """Make a worker deliver each message for one of these peers several times."""

    def make(deliver: Any) -> Any:
        async def again(peer: str, *args: Any) -> Any:
            n_times = times if peer in peers else 1
            return [await deliver(peer, *args) for _ in range(n_times)][-1]

        return again

    replace(worker, DELIVER, make)


def repeat(worker: Any, point: str, times: int) -> None:
    """Make a worker execute a point several times at each call."""

    def make(proceed: Any) -> Any:
        def in_thread(*args: Any, **kwargs: Any) -> Any:
            return [proceed(*args, **kwargs) for _ in range(times)][-1]

        async def on_loop(*args: Any, **kwargs: Any) -> Any:
            return [await proceed(*args, **kwargs) for _ in range(times)][-1]

        return in_thread if point in METHODS else on_loop

    replace(worker, point, make)
