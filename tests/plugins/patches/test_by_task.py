"""A fact about a task ends with the task. A later one with its key does not inherit it."""

from __future__ import annotations

import gc

from distributed.scheduler import TaskGroup, TaskPrefix, TaskState

from dask_gpurt.plugins.patches.values.by_task import ByTask


def task():
    return TaskState("x", None, "released", TaskGroup("x", TaskPrefix("x")), validate=True)


def test_an_equal_task_has_no_value():
    known, one, other = ByTask(), task(), task()
    assert one == other and not known
    assert known.set(one, "one") == "one"
    assert (known.get(one), known.get(other)) == ("one", None)
    known.drop(other)
    assert known.get(one) == "one"
    known.drop(one)
    assert known.get(one) is None and not known


def test_values_end_with_their_task():
    known, one = ByTask(), task()
    known.set(one, "one")
    del one
    gc.collect()
    assert not known


def test_a_task_that_ends_leaves_the_next_one_its_value():
    known, one, other = ByTask(), task(), task()
    known.set(one, "one")
    known.set(other, "other")
    assert (known.get(one), known.get(other)) == (None, "other")
    del one
    gc.collect()
    assert known.get(other) == "other"
    known.clear()
    assert known.get(other) is None
