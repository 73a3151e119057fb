"""A rank of a group. `Communicator.run` passes it to the function on each worker.

Calls block the thread of the task until the operation is done, on this rank. The event loop of the
worker carries it out (`operation_run`).
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from distributed import get_worker

from dask_gpurt.collectives.choice import AlgorithmCost, RankGroup
from dask_gpurt.collectives.plans import Collective, steps_of
from dask_gpurt.collectives.reduction import Operation
from dask_gpurt.collectives.slice_memory import SliceMemory, empty_like, module_of
from dask_gpurt.collectives.steps import slice_bounds
from dask_gpurt.devices.host_memory.pages import PAGE_NBYTES
from dask_gpurt.errors import CollectiveError
from dask_gpurt.plugins.collectives.groups.group_messages import (
    ADDABLE,
    MOVABLE,
    GroupFailure,
    OperationCall,
)
from dask_gpurt.plugins.collectives.groups.operation_run import OperationPlan
from dask_gpurt.plugins.collectives.groups.task_thread import TaskThread
from dask_gpurt.plugins.collectives.groups.torch_start import (
    free_port,
    start_nccl,
    torch_environment,
)
from dask_gpurt.plugins.patches.p2p import event_loop
from dask_gpurt.plugins.request_checks import MAX_PROBLEM
from dask_gpurt.plugins.worker.worker_runtime import runtime_of
from dask_gpurt.shuffle.routing import host_of

if TYPE_CHECKING:
    from dask_gpurt.collectives.choice import LinkCosts
    from dask_gpurt.plugins.collectives.groups.group_member import GroupMember

#: Sizes for which candidates are kept: most programs use a few.
_MOST_SIZES = 256


class Rank:
    """One of the workers that run a function together.

    All ranks call the same operations in the same order, with arrays of the same shape and type.
    Results have the same bits on all ranks. The caller's arrays stay as they are.

    Attributes
    ----------
    rank : int
        Number of this rank, from 0.
    size : int
        Number of ranks.
    workers : list of str
        Address of each rank's worker.
    timeout_s : float
        How long this rank waits for others without any progress.
    """

    def __init__(
        self, member: GroupMember, costs: LinkCosts, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._member, self._costs, self._loop = member, costs, loop
        self.rank, self.workers = member.rank, list(member.workers)
        self.size = len(self.workers)
        self.timeout_s = member.timeout_s
        self._hosts = [host_of(address) for address in self.workers]
        self._group = RankGroup(self._hosts)
        self._found: dict[tuple[str, int], list[AlgorithmCost]] = {}
        self._is_busy = threading.Lock()
        self._last: dict[str, Any] = {}
        self._counts: Counter[str] = Counter()
        self._algorithms: Counter[str] = Counter()
        self._seconds = 0.0

    def allreduce(self, array: Any, op: Operation = "sum") -> Any:
        """Combine the arrays of all ranks, and return the result on each of them.

        Parameters
        ----------
        array
            A NumPy or CuPy array of numbers, or a number.
        op
            `sum`, `prod`, `min`, `max`, `any` or `all`, element by element, in the array's type.

        Returns
        -------
        array
            A new array of the same shape and type.

        Raises
        ------
        CollectiveError
            Arrays differ in shape or type, or another rank has failed or calls something else.
        RankLostError
            The worker of another rank is gone.
        TypeError
            The array's type cannot be added up.
        """
        array, _ = _checked(array, ADDABLE), _known(op)
        if self.size == 1:
            array = _of_one_rank(array, op)
        return self._all_reduced(f"allreduce({op})", array, op)

    def barrier(self) -> None:
        """Wait until all ranks are here. Raises as `allreduce`."""
        self._all_reduced("barrier()", np.zeros(1, np.uint8), "max")

    def _all_reduced(self, call: str, array: Any, operation: Operation) -> Any:
        flat = _flat(array)
        best = self._best("all-reduce", array.nbytes)
        memory = SliceMemory(
            slice_bounds(len(flat), best.work.n_slices),
            flat,
            result := self._empty(flat, len(flat)),
            array.dtype,
        )
        self._run("all-reduce", self._subject(call, array, best), memory, operation)
        return result.reshape(array.shape)[()]

    def reduce_scatter(self, array: Any, op: Operation = "sum") -> Any:
        """Combine the arrays of all ranks, and return this rank's part of the rows.

        With n ranks, the first axis is cut into n parts. The first parts have one row more where it
        does not divide evenly. Rank i gets part i. Parameters and errors are those of `allreduce`.
        """
        array, _ = _checked(array, ADDABLE), _known(op)
        if not array.ndim:
            raise ValueError("reduce_scatter needs an array with rows, not a number")
        flat = _flat(_of_one_rank(array, op) if self.size == 1 else array)
        best = self._best("reduce-scatter", array.nbytes)
        rows = slice_bounds(len(array), self.size)
        length = len(flat) // max(1, len(array))
        bounds = [row * length for row in rows]
        memory = SliceMemory(bounds, flat, None, array.dtype)
        subject = self._subject(f"reduce_scatter({op})", array, best)
        self._run("reduce-scatter", subject, memory, op)
        part = range(self.rank, self.rank + 1)
        found = memory.view(part) if self.size > 1 else flat.copy()
        return found.reshape((rows[self.rank + 1] - rows[self.rank], *array.shape[1:]))

    def all_gather(self, array: Any) -> Any:
        """Return the arrays of all ranks, stacked along a new first axis in the order of ranks.

        The type may also be one of dates or of texts of a fixed length. Errors are those of
        `allreduce`.
        """
        array = _checked(array, MOVABLE)
        flat, length = _flat(array), array.size
        best = self._best("all-gather", array.nbytes * self.size)
        bounds = [number * length for number in range(self.size + 1)]
        result = self._empty(flat, length * self.size)
        result[bounds[self.rank] : bounds[self.rank + 1]] = flat
        memory = SliceMemory(bounds, None, result, array.dtype, held=[self.rank])
        self._run("all-gather", self._subject("all_gather()", array, best), memory)
        return result.reshape((self.size, *array.shape))

    def broadcast(self, array: Any = None, root: int = 0) -> Any:
        """Return the array of one rank on all ranks.

        Parameters
        ----------
        array
            As for `all_gather`. Only the root's is used; others may give None.
        root
            The rank whose array is copied.

        Raises
        ------
        ValueError
            There is no such rank.
        CollectiveError, RankLostError, TypeError
            As for `allreduce`.
        """
        if not 0 <= root < self.size:
            raise ValueError(f"there is no rank {root} among {self.size}")
        call = f"broadcast(root={root})"
        if self.rank == root:
            array = _checked(array, MOVABLE)
            flat = _flat(array)
            best = self._best("broadcast", array.nbytes)
            bounds = slice_bounds(len(flat), best.work.n_slices)
            memory = SliceMemory(bounds, flat, None, array.dtype)
            self._run("broadcast", self._subject(call, array, best), memory, root=root)
            return flat.copy().reshape(array.shape)[()]
        like = np.empty(0) if array is None else _checked(array, MOVABLE)
        made: list[Any] = []

        def prepare(subject: OperationCall) -> OperationPlan:
            dtype = np.dtype(subject.dtype)
            length = subject.nbytes // dtype.itemsize
            result = self._empty(like, length, dtype)
            made[:] = result, subject
            memory = SliceMemory(slice_bounds(length, subject.n_slices), None, result, dtype)
            steps = steps_of(
                "broadcast", subject.algorithm, self.rank, self._hosts, subject.n_slices, root
            )
            return OperationPlan(subject, steps, memory)

        self._wait_for("broadcast", call, None, prepare)
        result, subject = made
        self._note("broadcast", subject)
        return result.reshape(subject.shape)[()]

    def explain(self) -> dict[str, Any]:
        """Return why the last operation took its algorithm.

        Returns
        -------
        dict
            ``operation``, ``nbytes``, the ``chosen`` algorithm, the ``seconds`` that it took here,
            and ``candidates``, the cheapest first: each with its expected ``seconds``, its ``hops``
            (messages that wait for each other), and the bytes ``across`` hosts and ``inside`` one.
            Empty before the first operation.
        """
        if not self._last:
            return {}
        found = self._candidates(self._last["operation"], self._last["nbytes"])
        return {
            **self._last,
            "candidates": [
                {
                    "algorithm": one.algorithm,
                    "seconds": one.seconds,
                    "hops": one.work.n_hops,
                    "across": round(one.work.across * one.nbytes),
                    "inside": round(one.work.inside * one.nbytes),
                }
                for one in found
            ],
        }

    def torch_env(self) -> dict[str, str]:
        """Return the environment variables with which torch finds the other ranks.

        Returns
        -------
        dict
            ``MASTER_ADDR``, ``MASTER_PORT``, ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK`` and
            ``LOCAL_WORLD_SIZE``. The port is free now; another program may take it. `run_torch` of
            the communicator has no such gap.
        """
        mine = np.array([free_port()]) if self.rank == 0 else None
        return torch_environment(self, int(self.broadcast(mine)[0]))

    def nccl(self) -> Any:
        """Return an NCCL communicator of this group, for CuPy arrays.

        Returns
        -------
        cupy.cuda.nccl.NcclCommunicator
            With the numbers of these ranks, on the GPU with the number of the rank on its host.

        Raises
        ------
        CollectiveError
            A rank has no CuPy with NCCL, or no GPU of its own. It names these ranks.
        """
        return start_nccl(self)

    # ------------------------------------------------------------------ carrying out

    def _candidates(self, collective: Collective, nbytes: int) -> list[AlgorithmCost]:
        key = collective, nbytes
        if key not in self._found:
            if len(self._found) >= _MOST_SIZES:
                self._found.clear()
            compare = getattr(self._group, collective.replace("-", "_"))
            self._found[key] = compare(nbytes, self._costs)
        return self._found[key]

    def _best(self, collective: Collective, nbytes: int) -> AlgorithmCost:
        return self._candidates(collective, nbytes)[0]

    def _subject(self, call: str, array: Any, best: AlgorithmCost) -> OperationCall:
        return OperationCall(
            call, array.shape, array.dtype.str, best.algorithm, max(1, best.work.n_slices)
        )

    def _empty(self, like: Any, length: int, dtype: np.dtype[Any] | None = None) -> Any:
        """Return memory for a result: warm pages of the worker's pool if it is large."""
        dtype = dtype or like.dtype
        is_large = length * dtype.itemsize >= PAGE_NBYTES
        return empty_like(like, length, dtype, self._member.pool.empty_alone if is_large else None)

    def _run(
        self,
        collective: Collective,
        subject: OperationCall,
        memory: SliceMemory,
        operation: Operation | None = None,
        root: int = 0,
    ) -> None:
        steps = steps_of(
            collective, subject.algorithm, self.rank, self._hosts, subject.n_slices, root
        )
        plan = OperationPlan(subject, steps, memory, operation)
        self._wait_for(collective, subject.call, plan, None)
        self._note(collective, subject)

    def _wait_for(
        self,
        collective: Collective,
        call: str,
        plan: OperationPlan | None,
        prepare: Callable[[OperationCall], OperationPlan] | None,
    ) -> None:
        if not self._is_busy.acquire(blocking=False):
            raise CollectiveError(
                f"two threads of rank {self.rank} use its communicator at once; "
                "let one thread call all operations"
            )
        try:
            thread = TaskThread(self._loop)
            began_s = perf_counter()
            self._loop.call_soon_threadsafe(self._member.begin, call, thread, plan, prepare)
            thread.serve()
            self._last = {"operation": collective, "seconds": perf_counter() - began_s}
        finally:
            self._is_busy.release()

    def _note(self, collective: Collective, subject: OperationCall) -> None:
        nbytes = subject.nbytes * (self.size if collective == "all-gather" else 1)
        self._last |= {"nbytes": nbytes, "chosen": subject.algorithm}
        if subject.call == "barrier()":
            return
        self._counts[collective] += 1
        self._counts["nbytes"] += nbytes
        self._seconds += self._last["seconds"]
        self._algorithms[subject.algorithm] += 1

    def counts(self) -> dict[str, Any]:
        """Return the operations of this rank, for `status`. Called once, at its end."""
        nbytes = self._counts.pop("nbytes", 0)
        operations, algorithms = dict(self._counts), dict(self._algorithms)
        return {
            "operations": operations,
            "algorithms": algorithms,
            "nbytes": nbytes,
            "seconds": self._seconds,
        }


def _known(op: str) -> Operation:
    for known in get_args(Operation):
        if op == known:
            return op  # type: ignore[return-value]
    raise ValueError(f"{op!r} is none of {', '.join(get_args(Operation))}")


def _checked(array: Any, kinds: frozenset[str]) -> Any:
    """Return an array that can be sent."""
    if type(array).__module__.partition(".")[0] != "cupy":
        if isinstance(array, np.ndarray) and type(array) is not np.ndarray:
            raise TypeError(f"a {type(array).__name__} would lose what it adds to an array")
        array = np.asarray(array)
    if array.dtype.kind not in kinds or not array.dtype.itemsize:
        raise TypeError(f"arrays of type {array.dtype} cannot take part in a collective operation")
    return array


def _of_one_rank(array: Any, operation: Operation) -> Any:
    """Return the result for a single array. With several, `any` and `all` give zeros and ones."""
    return (array != 0).astype(array.dtype) if operation in ("any", "all") else array


def _flat(array: Any) -> Any:
    """Return the elements in one dimension, in C order: a view, if they are in that order."""
    return module_of(array).ascontiguousarray(array).reshape(-1)


def _text(error: BaseException) -> str:
    try:
        return repr(error)
    except Exception:
        # It is a program's own class, and its `__repr__` fails.
        return type(error).__name__


def run_rank(
    name: str, rank: int, step: Callable[..., Any], blocks: Sequence[Any], state: Sequence[Any]
) -> Any:
    """Run a step as a rank of a group. The task of the rank."""
    worker = get_worker()
    loop, groups = event_loop(worker), runtime_of(worker).groups

    def on_loop(function: Callable[..., Any], *arguments: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(function(*arguments), loop).result()

    member, costs = on_loop(groups.enter, name, rank)
    comm = Rank(member, costs, loop)
    leave = partial(on_loop, groups.leave, member)
    try:
        result = step(comm, blocks, *state)
    except BaseException as error:
        text = f"rank {rank} at {worker.address} failed: {_text(error)}"
        leave(GroupFailure("failed", text[:MAX_PROBLEM]), comm.counts())
        raise
    leave(None, comm.counts())
    if member.failure is not None:
        raise member.failure.error()
    return result
