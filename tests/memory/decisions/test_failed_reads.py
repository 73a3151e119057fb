"""When what cannot be read is given up, and when it is forgotten that it could not be."""

from __future__ import annotations

import errno

import pytest

from dask_gpurt.memory.decisions.failed_reads import FORGET_S, FailedReads, is_short
from dask_gpurt.memory.decisions.residency import Value


def value(serial):
    return Value(f"key {serial}", serial, top_level=0, nbytes=10, last_used=0)


def test_what_has_waited_longest_comes_first():
    failed_reads = FailedReads()
    first, second = value(1), value(2)
    failed_reads.add(first, "too large")
    assert [one.waited_s(5.0) for one in failed_reads.poll(5.0)] == [0.0]
    failed_reads.add(second, "no room")
    failed_reads.add(first, "still too large")
    looked = failed_reads.poll(7.0)
    assert [(one.value, one.reason, one.waited_s(7.0)) for one in looked] == [
        (first, "still too large", 2.0),
        (second, "no room", 0.0),
    ]
    failed_reads.remove(first)
    assert [one.value for one in failed_reads.poll(7.0)] == [second]


def test_what_nobody_tries_to_read_any_more_is_forgotten():
    failed_reads = FailedReads()
    for serial in (1, 2):
        failed_reads.add(value(serial), "no room")
    failed_reads.poll(0.0)
    failed_reads.add(value(2), "no room")
    assert len(failed_reads.poll(FORGET_S)) == 2
    assert [one.value.serial for one in failed_reads.poll(FORGET_S + 0.1)] == [2]


def test_who_asks_is_told_once_that_waiting_is_over():
    failed_reads = FailedReads()
    one = value(1)
    assert not failed_reads.pop_abandoned(one)
    failed_reads.add(one, "no room")
    assert not failed_reads.pop_abandoned(one)
    failed_reads.poll(0.0)[0].is_abandoned = True
    assert failed_reads.pop_abandoned(one)
    assert not failed_reads.pop_abandoned(one)
    assert not failed_reads.poll(0.0)


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.ENOMEM, "no memory")])
def test_it_is_looked_whether_there_really_is_no_memory(error):
    assert is_short(error, 1 << 60)
    assert not is_short(error, 1 << 10)


@pytest.mark.parametrize(
    "error", [OSError(errno.EMFILE, "too many"), OSError(errno.EAGAIN, "again"), ValueError()]
)
def test_what_others_say_is_no_shortage(error):
    assert not is_short(error, 1 << 60)
