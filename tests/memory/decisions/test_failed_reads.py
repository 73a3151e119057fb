"""Failed reads are retried, abandoned and forgotten at the right times."""

from __future__ import annotations

import errno

import pytest

from dask_gpurt.memory.decisions.failed_reads import FORGET_S, FailedReads, is_short
from dask_gpurt.memory.decisions.levels import Value


def value(serial):
    return Value(f"key {serial}", serial, top_level=0, nbytes=10, last_used=0)


def test_longest_waiting_read_comes_first():
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


def test_failed_read_that_is_not_retried_is_forgotten():
    failed_reads = FailedReads()
    for serial in (1, 2):
        failed_reads.add(value(serial), "no room")
    failed_reads.poll(0.0)
    failed_reads.add(value(2), "no room")
    assert len(failed_reads.poll(FORGET_S)) == 2
    assert [one.value.serial for one in failed_reads.poll(FORGET_S + 0.1)] == [2]


def test_end_of_waiting_is_reported_once():
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
def test_memory_error_counts_only_if_memory_is_really_short(error):
    assert is_short(error, 1 << 60)
    assert not is_short(error, 1 << 10)


@pytest.mark.parametrize(
    "error", [OSError(errno.EMFILE, "too many"), OSError(errno.EAGAIN, "again"), ValueError()]
)
def test_other_errors_are_no_lack_of_memory(error):
    assert not is_short(error, 1 << 60)
