"""Has launches carry more dynamic shared memory than they ask for, without a change to kernels.

`LaunchHook` stands between whoever launches and a driver. Outside of `shaped` it passes launches on
as they are. Inside, and while communication is pending, a launch carries what the planner says
(`devices.occupancy.planner`). It is asked once for each kernel and shape of block, and
`LaunchHook.decisions` says what it answered.

A hook may only ever cost time. It adds shared memory and takes none away; a launch that the
driver refuses with more is made again without; a planner or driver that fails leaves the launch as
it was. Launches whose blocks must all be resident at once (cooperative ones) must not be sent
through a hook: with fewer resident they would never end.

Knows no CUDA library: they are attached as `LaunchDriver`.
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
from dask_gpurt.devices.occupancy.planner import Plan, Reason, Refusal, plan
from dask_gpurt.devices.occupancy.resident_blocks import Launch, Limit

#: Blocks or threads in three dimensions.
Extent = tuple[int, int, int]

#: Kernels times shapes of blocks times planners. Programs have hundreds; one that makes kernels
#: without end must not fill the memory with what was decided about them.
_MOST_DECISIONS = 4096


class LaunchRefusedError(RuntimeError):
    """The driver did not make a launch because of what it asks for. Nothing ran."""


@dataclass(frozen=True)
class KernelAttributes:
    """What a compiled kernel needs.

    Attributes
    ----------
    registers
        32-bit registers of a thread.
    static_nbytes
        Shared memory declared in the kernel.
    max_threads
        Most threads of a block with which it can be launched.
    max_dynamic_nbytes
        Dynamic shared memory that it is allowed now. Where its owner has allowed it a lot for
        launches of its own, allowing it less would have those refused.
    """

    registers: int
    static_nbytes: int
    max_threads: int
    max_dynamic_nbytes: int


class LaunchDriver(Protocol):
    """What is asked of a CUDA or HIP library, for one device."""

    def attributes(self, kernel: Hashable) -> KernelAttributes:
        """What a kernel needs, as compiled for the device."""

    def launch(
        self, kernel: Hashable, grid: Extent, block: Extent, shared_nbytes: int, stream: Any
    ) -> None:
        """Launch with so much dynamic shared memory.

        Raises
        ------
        LaunchRefusedError
            It asks for more than there is. Other errors are the library's own.
        """

    def set_max_dynamic_shared(self, kernel: Hashable, nbytes: int) -> None:
        """Allow a kernel so much dynamic shared memory, and prefer shared memory to L1 cache.

        Raises
        ------
        LaunchRefusedError
            The device has not that much.
        """


@dataclass(frozen=True)
class Planner:
    """How launches are to be shaped: the part of `planner.plan` that is the same for all.

    Attributes
    ----------
    leave
        Blocks to leave on each multiprocessor; or the fewest, or the most below what is resident
        otherwise.
    """

    architecture: Architecture
    leave: int | Literal["fewest", "most"]

    def __call__(self, launch: Launch) -> Plan | Refusal:
        """What to do with a launch while communication is pending."""
        return plan(self.architecture, launch, self.leave, pending=True)


@dataclass(frozen=True)
class Failure:
    """A launch to leave as it is, because the planner failed or the driver refused."""

    error: str

    def __str__(self) -> str:
        return self.error


@dataclass(frozen=True, slots=True)
class Decided:
    """What was decided about launches of a kernel with one shape of block.

    Attributes
    ----------
    asked_nbytes, nbytes
        Dynamic shared memory of the launch by itself, and what it is to carry.
    """

    kernel: Hashable
    block: Extent
    asked_nbytes: int
    nbytes: int
    why: Plan | Refusal | Failure


@dataclass(frozen=True, slots=True)
class _Scope:
    """A `with shaped(...)` that has been entered."""

    hook: LaunchHook
    planner: Callable[[Launch], Plan | Refusal]
    #: Stands for the planner in keys: a planner may take long to hash.
    number: int
    pending: Callable[[], bool]
    outer: _Scope | None


# A context variable, not a thread's: two coroutines of one thread do not shape each other's
# launches, and a new thread begins unshaped.
_scope: ContextVar[_Scope | None] = ContextVar("dask_gpurt_shaping", default=None)

_Key = tuple[int, Hashable, Extent, int]


class LaunchHook:
    """The place that launches of one device pass.

    Parameters
    ----------
    driver
        Makes the launches.
    enabled
        If not, `shaped` changes nothing: the setting `gpurt.devices.shape-launches`.

    Attributes
    ----------
    failure
        The last error of a `pending` function; those of planners and drivers are in `decisions`.
    """

    def __init__(self, driver: LaunchDriver, *, enabled: bool) -> None:
        self.enabled = enabled
        self.failure: str | None = None
        self._driver = driver
        # Held while something is decided: a kernel is asked about once, and what it is allowed
        # only ever grows.
        self._lock = threading.Lock()
        self._decided: dict[_Key, Decided] = {}
        self._planners: dict[Hashable, int] = {}
        self._numbers = itertools.count()

    def launch(
        self, kernel: Hashable, grid: Extent, block: Extent, shared_nbytes: int, stream: Any
    ) -> None:
        """Launch, with more dynamic shared memory if this is within `shaped`.

        Raises what the driver raises for the launch as it was asked for.
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
        """Launch with what `dynamic_nbytes` said, and without if that is refused."""
        if nbytes != shared_nbytes:
            try:
                self._driver.launch(kernel, grid, block, nbytes, stream)
                return
            except LaunchRefusedError as error:
                self._leave_alone(kernel, block, shared_nbytes, error)
        self._driver.launch(kernel, grid, block, shared_nbytes, stream)

    def dynamic_nbytes(self, kernel: Hashable, block: Extent, shared_nbytes: int) -> int:
        """What a launch here and now should carry: never less than it asks for. Does not raise.

        For a callback in the middle of another library's launch, which goes on with it itself.
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
        """What was decided so far, and why."""
        with self._lock:
            return list(self._decided.values())

    def forget(self, kernel: Hashable) -> None:
        """A kernel is unloaded: its handle may come back as another's."""
        with self._lock:
            for key in [key for key in self._decided if key[1] == kernel]:
                del self._decided[key]

    def _decide(self, scope: _Scope, kernel: Hashable, block: Extent, asked_nbytes: int) -> Decided:
        key = (scope.number, kernel, block, asked_nbytes)
        with self._lock:
            if (decided := self._decided.get(key)) is not None:
                return decided
            nbytes = asked_nbytes
            why: Plan | Refusal | Failure
            try:
                why = self._planned(scope, kernel, block, asked_nbytes)
                if isinstance(why, Plan):
                    nbytes = max(nbytes, why.dynamic_nbytes)
            except Exception as error:
                why = Failure(repr(error))
            if len(self._decided) >= _MOST_DECISIONS:
                self._decided.clear()
            decided = self._decided[key] = Decided(kernel, block, asked_nbytes, nbytes, why)
            return decided

    def _planned(
        self, scope: _Scope, kernel: Hashable, block: Extent, asked_nbytes: int
    ) -> Plan | Refusal:
        """Ask the planner, and have the kernel allowed what it says. The lock is held."""
        needs = self._driver.attributes(kernel)
        x, y, z = block
        launch = Launch(x * y * z, needs.registers, needs.static_nbytes, asked_nbytes)
        if launch.threads > needs.max_threads:
            return Refusal(Reason.DOES_NOT_RUN, 0, frozenset({Limit.THREADS}))
        found = scope.planner(launch)
        if isinstance(found, Plan) and found.dynamic_nbytes > needs.max_dynamic_nbytes:
            self._driver.set_max_dynamic_shared(kernel, found.dynamic_nbytes)
        return found

    def _leave_alone(
        self, kernel: Hashable, block: Extent, asked_nbytes: int, error: Exception
    ) -> None:
        """Whoever plans for this launch, it was refused with more than it asks for."""
        decided = Decided(kernel, block, asked_nbytes, asked_nbytes, Failure(repr(error)))
        with self._lock:
            for key in self._decided:
                if key[1:] == (kernel, block, asked_nbytes):
                    self._decided[key] = decided

    def _number_of(self, planner: Hashable) -> int:
        with self._lock:
            if planner not in self._planners:
                if len(self._planners) >= _MOST_DECISIONS:
                    # Numbers are never used again, so that a planner may get another one.
                    self._planners.clear()
                self._planners[planner] = next(self._numbers)
            return self._planners[planner]


@contextlib.contextmanager
def shaped(
    planner: Callable[[Launch], Plan | Refusal], pending: Callable[[], bool], hook: LaunchHook
) -> Iterator[None]:
    """Have launches through a hook shaped, in this thread or coroutine, until the end of the block.

    Within another `shaped` of the same hook the inner one holds; that of another hook goes on.

    Parameters
    ----------
    planner
        What to do with a launch: a `Planner`, or anything hashable that is called like one. It is
        called once for each kernel, shape of block and dynamic shared memory.
    pending
        Whether there is communication to make room for. Called at each launch, so it must be as
        quick as reading a counter.
    hook
        Of the device whose launches are meant.
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
