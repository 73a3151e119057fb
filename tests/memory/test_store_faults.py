"""The store keeps working with damaged values, full tiers and reads without memory."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from dask_gpurt.errors import DamagedValueError, TierFullError
from dask_gpurt.memory.decisions.residency import MAX_MOVES
from tests.memory.store_setup import Setup, filled, flatten, step_all_but_later


def test_damaged_value_is_reported_and_removed():
    setup = Setup()
    filled(setup, *"abc")
    setup.tiers[0].fail("get", DamagedValueError("checksum"))
    told = []
    setup.store.claim("task", ["a"], 0, (), told.append)
    setup.settle()
    assert told == [{"a"}]
    assert setup.lost == ["a"]
    assert "a" not in setup.store


def test_direct_access_to_a_damaged_value_raises():
    setup = Setup()
    filled(setup, *"abc")
    setup.tiers[0].fail("get", DamagedValueError("checksum"))
    with pytest.raises(KeyError):
        setup.store["a"]
    setup.settle()
    assert setup.lost == ["a"]
    assert setup.store.read_for_send("a") is None


def test_read_without_memory_is_deferred():
    setup = Setup()
    filled(setup, *"abc")
    setup.tiers[0].fail("get", MemoryError())
    told = []
    setup.store.claim("task", ["a"], 0, (), told.append)
    while setup.owner.calls or setup.write.calls or setup.read.calls:
        setup.lanes[0].step()
    # No other work would cause a retry, and nobody requests the value.
    assert told == []
    assert len(setup.later.calls) == 1
    setup.settle()
    assert told == [set()]
    assert not setup.lost


def never_enough_memory(setup):
    def get(place):
        raise MemoryError("no room at all")

    setup.tiers[0]._tier.get = get


def test_task_whose_input_never_fits_starts_and_gets_the_reason():
    setup = Setup()
    filled(setup, *"abc")
    never_enough_memory(setup)
    told = []
    setup.store.claim("task", ["a"], 0, (), told.append)
    step_all_but_later(setup)
    (one,) = setup.store.failed_reads(0.0)
    assert (one.value.key, one.reason, one.n_times) == ("a", "no room at all", 1)
    setup.later.step()
    step_all_but_later(setup)
    assert one.n_times == 2
    assert told == []
    setup.store.abandon_reads(setup.store.failed_reads(1.0))
    setup.settle()
    assert told == [set()]
    with pytest.raises(MemoryError, match="no room at all"):
        setup.store["a"]
    assert not setup.lost


def test_task_whose_input_does_not_fit_waits_for_a_running_one():
    setup = Setup()
    filled(setup, *"abc")
    running, ready = setup.store.claim("other", ["c"], 0, (), lambda lost: None)
    assert ready or setup.settle() is None
    never_enough_memory(setup)
    told = []
    setup.store.claim("task", ["a"], 0, (), told.append)
    step_all_but_later(setup)
    setup.store.abandon_reads(setup.store.failed_reads(1.0))
    step_all_but_later(setup)
    assert told == []
    setup.store.end(running)
    setup.store.abandon_reads(setup.store.failed_reads(1.0))
    step_all_but_later(setup)
    assert told == [set()]


def test_task_that_waits_for_others_is_not_waited_for():
    """The outer task may be waiting for this very claim."""
    setup = Setup()
    filled(setup, *"abc")
    outer, ready = setup.store.claim("outer", ["c"], 0, (), lambda lost: None)
    assert ready or setup.settle() is None
    setup.store.may_wait(outer)
    never_enough_memory(setup)
    told = []
    setup.store.claim("inner", ["a"], 0, (), told.append)
    step_all_but_later(setup)
    setup.store.abandon_reads(setup.store.failed_reads(1.0))
    step_all_but_later(setup)
    assert told == [set()]


def test_message_gets_an_answer_when_its_value_is_abandoned():
    setup = Setup()
    filled(setup, *"abc")
    never_enough_memory(setup)
    for is_over in (False, True, False):
        with pytest.raises(MemoryError):
            setup.store.read_for_send("a")
        assert setup.store.is_abandoned("a") == is_over
        setup.store.abandon_reads(setup.store.failed_reads(0.0))


def test_successful_read_clears_the_failed_read():
    setup = Setup()
    filled(setup, *"abc")
    setup.tiers[0].fail("get", MemoryError())
    with pytest.raises(MemoryError):
        setup.store.read_for_send("a")
    assert setup.store.failed_reads(0.0)
    assert setup.store["a"] == b"a" * 40
    assert not setup.store.failed_reads(0.0)


def test_a_full_disk_keeps_values_in_memory():
    setup = Setup()
    for number in range(20):
        setup.tiers[0].fail("put", OSError("no space left on device"))
        setup.store[number] = b"x" * 40
        setup.settle()
    assert len(setup.store.memory) == 20
    setup.tiers[0].mend()
    setup.store.retry()
    setup.store.decide()
    setup.settle()
    assert setup.residency.levels[0].used_nbytes <= 100


class Panic(BaseException):
    """An error that is no Exception, as libraries in Rust raise."""


@pytest.mark.parametrize("error", [TypeError, Panic])
def test_unserializable_value_stays_and_others_are_evicted(error):
    setup = Setup(capacity=1100)
    packing = setup.store._packings[0]

    def fails(value):
        if isinstance(value, threading.Event):
            raise error
        return flatten(value)

    setup.store._packings[0] = replace(packing, flatten=fails)
    setup.store["event"] = threading.Event()
    for number in range(10):
        setup.store[number] = b"x" * 40
        setup.settle()
    assert "event" in setup.store.memory
    assert setup.residency.levels[0].used_nbytes <= 1100


def test_unserializable_value_is_tried_and_logged_once(caplog):
    setup = Setup(capacity=1100, n_tiers=3)
    setup.store["event"] = threading.Event()
    for number in range(10):
        setup.store[number] = b"x" * 40
        setup.store.evict()
        setup.settle()
    assert "event" in setup.store.memory
    assert ["event" in message for message in caplog.messages] == [True]
    assert setup.store.explain("event")["refused_by"] == ["tier 0", "tier 1", "tier 2"]


def test_full_tier_does_not_repeat_serialization():
    setup = Setup(tier_nbytes=50)
    taken_apart = []
    packing = setup.store._packings[0]
    counted = replace(packing, flatten=lambda v: (taken_apart.append(v), flatten(v))[1])
    setup.store._packings[0] = counted
    filled(setup, *"abcdef")
    del taken_apart[:]
    for look in range(100):
        setup.store.retry(look / 10)
        setup.store.decide()
        setup.settle()
    # The store retries at 1, 3 and 7 s, each time with every value that could leave.
    assert 0 < len(taken_apart) <= 3 * MAX_MOVES
    (cold,) = setup.store.spilled()
    del setup.store[cold]
    setup.store.decide()
    setup.settle()
    assert setup.store.has_spilled


def test_lack_of_memory_does_not_count_as_a_full_tier():
    setup = Setup()
    setup.tiers[0].fail("put", MemoryError())
    filled(setup, *"abc")
    assert not setup.store.has_spilled
    setup.store.retry(0.0)
    setup.store.decide()
    setup.settle()
    assert setup.store.has_spilled


def test_full_tier_passes_values_on():
    setup = Setup(n_tiers=2)
    setup.tiers[0]._tier.put = lambda flat: (_ for _ in ()).throw(TierFullError("full"))
    filled(setup, *"abcdef")
    assert setup.residency.levels[0].used_nbytes <= 100
    assert setup.residency.levels[2].used_nbytes > 0


def test_damaged_copy_in_a_tier_is_not_called_in_memory(caplog):
    """It is reported when the value is needed."""
    setup = Setup(n_tiers=2)
    setup.tiers[0].fail("get", DamagedValueError("checksum"))
    filled(setup, *"abcdefgh")
    assert "a" in setup.store and not setup.lost
    assert not caplog.messages
