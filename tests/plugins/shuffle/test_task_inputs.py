"""Inputs of one task are taken together, however often it runs."""

from __future__ import annotations

import weakref
from typing import Any

from dask_gpurt.plugins.patches.graphs.transfer_tasks import Execution
from dask_gpurt.plugins.shuffle.frame_run import MOST_WAITING_NBYTES, TaskInputs

SMALL_NBYTES = 100


def add(
    inputs: TaskInputs, task: str, n_inputs: int, number: int, data: Any, start_s: float = 1.0
) -> Any:
    """Hand over a small input; return those to cut now, which are one group."""
    groups = inputs.add(Execution(task, start_s, n_inputs), number, data, SMALL_NBYTES)
    assert len(groups) <= 1
    return groups[0] if groups else []


def test_inputs_come_with_the_last_one_in_their_order():
    inputs = TaskInputs()
    assert add(inputs, "task", 3, 8, "eight") == []
    assert add(inputs, "task", 3, 4, "four") == []
    assert add(inputs, "task", 3, 6, "six") == [(4, "four"), (6, "six"), (8, "eight")]


def test_tasks_do_not_mix():
    inputs = TaskInputs()
    assert add(inputs, "one", 2, 0, "a") == add(inputs, "other", 2, 1, "b") == []
    assert add(inputs, "other", 2, 3, "d") == [(1, "b"), (3, "d")]
    assert add(inputs, "alone", 1, 5, "f") == [(5, "f")]
    assert add(inputs, "one", 2, 2, "c") == [(0, "a"), (2, "c")]


def test_a_task_that_failed_half_way_begins_anew():
    inputs = TaskInputs()
    assert add(inputs, "task", 3, 0, "old") == add(inputs, "task", 3, 1, "old") == []
    assert add(inputs, "task", 3, 0, "new", 2.0) == add(inputs, "task", 3, 1, "new", 2.0) == []
    assert add(inputs, "task", 3, 2, "new", 2.0) == [(0, "new"), (1, "new"), (2, "new")]


def test_an_execution_of_an_earlier_run_does_not_count():
    """It handed its first input to that run, the second one to this run, and then it failed."""
    inputs = TaskInputs()
    assert add(inputs, "task", 4, 1, "old") == []
    for number in range(3):
        assert add(inputs, "task", 4, number, "new", 2.0) == []
    assert add(inputs, "task", 4, 3, "new", 2.0) == [(number, "new") for number in range(4)]


def test_a_task_may_run_again_after_its_last_input():
    inputs = TaskInputs()
    for start_s, attempt in enumerate(("first", "second")):
        assert add(inputs, "task", 2, 0, attempt, start_s) == []
        assert add(inputs, "task", 2, 1, attempt, start_s) == [(0, attempt), (1, attempt)]


def test_inputs_of_failed_tasks_can_be_forgotten():
    class Data:
        pass

    inputs, data = TaskInputs(), Data()
    freed = weakref.ref(data)
    assert add(inputs, "task", 2, 0, data) == []
    del data
    assert freed() is not None
    inputs.clear()
    assert freed() is None


def test_large_inputs_do_not_wait_for_others():
    """A task may make large inputs of little data, such as the names of files."""
    inputs, n = TaskInputs(), 4
    large = MOST_WAITING_NBYTES / n + 1
    for start_s in range(2):  # attempts have the same groups
        task = Execution("task", start_s, n)
        assert inputs.add(task, 0, "large", large) == [[(0, "large")]]
        assert inputs.add(task, 1, "small", large - 1) == []
        assert inputs.add(task, 2, "small", 0) == []
        groups = inputs.add(task, 3, "large", large)
        assert groups == [[(3, "large")], [(1, "small"), (2, "small")]]


def test_a_task_may_have_large_inputs_only():
    inputs = TaskInputs()
    for number in range(2):
        assert inputs.add(Execution("task", 1.0, 2), number, "data", 1e9) == [[(number, "data")]]
    assert inputs.add(Execution("task", 2.0, 1), 5, "data", 1e9) == [[(5, "data")]]


def test_an_attempt_after_a_large_input_begins_anew():
    inputs = TaskInputs()
    first, second = (Execution("task", start_s, 3) for start_s in (1.0, 2.0))
    assert inputs.add(first, 0, "old", 1e9) == [[(0, "old")]]
    assert inputs.add(first, 1, "old", 0) == []
    assert inputs.add(second, 0, "new", 1e9) == [[(0, "new")]]
    assert inputs.add(second, 1, "new", 0) == []
    assert inputs.add(second, 2, "new", 0) == [[(1, "new"), (2, "new")]]


def test_inputs_may_be_forgotten_while_one_is_added():
    """A run that ends forgets its inputs, in another thread."""

    class Number(int):
        def __hash__(self) -> int:
            inputs.clear()
            return hash(int(self))

    inputs = TaskInputs()
    assert inputs.add(Execution("task", 1.0, 1), Number(5), "data", 0) == [[(5, "data")]]


def test_an_input_measured_anew_keeps_its_group():
    """Rows would count twice, or get lost, if two attempts formed different groups."""
    inputs = TaskInputs()
    first, second = (Execution("task", start_s, 3) for start_s in (1.0, 2.0))
    assert inputs.add(first, 0, "old", 1e9) == [[(0, "old")]]
    assert inputs.add(first, 1, "old", 0) == []
    assert inputs.add(second, 0, "new", 0) == [[(0, "new")]]
    assert inputs.add(second, 1, "new", 1e9) == []
    assert inputs.add(second, 2, "new", 0) == [[(1, "new"), (2, "new")]]
