"""What runs the work of the emulated device: threads, or whoever pumps.

Both take it from the same queues (`devices.emulated.queues`) under the same lock. What the work
does, and whether it was in order to queue it, is `devices.emulated.emulated_device`'s business.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple

from dask_gpurt.devices.device import Priority
from dask_gpurt.devices.emulated.queues import Engine, Queue, Queues, Work
from dask_gpurt.devices.ledger import Entry, Ledger
from dask_gpurt.devices.ordering import HazardError


class Rate(NamedTuple):
    """How fast an engine is made to look; no faster than it is."""

    nbytes_per_s: float
    latency_s: float = 0.0


class Runner:
    """Runs one piece of work: as long as its engine's rate says, and with an entry in the ledger.

    Parameters
    ----------
    clock, wait
        Seconds, and how to let so many pass.
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
        """Returns what it raised, for whoever waits for it."""
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
            entry = Entry(queue.name, work.engine.value, work.nbytes, start_s, self._clock())
            self._ledger.add(entry)
        return None


class Engines:
    """What threads and pump have in common."""

    def __init__(self, runner: Runner) -> None:
        # Reentrant, so that a kernel that uses its device while it is pumped cannot hang: it is
        # not allowed to, but a test that hangs tells nobody why.
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
        """Something was queued; the lock is held."""

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait until something that the queued work brings about is true.

        Raises
        ------
        RuntimeError
            The device was closed before.
        """
        raise NotImplementedError

    def require_open(self) -> None:
        if self.is_closed:
            raise RuntimeError("the device is closed")

    def close(self) -> None:
        """Drop what has not begun."""
        with self.changed:
            self.is_closed = True
            self._queues.drop()
            self.changed.notify_all()


class PumpedEngines(Engines):
    """Nothing runs until it is asked for, one step at a time, in an order that is chosen."""

    def __init__(self, runner: Runner, choose: Callable[[int], int]) -> None:
        super().__init__(runner)
        self._choose = choose

    def step(self) -> bool:
        """Let one of the streams that could do something do it; False if there is none."""
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
                    raise HazardError("waits for what no work that is queued brings about")


class ThreadedEngines(Engines):
    """A thread for each engine, from the first piece of work for it."""

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
        """Do what needs no engine; the lock is held."""
        while (queue := self._queues.next_for(None)) is not None:
            work = self._queues.begin(queue)
            self._queues.finish(queue, None if work is None else self._runner.run(queue, work))

    def _serve(self, engine: Engine) -> None:
        while self._serve_one(engine):
            pass

    def _serve_one(self, engine: Engine) -> bool:
        # A function of its own, so that an idle engine does not keep memory alive.
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
