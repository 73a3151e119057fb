"""Tasks that hand inputs to a shuffle: find them in a graph, and write fewer of them.

Dask gives each input a task that makes it and a task that hands it to the shuffle. For arrays, Dask
fuses the two; here this is done for all shuffles. A task may hand over several inputs, too. A run
takes them together (`plugins.shuffle.frame_run`), once it has the last one.

`placement.input_groups` decides which inputs go together.

| what | why | taken back by |
|---|---|---|
| `P2PBarrierTask` with `.func`, `.args`, `.spec` | its inputs are the tasks that hand over; one
with fewer inputs is written | |
| `Task.fuse`, `Alias`, `TaskRef`, `GraphNode.block_fusion`, `.is_coro` | tasks are put into one | |
| `DataNode.value` | the size of data that a task carries | |
| `_execute_subgraph` of `dask._task_spec` | tells how many inputs a task hands over | |
| `thread_state.key`, `.start_time`, `TaskState.run_spec` of a worker | tell the task that runs in
a thread, and its execution | |
| `TaskState.run_spec` | a shuffle that the scheduler has keeps its tasks | |
| `Scheduler.stimulus_task_finished` | ignores results of earlier attempts | |

Contract tests in `tests/plugins/patches/test_transfer_tasks.py` fail when dask or distributed
changes any of these.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from dask._task_spec import Alias, DataNode, Task, TaskRef, _execute_subgraph
from dask.utils import key_split
from distributed.shuffle._core import P2PBarrierTask
from distributed.sizeof import safe_sizeof
from distributed.utils import key_split_group
from distributed.worker import thread_state

from dask_gpurt.plugins.patches.graphs.known_tasks import Forgotten, Graph, spec_of, with_all_needed

if TYPE_CHECKING:
    from dask._task_spec import GraphNode
    from distributed import Worker
    from distributed.scheduler import TaskState

Barrier = P2PBarrierTask


@dataclass(frozen=True)
class Chain:
    """A task that hands an input to a shuffle, after the tasks that only it needs.

    Attributes
    ----------
    tasks
        In the order in which they run.
    is_annotated
        Whether the last task has annotations. It then keeps its key, and the chain is that task.
    """

    tasks: tuple[GraphNode, ...]
    is_annotated: bool

    @property
    def key(self) -> Any:
        return self.tasks[-1].key

    def key_with(self, token: str) -> Any:
        """Return a key that names the first task as well, as Dask names tasks that it fuses."""
        tasks = [task for task in self.tasks if not isinstance(task, Alias)] or [*self.tasks]
        name = "-".join([*dict.fromkeys(key_split(tasks[i].key) for i in (0, -1)), token])
        return (name, *self.key[1:]) if isinstance(self.key, tuple) else name

    @property
    def inputs(self) -> set[Any]:
        """Keys of the other tasks that these tasks need."""
        own = {task.key for task in self.tasks}
        return {key for task in self.tasks for key in task.dependencies} - own

    @property
    def carried_nbytes(self) -> int:
        """Bytes of data that are in these tasks, as a client sent them."""
        return sum(safe_sizeof(task.value) for task in self.tasks if isinstance(task, DataNode))


def may_be_fused(task: GraphNode) -> bool:
    """Return whether a task may be put into one with others."""
    return not (task.block_fusion or task.is_coro)


def token_of(contents: object) -> str:
    """Return a token for new keys: a hash of nested lists of keys."""
    return hashlib.md5(repr(contents).encode(), usedforsecurity=False).hexdigest()


def with_own_keys(graph: Graph) -> Graph:
    """Return a graph in which each task has the key under which the graph has it.

    Dask's frames of delayed objects have aliases with the keys of their targets.

    Returns
    -------
    dict
        The same object, if all tasks have their keys already.
    """
    named = {
        key: Alias(key, task.target) if isinstance(task, Alias) else task.substitute({}, key)
        for key, task in graph.items()
        if task.key != key
    }
    return {**graph, **named} if named else graph


def barriers(graph: Graph) -> list[P2PBarrierTask]:
    """Return the task of each shuffle that all its inputs lead to."""
    return [task for task in graph.values() if isinstance(task, P2PBarrierTask)]


class ChainFinder:
    """Finds the chains of the shuffles of a graph.

    Parameters
    ----------
    wanted
        Keys that a client wants: these tasks stay.
    known
        Keys that the scheduler has: these tasks stay, too. It may have their results.
    annotations
        By kind, the values of keys.
    """

    def __init__(
        self,
        graph: Graph,
        wanted: Collection[Any],
        known: Container[Any],
        annotations: Mapping[str, Mapping[Any, Any]],
    ) -> None:
        self._graph, self._wanted, self._known = graph, wanted, known
        self._annotations = [kind for kind in annotations.values() if kind]
        self._n_dependents = Counter(key for task in graph.values() for key in task.dependencies)

    def is_shared(self, key: Any) -> bool:
        """Return whether several tasks need an input."""
        return self._n_dependents[key] > 1

    def chains(self, barrier: P2PBarrierTask) -> list[Chain] | None:
        """Return the chains that end at a shuffle, in the order of its inputs.

        Returns
        -------
        list of Chain or None
            None if a task that hands over is missing, or serves something else as well.
        """
        found = []
        for key in filter(None, map(_referred, barrier.args)):
            task = self._graph.get(key)
            if task is None or key in self._wanted or self.is_shared(key):
                return None
            is_annotated = self._is_annotated(key)
            tasks = [task] if is_annotated else [*self._upwards(task)]
            found.append(Chain(tuple(reversed(tasks)), is_annotated))
        return found

    def _upwards(self, task: GraphNode) -> Iterator[GraphNode]:
        """Yield a task, and each task before it that only the one after it needs."""
        yield task
        while len(task.dependencies) == 1 and not task.block_fusion:
            (key,) = task.dependencies
            before = self._graph.get(key)
            if before is None or not may_be_fused(before):
                return
            if self.is_shared(key) or key in self._wanted or key in self._known:
                return
            # An output of another shuffle runs where its owner is, and again if that one restarts.
            if self._reads_shuffle(before) or self._is_annotated(key):
                return
            yield before
            task = before

    def _reads_shuffle(self, task: GraphNode) -> bool:
        return any(isinstance(self._graph.get(key), P2PBarrierTask) for key in task.dependencies)

    def _is_annotated(self, key: Any) -> bool:
        return any(key in kind for kind in self._annotations)


def _referred(arg: Any) -> Any:
    """Return the key of the task that an argument stands for; None if it is a value."""
    if isinstance(arg, Alias):
        return arg.target
    return arg.key if isinstance(arg, TaskRef) else None


def write(graph: Graph, shuffles: Sequence[tuple[Barrier, Sequence[Sequence[Chain]]]]) -> None:
    """Put one task in place of each group of chains, named after the first chain.

    Dask cuts a rechunk into many small shuffles, whose tasks have one name. Their keys get one
    token, so the scheduler has one group of tasks for all of them, as with stock Dask.

    Parameters
    ----------
    shuffles
        Each shuffle with its groups of chains.
    """
    # A key must always stand for the same inputs, so its token depends on the whole grouping.
    grouping: dict[str, list[list[list[Any]]]] = {}
    for _, groups in shuffles:
        keys = [[[task.key for task in chain.tasks] for chain in group] for group in groups]
        grouping.setdefault(key_split_group(groups[0][0].key), []).extend(keys)
    tokens = {name: token_of(keys) for name, keys in grouping.items()}
    for barrier, groups in shuffles:
        _write(graph, barrier, groups, tokens[key_split_group(groups[0][0].key)])


def _write(graph: Graph, barrier: Barrier, groups: Sequence[Sequence[Chain]], token: str) -> None:
    keys = []
    for group in groups:
        tasks = [task for chain in group for task in chain.tasks]
        for task in tasks:
            del graph[task.key]
        key = group[0].key_with(token) if len(tasks) > 1 else tasks[0].key
        if len(group) > 1:
            # All are of one run: a restart runs the whole task again, and the scheduler ignores the
            # result of an earlier attempt.
            tasks.append(Task(("run-id", key), min, *(TaskRef(chain.key) for chain in group)))
        graph[key] = Task.fuse(*tasks, key=key)
        keys.append(key)
    others = [arg for arg in barrier.args if _referred(arg) is None]
    graph[barrier.key] = P2PBarrierTask(
        barrier.key, barrier.func, *others, *map(TaskRef, keys), spec=barrier.spec
    )


def keep_known(graph: Graph, barrier: P2PBarrierTask, tasks: Mapping[Any, TaskState]) -> bool:
    """Use the tasks that a scheduler has for a shuffle already; return whether it has them.

    A known task keeps its inputs, so a shuffle must be written as it was the first time. The tasks
    that it needs come too: the scheduler may forget them before it gets the graph.
    """
    spec = spec_of(barrier.key, tasks)
    if not isinstance(spec, P2PBarrierTask):
        return False
    handing_over = [one for key in spec.dependencies if (one := spec_of(key, tasks)) is not None]
    if len(handing_over) < len(spec.dependencies):
        return False
    try:
        found = with_all_needed(handing_over, graph, tasks)
    except Forgotten:
        return False
    graph.update({**found, barrier.key: spec})
    return True


def n_inputs(task: Any) -> int:
    """Return how many inputs a task hands to a shuffle."""
    if isinstance(task, Task) and task.func is _execute_subgraph:
        last = next(reversed(task.args[0].values()))
        if isinstance(last, Task) and last.func is min:
            return len(last.dependencies)
    return 1


class Execution(NamedTuple):
    """One execution of a task that hands inputs to a shuffle."""

    key: Any
    #: When it began. A worker executes a task again only after the earlier execution has ended.
    start_s: float
    n_inputs: int


def execution_in_this_thread(worker: Worker) -> Execution:
    """Return the execution that runs in this thread."""
    key = getattr(thread_state, "key", None)
    task = worker.state.tasks.get(key) if key is not None else None
    start_s = getattr(thread_state, "start_time", 0.0)
    return Execution(key, start_s, n_inputs(task.run_spec) if task is not None else 1)
