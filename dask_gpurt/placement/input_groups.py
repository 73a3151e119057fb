"""Inputs of a shuffle that one task hands over. Pure.

Every task costs the scheduler and its worker about a millisecond, so hundreds of small inputs take
longer to schedule than to move. One task can hand over several, one after the other. Enough tasks
must be left to keep all threads busy to the end, and to let other workers take some of them.

Inputs that are made on the way keep a task each. Nobody knows how long it takes to make them, and
a cluster that grows meanwhile needs tasks for its new workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

#: Least tasks that are left for each thread. A thread that gets one too many, while the others are
#: done, then takes 3 % longer.
TASKS_PER_THREAD = 32
#: Most inputs of a task. It costs little per input already, and a task that fails runs again.
MOST_INPUTS = 16
#: Most bytes that a task reads from memory. All of them are there while it runs.
MOST_NBYTES = 16 << 20


class ShuffleInput(NamedTuple):
    """An input of a shuffle.

    Attributes
    ----------
    holder
        A worker that has the data that the input is made of.
    nbytes
        Bytes of that data.
    is_alone
        Whether a task of its own must hand over this input.
    """

    holder: str = ""
    nbytes: int = 0
    is_alone: bool = False


def grouped(inputs: Sequence[ShuffleInput], n_threads: int) -> list[list[int]]:
    """Return the inputs, by number, that each task hands over.

    Parameters
    ----------
    n_threads
        Threads of the cluster.

    Returns
    -------
    list of lists of int
        Each number appears once. Numbers ascend within a group, and groups by their first number.
    """
    groups = [[number] for number, one in enumerate(inputs) if one.is_alone]
    # A worker that has many inputs may leave some to others, so all threads count.
    most = min(MOST_INPUTS, len(inputs) // (TASKS_PER_THREAD * n_threads)) if n_threads else 1
    of_holder: dict[str, list[int]] = {}
    for number, one in enumerate(inputs):
        if not one.is_alone:
            of_holder.setdefault(one.holder, []).append(number)
    for numbers in of_holder.values():
        groups += _cut(numbers, inputs, most)
    return sorted(groups)


def _cut(numbers: list[int], inputs: Sequence[ShuffleInput], most: int) -> list[list[int]]:
    """Return groups of adjacent inputs: each at most `most` inputs and `MOST_NBYTES` bytes."""
    groups: list[list[int]] = []
    nbytes = 0
    for number in numbers:
        nbytes += inputs[number].nbytes
        if not groups or len(groups[-1]) >= most or nbytes > MOST_NBYTES:
            groups.append([])
            nbytes = inputs[number].nbytes
        groups[-1].append(number)
    return groups
