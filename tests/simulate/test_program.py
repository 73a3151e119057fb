"""Programs check their parts, and know when a client releases a result."""

from __future__ import annotations

import pytest

from dask_gpurt.errors import WorkloadError
from dask_gpurt.simulate.program import ExchangeModel, ProgramModel, Submission, next_uses
from tests.simulate.flat import task, workload


def test_a_workload_is_a_program_of_one_submission():
    model = workload(task("a-0"), task("b-0", 0))
    program = ProgramModel.of(model)
    assert program.submissions == (Submission((0, 1), (1,)),)
    assert program.released_after() == {0: [1]}


def test_results_are_held_while_a_submission_needs_them():
    model = workload(task("a-0"), task("b-0", 0), task("c-0", 0), wanted=(0, 1, 2))
    program = ProgramModel(
        model, (Submission((0,), (0,)), Submission((1,), (1,), (0,)), Submission((2,), (2,), (0,)))
    )
    assert program.released_after() == {2: [0, 2], 1: [1]}


@pytest.mark.parametrize(
    ("submissions", "exchanges", "said"),
    [
        ([Submission((0,), (0,))], [], "exactly one submission"),
        ([Submission((0, 1), (1,)), Submission((1,), (1,))], [], "exactly one submission"),
        ([Submission((1,), (1,)), Submission((0,), (0,))], [], "submitted later"),
        ([Submission((0,), (0,), (1,)), Submission((1,), (1,))], [], "waits for a later one"),
        ([Submission((0,), (1,)), Submission((1,), ())], [], "wants a task of another one"),
        ([Submission((0, 1), (1,))], [ExchangeModel((0,), 1, (), 8)], "has no outputs"),
        ([Submission((0, 1), (1,))], [ExchangeModel((0,), 1, (2,), 8)], "not there"),
    ],
)
def test_impossible_programs_are_refused(submissions, exchanges, said):
    model = workload(task("a-0"), task("b-0", 0))
    with pytest.raises(WorkloadError, match=said):
        ProgramModel(model, tuple(submissions), tuple(exchanges))


def test_next_uses_name_the_dependents_from_the_last():
    model = workload(task("a-0"), task("b-0", 0, 0), task("c-0", 1, 0))
    assert next_uses(model) == [[2, 1], [2], []]
