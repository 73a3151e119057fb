"""The room that failed allocations show is kept for a while, and never exceeds the limit."""

from __future__ import annotations

import pytest

from dask_gpurt.memory.decisions.learned_room import DOUBLING_S, LearnedRoom

LIMIT = 1000


def test_without_a_failure_the_limit_holds():
    assert LearnedRoom().room_nbytes(LIMIT, 5.0) == LIMIT


def test_a_failed_allocation_leaves_room_for_the_next():
    learned = LearnedRoom()
    learned.was_full(300, 40, 5.0)
    assert learned.room_nbytes(LIMIT, 5.0) == 260
    learned.was_full(260, 80, 6.0)
    assert learned.room_nbytes(LIMIT, 6.0) == 180


@pytest.mark.parametrize(("periods", "room"), [(1, 520), (2, LIMIT), (1e6, LIMIT)])
def test_the_room_grows_back(periods, room):
    learned = LearnedRoom()
    learned.was_full(300, 40, 5.0)
    assert learned.room_nbytes(LIMIT, 5.0 + periods * DOUBLING_S) == room


def test_an_allocation_larger_than_all_values_leaves_no_room():
    learned = LearnedRoom()
    learned.was_full(30, 40, 5.0)
    assert learned.room_nbytes(LIMIT, 5.0) == 0
