"""Engines that run the work of the emulated device: threads, or a pump.

Both take work from the same queues (`devices.emulated.queues`) under the same lock. What the work
does, and whether it is ordered, is the task of `devices.emulated.emulated_device`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple

from dask_gpurt.devices.device import Priority
from dask_gpurt.devices.emulated.queues import Engine, Queue, Queues, Work
from dask_gpurt.devices.ledger import Ledger, LedgerEntry
from dask_gpurt.devices.ordering import HazardError


class Rate(NamedTuple):
    """The emulated speed of an engine. It slows an engine down, but never speeds it up."""

    nbytes_per_s: float
    latency_s: float = 0.0


class Runner:
    """A runner of single pieces of work, at the rate of their engine, with ledger entries.

    Parameters
    ----------
    clock, wait
        Return the time in seconds, and sleep for some seconds.
    """

    def __init__(
        self,
        rates: Mapping[Engine, Rate],
        ledger: Ledger | None,
        clock: Callable[[], float],
        wait: Callable[[float], None],
    ) -> None:
        self._rates = dict(rates)
        self._ledger = ledger
        self._clock = clock
        self._wait = wait

    def run(self, queue: Queue, work: Work) -> BaseException | None:
        """Run a piece of work. Return its error, which is raised where the host waits for it."""
        start_s = self._clock()
        try:
            work.run()
        except BaseException as error:
            return error
        if work.engine is None:
            return None
        rate = self._rates.get(work.engine)
        if rate is not None:
            end_s = start_s + rate.latency_s + work.nbytes / rate.nbytes_per_s
            left_s = end_s - self._clock()
            if left_s > 0:
                self._wait(left_s)
        if self._ledger is not None:
            entry = LedgerEntry(queue.name, work.engine.value, work.nbytes, start_s, self._clock())
            self._ledger.add(entry)
        return None


class Engines:
    """The base class of threaded and pumped engines."""

    def __init__(self, runner: Runner) -> None:
        # Reentrant, so that a kernel cannot hang if it uses its device while it is pumped. Kernels
        # must not do that, but an error message is better than a test that hangs.
        self.changed = threading.Condition(threading.RLock())
        self.is_closed = False
        self._runner = runner
        self._queues = Queues()

    def open(self, name: str, priority: Priority) -> Queue:
        with self.changed:
            return self._queues.open(name, priority)

    def submit(self, queue: Queue, work: Work) -> None:
        """Queue a piece of work."""
        with self.changed:
            self.require_open()
            self._queues.append(queue, work)
            self._submitted(work)

    def _submitted(self, work: Work) -> None:
        """Handle newly queued work. The caller holds the lock."""

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait until the queued work has made a condition true.

        Raises
        ------
        RuntimeError
            The device was closed first.
        """
        raise NotImplementedError

    def require_open(self) -> None:
        if self.is_closed:
            raise RuntimeError("the device is closed")

    def close(self) -> None:
        """Drop work that has not started."""
        with self.changed:
            self.is_closed = True
            self._queues.drop()
            self.changed.notify_all()


class PumpedEngines(Engines):
    """Engines that run one piece of work for each call, in a chosen order."""

    def __init__(self, runner: Runner, choose: Callable[[int], int]) -> None:
        super().__init__(runner)
        self._choose = choose

    def step(self) -> bool:
        """Run one piece of work of a stream that is ready; return False if none is."""
        with self.changed:
            ready = self._queues.ready()
            if not ready:
                return False
            queue = ready[self._choose(len(ready))]
            work = self._queues.begin(queue)
            error = None if work is None else self._runner.run(queue, work)
            self._queues.finish(queue, error)
            return True

    def until(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            while not condition():
                self.require_open()
                if not self.step():
                    raise HazardError("waits for an event that no queued work completes")


class ThreadedEngines(Engines):
    """A thread for each engine, started with the first work for it."""

    def __init__(self, runner: Runner, name: str) -> None:
        super().__init__(runner)
        self._name = name
        self._threads: dict[Engine, threading.Thread] = {}

    def _submitted(self, work: Work) -> None:
        engine = work.engine
        if engine is not None and engine not in self._threads:
            thread = threading.Thread(
                target=self._serve, args=(engine,), name=f"{self._name} {engine.value}", daemon=True
            )
            self._threads[engine] = thread
            thread.start()
        self._order()
        self.changed.notify_all()

    def _order(self) -> None:
        """Run the work that needs no engine. The caller holds the lock."""
        while (queue := self._queues.next_for(None)) is not None:
            work = self._queues.begin(queue)
            self._queues.finish(queue, None if work is None else self._runner.run(queue, work))

    def _serve(self, engine: Engine) -> None:
        while self._serve_one(engine):
            pass

    def _serve_one(self, engine: Engine) -> bool:
        # A separate function, so that an idle engine does not keep memory alive.
        with self.changed:
            while (queue := self._queues.next_for(engine)) is None:
                if self.is_closed:
                    return False
                self.changed.wait()
            work = self._queues.begin(queue)
        error = None if work is None else self._runner.run(queue, work)
        with self.changed:
            self._queues.finish(queue, error)
            self._order()
            self.changed.notify_all()
        return True

    def until(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            self.changed.wait_for(lambda: condition() or self.is_closed)
            if not condition():
                self.require_open()

    def close(self) -> None:
        super().close()
        for thread in list(self._threads.values()):
            if thread is not threading.current_thread():
                thread.join()
