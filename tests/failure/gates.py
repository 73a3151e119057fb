"""Places in the protocol of a shuffle where a test can stop a worker, and make it do things twice.

A *point* is a method or handler of distributed's worker plugin: what a worker does for a shuffle
passes there, whoever does the work behind it. `replace` puts something else there, on one worker;
`before` and `after` have something called. A `Gate` stops whoever comes, in whatever process and
thread, until the test has done what it wanted to do meanwhile. Nothing here waits for time to
pass, except to give up.
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

from dask_gpurt.plugins.worker import runtime_of

#: How long anything may take before a test gives up on it.
DEADLINE_S = 60.0


class Gate:
    """A gate that is closed until the test opens it, and tells the test when a visitor waits.

    A visitor connects to a socket and waits for it to be closed, so the gate works across
    processes, needs no thread, and a visitor that is killed holds up nobody.
    """

    def __init__(self) -> None:
        # Not pytest's directory: the name of a socket has to be short.
        self._directory = tempfile.mkdtemp(prefix="gate-")
        self.path = os.path.join(self._directory, "gate")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen(128)
        self._listener.settimeout(DEADLINE_S)
        self._visitors: list[socket.socket] = []

    def wait_for(self, n_visitors: int = 1) -> None:
        """Return once so many wait here."""
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
#: Where every message passes that a worker sends, whatever its way; on the loop as well.
DELIVER = "deliver"
#: Those that every worker that takes part comes to; one alone concludes a shuffle.
POINTS = ("transfer", "unpack", *HANDLERS)

#: What was replaced on each worker of this process.
_stock: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
# Not the loop's own threads: those close runs, and visitors may sit in all of them.
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
    """Replace what a worker does at a point by `make(original)`, until `restore`."""
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
    """`visit`, from the n-th call on."""
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
    """Make a worker repeat what it does at a point several times."""

    def make(proceed: Any) -> Any:
        def in_thread(*args: Any, **kwargs: Any) -> Any:
            return [proceed(*args, **kwargs) for _ in range(times)][-1]

        async def on_loop(*args: Any, **kwargs: Any) -> Any:
            return [await proceed(*args, **kwargs) for _ in range(times)][-1]

        return in_thread if point in METHODS else on_loop

    replace(worker, point, make)
