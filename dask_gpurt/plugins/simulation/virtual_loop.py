"""An asyncio event loop, and Tornado's interface to it, on a virtual clock.

Sleeps, tasks and Tornado's periodic callbacks of a scheduler and its plugins run in virtual time,
in a deterministic order. There is no I/O, so no selector and no socket. A function for an executor
runs immediately, so no thread can interfere.

An unhandled exception ends the simulation, instead of going to a log.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, TypeVarTuple

from tornado.platform.asyncio import BaseAsyncIOLoop

from dask_gpurt.errors import SimulationError
from dask_gpurt.simulate.clock import ClockEvent, VirtualClock

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

#: Start of the virtual wall clock. Not 0, which distributed interprets as "never". Small, so that
#: differences of times keep full precision.
WALL_CLOCK_START_S = 1.0


class _Handle(asyncio.TimerHandle):
    """asyncio's handle of an event."""

    event: ClockEvent

    def cancel(self) -> None:
        self.event.cancel()
        super().cancel()


class VirtualLoop(asyncio.AbstractEventLoop):
    """The event loop of a simulation.

    Parameters
    ----------
    clock
        Time and event queue of the loop. Others may schedule events there too.
    """

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self._running = False
        self._closed = False
        self._error: BaseException | None = None

    def run(self, main: Coroutine[None, None, T]) -> T:
        """Run a coroutine to its end.

        Raises
        ------
        SimulationError
            The coroutine waits, but no events are left.
        """
        previous = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        self._running = True
        task: asyncio.Task[T] = self.create_task(main)
        try:
            while not task.done():
                if not self.clock.step():
                    raise SimulationError("no events are left, but the computation is not done")
                if self._error is not None:
                    raise self._error
            return task.result()
        finally:
            task.cancel()
            self._running = False
            asyncio._set_running_loop(previous)

    def wall_time(self) -> float:
        """Return the time of the virtual wall clock."""
        return WALL_CLOCK_START_S + self.clock.now_s

    # What asyncio, Tornado and distributed ask of a loop.

    def time(self) -> float:
        return self.clock.now_s

    def call_soon(
        self,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        return self.call_at(self.clock.now_s, callback, *args, context=context)

    # There is only one thread.
    call_soon_threadsafe = call_soon

    def call_later(
        self,
        delay: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self.clock.now_s + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        handle = _Handle(when, callback, args, self, context)
        handle.event = self.clock.call_at(when, handle._run)
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        return asyncio.Task(coro, loop=self, **options)

    def run_in_executor(
        self, executor: Any, func: Callable[[*Ts], T], *args: *Ts
    ) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self._error = error if error is not None else SimulationError(context["message"])

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        self._closed = True


class VirtualIOLoop(BaseAsyncIOLoop):
    """Tornado's loop while a `VirtualLoop` runs. Periodic callbacks start here."""

    def time(self) -> float:
        return self.asyncio_loop.time()

    def _make_current(self) -> None:
        pass
