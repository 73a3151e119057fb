"""The graph ahead of a task says whether its output will be joined with others."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dask_gpurt.placement.siblings import MAX_DEPENDENTS
from dask_gpurt.plugins.placement.join_partners import MAX_CHAIN, MIN_JOIN_NBYTES, JoinPartners

UNKNOWN = 0


class Task(SimpleNamespace):
    """A task of a scheduler, as far as these functions read it."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__
    __repr__ = object.__repr__


def task(*dependencies, nbytes=MIN_JOIN_NBYTES):
    made = Task(
        dependencies=set(dependencies),
        dependents=set(),
        nbytes=nbytes,
        who_has=set(),
        processing_on=None,
        group=object(),
    )
    for one in dependencies:
        one.dependents.add(made)
    return made


def padded(block):
    """Return a block together with its own edge, as `pad` and `rechunk` make it."""
    edge = task(task(block, nbytes=8), nbytes=8)
    return task(task(block), edge)


def held_by(address, *tasks):
    worker = SimpleNamespace(address=address)
    for one in tasks:
        one.processing_on = worker


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


def test_partner_of_a_padded_block_is_the_other_operand(partners):
    left, right = task(), task()
    task(padded(left), padded(right))
    held_by("there", right)
    assert partners(left) == [{"there": MIN_JOIN_NBYTES}]
    assert partners(right) == []


@pytest.mark.parametrize(("n_more", "expected"), [(-1, [["here"]]), (0, [])])
def test_result_that_very_many_tasks_need_draws_nothing(partners, n_more, expected):
    table = task()
    held_by("here", table)
    blocks = [task() for _ in range(MAX_DEPENDENTS + 1 + n_more)]
    for block in blocks:
        task(block, table)
    assert [[*one] for one in partners(blocks[0])] == expected


def test_slices_of_different_blocks_are_partners(partners):
    left, right = task(), task()
    held_by("there", right)
    task(task(left), task(right))
    assert [[*one] for one in partners(left)] == [["there"]]
