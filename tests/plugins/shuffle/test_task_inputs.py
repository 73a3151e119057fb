"""Inputs of one task are taken together, however often it runs."""

from __future__ import annotations

import weakref

from dask_gpurt.plugins.shuffle.frame_run import TaskInputs


def test_inputs_come_with_the_last_one_in_their_order():
    inputs = TaskInputs()
    assert inputs.add("task", 3, 8, "eight") == []
    assert inputs.add("task", 3, 4, "four") == []
    assert inputs.add("task", 3, 6, "six") == [(4, "four"), (6, "six"), (8, "eight")]


def test_tasks_do_not_mix():
    inputs = TaskInputs()
    assert inputs.add("one", 2, 0, "a") == inputs.add("other", 2, 1, "b") == []
    assert inputs.add("other", 2, 3, "d") == [(1, "b"), (3, "d")]
    assert inputs.add("alone", 1, 5, "f") == [(5, "f")]
    assert inputs.add("one", 2, 2, "c") == [(0, "a"), (2, "c")]


def test_a_task_that_failed_half_way_begins_anew():
    inputs = TaskInputs()
    assert inputs.add("task", 3, 0, "old") == inputs.add("task", 3, 1, "old") == []
    assert inputs.add("task", 3, 0, "new") == inputs.add("task", 3, 1, "new") == []
    assert inputs.add("task", 3, 2, "new") == [(0, "new"), (1, "new"), (2, "new")]


def test_a_task_may_run_again_after_its_last_input():
    inputs = TaskInputs()
    for attempt in ("first", "second"):
        assert inputs.add("task", 2, 0, attempt) == []
        assert inputs.add("task", 2, 1, attempt) == [(0, attempt), (1, attempt)]


def test_inputs_of_failed_tasks_can_be_forgotten():
    class Data:
        pass

    inputs, data = TaskInputs(), Data()
    freed = weakref.ref(data)
    assert inputs.add("task", 2, 0, data) == []
    del data
    assert freed() is not None
    inputs.clear()
    assert freed() is None
