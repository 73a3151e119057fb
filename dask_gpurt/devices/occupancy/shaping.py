"""A hook that makes launches request more dynamic shared memory, without a change to the kernels.

`LaunchHook` sits between a caller and a driver. Outside `shaped`, it passes launches on unchanged.
Inside, while communication is pending, a launch requests what the planner says
(`devices.occupancy.planner`). The planner decides once for each kernel and block shape.
`LaunchHook.decisions` lists the decisions.

A hook may cost time, but must not change results. It only adds shared memory. If the driver refuses
the larger request, the hook repeats the launch with the original one. If a planner or driver fails,
the launch stays unchanged. Cooperative launches need all their blocks resident at once. They must
not pass a hook: with fewer resident blocks, they would never end.

This module uses no CUDA library. A `LaunchDriver` connects one.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Hashable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from dask_gpurt.devices.occupancy.architectures import Architecture
from dask_gpurt.devices.occupancy.planner import LaunchPlan, Reason, Refusal, plan
from dask_gpurt.devices.occupancy.resident_blocks import Launch, Limit

#: Blocks or threads in three dimensions.
Extent = tuple[int, int, int]

#: Limit for kernels times block shapes times planners. Programs have hundreds. A program that keeps
#: creating kernels must not fill the memory with decisions.
_MOST_DECISIONS = 4096


class LaunchRefusedError(RuntimeError):
    """The driver refused a launch because of its requested resources. Nothing ran."""


@dataclass(frozen=True)
class KernelAttributes:
    """The resources of a compiled kernel.

    Attributes
    ----------
    registers
        32-bit registers of each thread.
    static_nbytes
        Shared memory declared in the kernel.
    max_threads
        Largest number of threads in a block.
    max_dynamic_nbytes
        Dynamic shared memory that the kernel may request now. Never lower it: the kernel's owner
        may have raised it for launches of its own, which would then be refused.
    """

    registers: int
    static_nbytes: int
    max_threads: int
    max_dynamic_nbytes: int


class LaunchDriver(Protocol):
    """The calls to a CUDA or HIP library, for one device."""

    def attributes(self, kernel: Hashable) -> KernelAttributes:
        """Return the resources of a kernel as compiled for the device."""

    def launch(
        self, kernel: Hashable, grid: Extent, block: Extent, shared_nbytes: int, stream: Any
    ) -> None:
        """Launch a kernel with this much dynamic shared memory.

        Raises
        ------
        LaunchRefusedError
            The device lacks the requested resources. Other errors are the library's own.
        """

    def set_max_dynamic_shared(self, kernel: Hashable, nbytes: int) -> None:
        """Allow a kernel this much dynamic shared memory, and prefer shared memory to L1 cache.

        Raises
        ------
        LaunchRefusedError
            The device has less shared memory.
        """


@dataclass(frozen=True)
class Planner:
    """The arguments of `planner.plan` that are the same for all launches.

    Attributes
    ----------
    leave
        Resident blocks on each multiprocessor; or the fewest, or the most below the current number.
    """

    architecture: Architecture
    leave: int | Literal["fewest", "most"]

    def __call__(self, launch: Launch) -> LaunchPlan | Refusal:
        """Plan a launch while communication is pending."""
        return plan(self.architecture, launch, self.leave, pending=True)


@dataclass(frozen=True)
class Failure:
    """A launch to leave unchanged because the planner failed or the driver refused."""

    error: str

    def __str__(self) -> str:
        return self.error


@dataclass(frozen=True, slots=True)
class Decided:
    """The decision about launches of a kernel with one block shape.

    Attributes
    ----------
    asked_nbytes, nbytes
        Dynamic shared memory of the original request, and of the shaped one.
    """

    kernel: Hashable
    block: Extent
    asked_nbytes: int
    nbytes: int
    why: LaunchPlan | Refusal | Failure


@dataclass(frozen=True, slots=True)
class _Scope:
    """An entered `with shaped(...)` block."""

    hook: LaunchHook
    planner: Callable[[Launch], LaunchPlan | Refusal]
    #: Replaces the planner in keys, because hashing a planner may be slow.
    number: int
    pending: Callable[[], bool]
    outer: _Scope | None


# A context variable, not a thread-local: coroutines of one thread must not shape each other's
# launches. A new thread starts unshaped.
_scope: ContextVar[_Scope | None] = ContextVar("dask_gpurt_shaping", default=None)

_Key = tuple[int, Hashable, Extent, int]


class LaunchHook:
    """A hook that all launches of one device pass.

    Parameters
    ----------
    driver
        Makes the launches.
    enabled
        If False, `shaped` changes nothing.

    Attributes
    ----------
    failure
        Last error of a `pending` function. Errors of planners and drivers are in `decisions`.
    """

    def __init__(self, driver: LaunchDriver, *, enabled: bool) -> None:
        self.enabled = enabled
        self.failure: str | None = None
        self._driver = driver
        # Held during a decision, so that each kernel is decided once and its allowed shared memory
        # only grows.
        self._lock = threading.Lock()
        self._decided: dict[_Key, Decided] = {}
        self._planners: dict[Hashable, int] = {}
        self._numbers = itertools.count()

    def launch(
        self, kernel: Hashable, grid: Extent, block: Extent, shared_nbytes: int, stream: Any
    ) -> None:
        """Launch a kernel, with more dynamic shared memory inside `shaped`.

        Raises what the driver raises for the original request.
        """
        nbytes = self.dynamic_nbytes(kernel, block, shared_nbytes)
        self.launch_with(nbytes, kernel, grid, block, shared_nbytes, stream)

    def launch_with(
        self,
        nbytes: int,
        kernel: Hashable,
        grid: Extent,
        block: Extent,
        shared_nbytes: int,
        stream: Any,
    ) -> None:
        """Launch with the result of `dynamic_nbytes`; if that is refused, with the original."""
        if nbytes != shared_nbytes:
            try:
                self._driver.launch(kernel, grid, block, nbytes, stream)
                return
            except LaunchRefusedError as error:
                self._leave_alone(kernel, block, shared_nbytes, error)
        self._driver.launch(kernel, grid, block, shared_nbytes, stream)

    def dynamic_nbytes(self, kernel: Hashable, block: Extent, shared_nbytes: int) -> int:
        """Return the dynamic shared memory that a launch should request now. Does not raise.

        It is never less than the original request. Callbacks inside another library's launch use
        this method and make the launch themselves.
        """
        scope = _scope.get()
        while scope is not None and scope.hook is not self:
            scope = scope.outer
        if scope is None:
            return shared_nbytes
        try:
            if not scope.pending():
                return shared_nbytes
            decided = self._decided.get((scope.number, kernel, block, shared_nbytes))
            if decided is None:
                decided = self._decide(scope, kernel, block, shared_nbytes)
            return decided.nbytes
        except Exception as error:
            self.failure = repr(error)
            return shared_nbytes

    def decisions(self) -> list[Decided]:
        """Return the decisions so far, with their reasons."""
        with self._lock:
            return list(self._decided.values())

    def forget(self, kernel: Hashable) -> None:
        """Drop the decisions about an unloaded kernel, whose handle may be reused."""
        with self._lock:
            for key in [key for key in self._decided if key[1] == kernel]:
                del self._decided[key]

    def _decide(self, scope: _Scope, kernel: Hashable, block: Extent, asked_nbytes: int) -> Decided:
        key = (scope.number, kernel, block, asked_nbytes)
        with self._lock:
            if (decided := self._decided.get(key)) is not None:
                return decided
            nbytes = asked_nbytes
            why: LaunchPlan | Refusal | Failure
            try:
                why = self._planned(scope, kernel, block, asked_nbytes)
                if isinstance(why, LaunchPlan):
                    nbytes = max(nbytes, why.dynamic_nbytes)
            except Exception as error:
                why = Failure(repr(error))
            if len(self._decided) >= _MOST_DECISIONS:
                self._decided.clear()
            decided = self._decided[key] = Decided(kernel, block, asked_nbytes, nbytes, why)
            return decided

    def _planned(
        self, scope: _Scope, kernel: Hashable, block: Extent, asked_nbytes: int
    ) -> LaunchPlan | Refusal:
        """Ask the planner, and allow the kernel what it says. The caller holds the lock."""
        needs = self._driver.attributes(kernel)
        x, y, z = block
        launch = Launch(x * y * z, needs.registers, needs.static_nbytes, asked_nbytes)
        if launch.threads > needs.max_threads:
            return Refusal(Reason.DOES_NOT_RUN, 0, frozenset({Limit.THREADS}))
        found = scope.planner(launch)
        if isinstance(found, LaunchPlan) and found.dynamic_nbytes > needs.max_dynamic_nbytes:
            self._driver.set_max_dynamic_shared(kernel, found.dynamic_nbytes)
        return found

    def _leave_alone(
        self, kernel: Hashable, block: Extent, asked_nbytes: int, error: Exception
    ) -> None:
        """Replace all decisions about a launch by a refusal of the driver."""
        decided = Decided(kernel, block, asked_nbytes, asked_nbytes, Failure(repr(error)))
        with self._lock:
            for key in self._decided:
                if key[1:] == (kernel, block, asked_nbytes):
                    self._decided[key] = decided

    def _number_of(self, planner: Hashable) -> int:
        with self._lock:
            if planner not in self._planners:
                if len(self._planners) >= _MOST_DECISIONS:
                    # Numbers are never reused, so a planner may get a new one.
                    self._planners.clear()
                self._planners[planner] = next(self._numbers)
            return self._planners[planner]


@contextlib.contextmanager
def shaped(
    planner: Callable[[Launch], LaunchPlan | Refusal], pending: Callable[[], bool], hook: LaunchHook
) -> Iterator[None]:
    """Shape launches through a hook inside a `with` statement, in this thread or coroutine.

    A nested `shaped` of the same hook replaces the outer one. Hooks do not affect each other.

    Parameters
    ----------
    planner
        Plans a launch: a `Planner`, or a hashable object that is called like one. It is called once
        for each kernel, block shape and dynamic shared memory.
    pending
        Returns whether communication needs room. Each launch calls it, so it must be as fast as
        reading a counter.
    hook
        The hook of the device.
    """
    if not hook.enabled:
        yield
        return
    scope = _Scope(hook, planner, hook._number_of(planner), pending, _scope.get())
    token = _scope.set(scope)
    try:
        yield
    finally:
        _scope.reset(token)
