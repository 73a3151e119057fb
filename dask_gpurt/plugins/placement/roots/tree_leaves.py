"""Leaves of reduction trees in the graph of a live scheduler. Reads the graph and decides nothing.

A *combining task* needs several results of one group, and each of these is needed by no other task
of that kind. Its inputs are the *leaves* of the tree, or combine leaves themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dask_gpurt.placement.siblings import MAX_DEPENDENTS, MAX_INPUTS
from dask_gpurt.plugins.placement.join_partners import MAX_CHAIN, is_made_of

if TYPE_CHECKING:
    from distributed.scheduler import TaskState

#: Limit of arrays that are combined block by block before the tree begins, as in `(a + b).sum(0)`.
MAX_ARRAYS = 4
#: Limit of tasks between a root and its leaf. A block that meets its own edge takes two more.
_MAX_STEPS = MAX_CHAIN + 2
#: Limit of levels of a tree.
MAX_LEVELS = 16


def leaf_of(root: TaskState) -> TaskState | None:
    """Return the leaf that a root task is, or is a part of; None if it is in no tree.

    Between the two may be tasks that need nothing else, and tasks that take a block of each of a
    few arrays. A result that several tasks of one group need, such as a block in a stencil or in a
    matrix product, is in no tree.
    """
    one = root
    for _ in range(_MAX_STEPS):
        if not one.dependents or len(one.dependents) > MAX_DEPENDENTS:
            return None
        combining, onward = _dependents(one)
        if len(combining) == 1 and is_made_of(combining[0], root):
            # A block and its own edge, which was cut off and padded.
            one = combining[0]
            continue
        if combining:
            return one if len(combining) == 1 and _is_tree(combining[0]) else None
        if len({later.group.name for later in onward}) < max(len(onward), 1):
            return None
        one = min(onward, key=_priority)
    return None


def combines_held(node: TaskState) -> bool:
    """Return whether a task combines results of blocks that a client holds.

    Such blocks are where an earlier graph made them, and not in runs.
    """
    inputs = node.dependencies
    if not 1 < len(inputs) <= MAX_INPUTS:
        return False
    one = next(iter(inputs))
    if not all(other.group is one.group for other in inputs) or not _is_tree(node):
        return False
    for _ in range(MAX_LEVELS):
        if one.who_wants or not one.dependencies:
            break
        one = next(iter(one.dependencies))
    return bool(one.who_wants)


def _is_tree(node: TaskState) -> bool:
    """Return whether each input of a combining task is needed by no other one."""
    inputs = node.dependencies
    group = next(iter(inputs)).group
    if 2 * len(node.group) > len(group):
        return False
    for one in inputs:
        if len(one.dependents) > MAX_DEPENDENTS:
            return False
        for later in one.dependents:
            if later is node:
                continue
            # A task that needs very many is not read: this is asked for each of them.
            n_needed = len(later.dependencies)
            if n_needed > MAX_INPUTS or sum(o.group is group for o in later.dependencies) > 1:
                return False
    return True


def _dependents(one: TaskState) -> tuple[list[TaskState], list[TaskState]]:
    """Return the tasks that combine a result with its kind, and those that pass it on."""
    combining: list[TaskState] = []
    passing: list[TaskState] = []
    blockwise: list[TaskState] = []
    group = one.group
    for later in one.dependents:
        n_needed = len(later.dependencies)
        if n_needed == 1:
            passing.append(later)
        elif n_needed <= MAX_INPUTS:
            n_alike = sum(other.group is group for other in later.dependencies)
            if n_alike == n_needed:
                combining.append(later)
            elif n_alike == 1 and n_needed <= MAX_ARRAYS:
                blockwise.append(later)
    return combining, passing or (blockwise if len(blockwise) == 1 else [])


def leaves_near(leaf: TaskState) -> Iterator[TaskState]:
    """Yield a leaf and the other leaves of its tree, those that are combined with it first."""
    yield leaf
    top, group = leaf, leaf.group
    for _ in range(MAX_LEVELS):
        combining, _ = _dependents(top)
        if len(combining) != 1:
            return
        (node,) = combining
        for other in sorted(node.dependencies, key=_priority):
            if other is not top:
                yield from _leaves_below(other, group, MAX_LEVELS)
        top = node


def _leaves_below(node: TaskState, group: object, n_levels: int) -> Iterator[TaskState]:
    if node.group is group:
        yield node
    elif n_levels:
        for one in sorted(node.dependencies, key=_priority):
            yield from _leaves_below(one, group, n_levels - 1)


def _priority(ts: TaskState) -> tuple[float, ...]:
    return ts.priority or ()
