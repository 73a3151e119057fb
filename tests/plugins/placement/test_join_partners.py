"""The graph ahead of a task says whether its output will be joined with others."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dask_gpurt.plugins.placement.join_partners import MAX_CHAIN, MIN_JOIN_NBYTES, JoinPartners

UNKNOWN = 0


class Task(SimpleNamespace):
    """A task of a scheduler, as far as these functions read it."""

    __hash__ = object.__hash__


def task(*dependencies, nbytes=MIN_JOIN_NBYTES):
    made = Task(dependencies=set(dependencies), dependents=set(), nbytes=nbytes)
    for one in dependencies:
        one.dependents.add(made)
    return made


@pytest.fixture
def partners():
    return JoinPartners(lambda ts: ts.nbytes)


def test_outputs_without_a_join_are_told(partners):
    alone, passed_on = task(), task()
    task(passed_on)
    assert not partners.may_be_joined(alone)
    assert not partners.may_be_joined(passed_on)


@pytest.mark.parametrize("nbytes", [UNKNOWN, MIN_JOIN_NBYTES])
def test_a_join_a_few_tasks_later_counts(partners, nbytes):
    first = task(nbytes=nbytes)
    slice_ = task(first, nbytes=nbytes)
    task(slice_, task())
    assert partners.may_be_joined(first)


def test_joins_of_small_parts_do_not_count(partners):
    first = task()
    task(task(first, nbytes=MIN_JOIN_NBYTES - 1), task())
    assert not partners.may_be_joined(first)


def test_a_chain_beyond_the_search_may_be_joined(partners):
    last = first = task()
    for _ in range(MAX_CHAIN):
        last = task(last)
    assert partners.may_be_joined(first)
