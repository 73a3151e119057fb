"""The store against a dict, and its races one by one.

Lanes are lists that the test steps through, so every order of writes, reads and decisions can be
had, and the same one again.
"""

from __future__ import annotations

import threading
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import invariant, rule

from dask_gpurt.devices.host_memory.pinned import PinnedPool
from dask_gpurt.errors import DamagedValueError, TierFullError
from dask_gpurt.frames.flat.values import Flat
from dask_gpurt.memory.decisions.eviction_policy import POLICIES
from dask_gpurt.memory.decisions.residency import MAX_MOVES, Level, Residency
from dask_gpurt.memory.host_tiers import PinnedTier
from dask_gpurt.memory.store import HOST, TieredStore
from dask_gpurt.memory.tiers import Lanes, Packing
from tests.memory.against_a_dict import KEYS, AgainstADict
from tests.memory.stepping import FailingTier, ListLane


def flatten(value):
    if isinstance(value, threading.Event):
        raise TypeError("cannot pickle an event")
    return Flat(b"bytes", (np.frombuffer(value, dtype=np.uint8),))


def restore(header, buffers):
    assert header == b"bytes"
    return buffers[0].tobytes()


def sizeof(value):
    return len(value) if isinstance(value, bytes) else 1000


class Setup:
    """A store of `capacity` bytes over one or more tiers, and its lanes."""

    def __init__(self, capacity=100, n_tiers=1, tier_nbytes=None, **options):
        self.write, self.read, self.owner, self.later = (ListLane() for _ in range(4))
        self.lost = []
        self.tiers = [
            FailingTier(PinnedTier(PinnedPool((tier_nbytes or 1 << 20), block_nbytes=10)))
            for _ in range(n_tiers)
        ]
        levels = [Level("memory", capacity)]
        for number in range(n_tiers):
            # The last tier is limited by itself alone.
            levels.append(Level(f"tier {number}", 60 if number < n_tiers - 1 else None))
        self.residency = Residency(levels, {0: tuple(range(1, n_tiers + 1))}, POLICIES["lru"])
        self.store = TieredStore(
            self.residency,
            self.tiers,
            [Packing(sizeof, flatten, restore)],
            Lanes(self.write, self.read, self.owner, self.later),
            on_lost=self.lost.append,
            **options,
        )

    @property
    def lanes(self):
        lanes = (self.owner, self.write, self.read, self.later)
        return [lane for lane in lanes if lane.calls]

    def settle(self):
        while lanes := self.lanes:
            lanes[0].step()


def filled(setup, *keys, nbytes=40):
    for key in keys:
        setup.store[key] = key.encode() * nbytes
        setup.settle()


def test_a_value_is_reachable_at_every_step_of_its_way_down_and_up():
    setup = Setup()
    store = setup.store
    for key in "abc":
        store[key] = key.encode() * 40
    told = []
    claim = None
    for _ in range(100):
        for key in "abc":
            assert store[key] == key.encode() * 40
            assert key in store
        if setup.lanes:
            setup.lanes[0].step()
        elif claim is None:
            assert store.is_spilled("a")
            claim, ready = store.claim("task", ["a"], 0, (), told.append)
            assert not ready
    assert told == [set()]
    assert "a" in store.memory


def test_what_was_measured_is_not_measured_again():
    setup = Setup()
    setup.store.measured["a"] = 33
    setup.store["a"] = b"a" * 40
    assert setup.residency.values["a"].nbytes == 33
    # Once: the next value of that key is another.
    setup.store["a"] = b"a" * 40
    assert setup.residency.values["a"].nbytes == 40


def test_insertion_never_waits_and_asking_moves_nothing():
    setup = Setup()
    for key in "abcdef":
        setup.store[key] = key.encode() * 40
    assert len(setup.store.memory) == 6
    assert setup.owner.calls
    assert not setup.write.calls
    setup.settle()
    before = dict(setup.store.memory)
    assert len(setup.store) == 6
    assert list(setup.store) == list("abcdef")
    assert "a" in setup.store
    assert "x" not in setup.store
    assert setup.store.memory == before
    assert not setup.lanes


def test_deleted_while_it_is_written():
    setup = Setup()
    for key in "abc":
        setup.store[key] = key.encode() * 40
    setup.owner.step()
    assert setup.write.calls
    del setup.store["a"]
    setup.store["a"] = b"new"
    setup.settle()
    assert setup.store["a"] == b"new"
    assert setup.tiers[0].used_nbytes == setup.residency.levels[1].used_nbytes


def test_deleted_between_the_copy_and_the_books():
    setup = Setup()
    for key in "abc":
        setup.store[key] = key.encode() * 40
    setup.owner.step()
    tier = setup.tiers[0]
    put = tier._tier.put

    def put_and_delete(flat):
        place = put(flat)
        if "a" in setup.store:
            del setup.store["a"]
        return place

    tier._tier.put = put_and_delete
    setup.settle()
    assert "a" not in setup.store
    assert setup.tiers[0].used_nbytes == setup.residency.levels[1].used_nbytes


def test_deleted_while_it_is_read():
    setup = Setup()
    filled(setup, *"abc")
    told = []
    claim, ready = setup.store.claim("task", ["a"], 0, (), told.append)
    assert not ready
    while not setup.read.calls:
        setup.lanes[0].step()
    del setup.store["a"]
    setup.settle()
    # The task is told that it may begin, and finds out by itself that its input was released.
    assert told == [set()]
    with pytest.raises(KeyError):
        setup.store["a"]
    setup.store.end(claim)
    assert setup.residency.levels[0].reserved_nbytes == 0


def test_two_messages_borrow_one_read():
    setup = Setup()
    filled(setup, *"abc")
    assert setup.store.is_spilled("a")
    loans = [setup.store.read_for_send("a"), setup.store.read_for_send("a")]
    assert loans[0] is not None
    assert setup.residency.levels[0].reserved_nbytes == 40
    assert setup.store["a"] is setup.store["a"]
    # Sending does not bring it home.
    assert setup.store.is_spilled("a")
    setup.store.end_send(loans[0])
    assert setup.store["a"] == b"a" * 40
    setup.store.end_send(loans[1])
    assert setup.store.read_for_send("gone") is None
    assert setup.residency.levels[0].reserved_nbytes == 0


def test_running_inputs_stay():
    setup = Setup()
    filled(setup, "a")
    claim, ready = setup.store.claim("task", ["a"], 0, (), lambda lost: None)
    assert ready
    filled(setup, *"bcd")
    assert "a" in setup.store.memory
    setup.store.end(claim)
    filled(setup, "e")
    assert setup.store.is_spilled("a") or setup.store.is_spilled("b")


def test_a_seceded_task_keeps_no_room():
    setup = Setup()
    claim, _ = setup.store.claim("parent", [], 90, (1,), lambda lost: None)
    told = []
    child, ready = setup.store.claim("child", [], 90, (2,), told.append)
    assert not ready
    setup.store.end(claim)
    setup.settle()
    assert told == [set()]
    setup.store.end(child)
    setup.store.end(claim)  # ending twice is no matter
    assert setup.residency.levels[0].reserved_nbytes == 0


def test_a_damaged_value_is_reported_and_gone():
    setup = Setup()
    filled(setup, *"abc")
    setup.tiers[0].fail("get", DamagedValueError("checksum"))
    told = []
    setup.store.claim("task", ["a"], 0, (), told.append)
    setup.settle()
    assert told == [{"a"}]
    assert setup.lost == ["a"]
    assert "a" not in setup.store


def test_a_damaged_value_asked_for_directly():
    setup = Setup()
    filled(setup, *"abc")
    setup.tiers[0].fail("get", DamagedValueError("checksum"))
    with pytest.raises(KeyError):
        setup.store["a"]
    setup.settle()
    assert setup.lost == ["a"]
    assert setup.store.read_for_send("a") is None


def test_no_memory_for_a_read_puts_it_off_for_a_moment():
    setup = Setup()
    filled(setup, *"abc")
    setup.tiers[0].fail("get", MemoryError())
    told = []
    setup.store.claim("task", ["a"], 0, (), told.append)
    while setup.owner.calls or setup.write.calls or setup.read.calls:
        setup.lanes[0].step()
    # Nothing else goes on that would have it tried again, and nobody asks for it.
    assert told == []
    assert len(setup.later.calls) == 1
    setup.settle()
    assert told == [set()]
    assert not setup.lost


def never_enough_memory(setup):
    def get(place):
        raise MemoryError("no room at all")

    setup.tiers[0]._tier.get = get


def step_all_but_later(setup):
    while lanes := [lane for lane in setup.lanes if lane is not setup.later]:
        lanes[0].step()


def test_a_task_whose_input_never_fits_begins_in_the_end_and_learns_why():
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


def test_a_task_whose_input_does_not_fit_waits_while_another_runs():
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


def test_a_task_that_may_wait_for_others_is_nothing_to_wait_for():
    """It may be this very task that it waits for."""
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


def test_a_message_is_told_when_a_value_is_given_up():
    setup = Setup()
    filled(setup, *"abc")
    never_enough_memory(setup)
    for is_over in (False, True, False):
        with pytest.raises(MemoryError):
            setup.store.read_for_send("a")
        assert setup.store.is_abandoned("a") == is_over
        setup.store.abandon_reads(setup.store.failed_reads(0.0))


def test_what_is_read_again_is_not_short_any_more():
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


def test_what_cannot_be_taken_apart_stays_and_the_others_leave():
    setup = Setup(capacity=1100)
    setup.store["event"] = threading.Event()
    for number in range(10):
        setup.store[number] = b"x" * 40
        setup.settle()
    assert "event" in setup.store.memory
    assert setup.residency.levels[0].used_nbytes <= 1100


def test_what_cannot_be_taken_apart_is_tried_and_told_of_once(caplog):
    setup = Setup(capacity=1100, n_tiers=3)
    setup.store["event"] = threading.Event()
    for number in range(10):
        setup.store[number] = b"x" * 40
        setup.store.evict()
        setup.settle()
    assert "event" in setup.store.memory
    assert ["event" in message for message in caplog.messages] == [True]
    assert setup.store.explain("event")["refused_by"] == ["tier 0", "tier 1", "tier 2"]


def test_values_are_not_taken_apart_over_and_over_for_a_full_tier():
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
    # At 1, 3 and 7 s, each time by all that could leave.
    assert 0 < len(taken_apart) <= 3 * MAX_MOVES
    (cold,) = setup.store.spilled()
    del setup.store[cold]
    setup.store.decide()
    setup.settle()
    assert setup.store.has_spilled


def test_want_of_memory_is_no_full_tier():
    setup = Setup()
    setup.tiers[0].fail("put", MemoryError())
    filled(setup, *"abc")
    assert not setup.store.has_spilled
    setup.store.retry(0.0)
    setup.store.decide()
    setup.settle()
    assert setup.store.has_spilled


def test_a_tier_that_is_full_passes_values_on():
    setup = Setup(n_tiers=2)
    setup.tiers[0]._tier.put = lambda flat: (_ for _ in ()).throw(TierFullError("full"))
    filled(setup, *"abcdef")
    assert setup.residency.levels[0].used_nbytes <= 100
    assert setup.residency.levels[2].used_nbytes > 0


def test_dasks_protocol_for_eviction():
    setup = Setup()
    filled(setup, *"ab")
    assert setup.store.fast
    assert setup.store.evict() == 40
    setup.settle()
    assert setup.store.spilled_total == (40, 40 + 5 + 5)
    assert setup.store.evict() == 40
    setup.settle()
    assert not setup.store.fast
    assert setup.store.evict() == -1


def test_explain_and_report():
    setup = Setup()
    filled(setup, *"abc")
    answer = setup.store.explain("a")
    assert list(answer["levels"]) == ["tier 0"]
    assert answer["policy"] == "lru"
    report = setup.store.report()
    assert [level["name"] for level in report["levels"]] == ["memory", "tier 0"]
    assert sum(level["values"] for level in report["levels"]) == 3
    with pytest.raises(KeyError):
        setup.store.explain("x")


def test_explain_says_why_in_a_sentence():
    setup = Setup(capacity=200_000)

    def reason(key):
        return setup.store.explain(key)["reason"]

    filled(setup, "a", nbytes=150_000)
    assert reason("a") == "there is room for it in memory"
    claim, _ = setup.store.claim("task", ["a"], 0, (), lambda lost: None)
    assert reason("a") == "running or starting tasks use it (1), so it stays in memory"
    setup.store.end(claim)
    setup.store["b"] = b"b" * 150_000
    assert reason("b") == "there is room for it in memory"
    setup.owner.step()
    assert reason("a") == "it is being copied to tier 0, to leave memory"
    setup.settle()
    assert reason("a") == "memory was needed for other values; it is loaded when a task needs it"
    claim, _ = setup.store.claim("task", ["a"], 0, (), lambda lost: None)
    while not setup.read.calls:
        setup.lanes[0].step()
    assert reason("a") == "it is being read back from tier 0"
    setup.settle()
    setup.store.end(claim)
    assert reason("a").startswith("a task that used it has just ended")
    setup.settle()
    filled(setup, "c", nbytes=10)
    assert reason("c") == "it is small, and small values leave memory last"
    setup.store["event"] = threading.Event()
    setup.residency.levels[0].capacity_nbytes = 0
    setup.store.decide()
    setup.settle()
    assert reason("event") == "nothing below memory takes a value of this kind"


def test_pop_is_refused_as_in_stock():
    with pytest.raises(NotImplementedError, match="del"):
        Setup().store.pop("a")


def test_closed_with_work_under_way():
    setup = Setup()
    for key in "abcdef":
        setup.store[key] = key.encode() * 40
    setup.owner.step()
    setup.store.close()
    setup.store.clear()
    setup.settle()
    assert setup.tiers[0].used_nbytes == 0


@pytest.mark.parametrize("is_begun", [False, True])
def test_closed_while_values_are_read(is_begun, caplog):
    setup = Setup()
    filled(setup, *"abcd")
    setup.store.claim("task", ["a"], 0, (), lambda lost: None)
    while not setup.read.calls:
        setup.lanes[0].step()

    def close():
        setup.store.close()
        setup.store.clear()

    if is_begun:
        get = setup.tiers[0]._tier.get
        setup.tiers[0]._tier.get = lambda place: (close(), get(place))
        setup.settle()
    else:
        close()
        setup.settle()
    assert setup.store.read_for_send("b") is None
    setup.settle()
    # Whoever closed it took what was in it, or has no use for that any more.
    assert not setup.lost
    assert {"a", "b"} <= set(setup.store)
    assert not caplog.messages


def test_closed_while_a_message_has_a_value_read(caplog):
    setup = Setup()
    filled(setup, *"abc")
    get = setup.tiers[0]._tier.get

    def close_and_get(place):
        setup.store.close()
        setup.store.clear()
        return get(place)

    setup.tiers[0]._tier.get = close_and_get
    assert setup.store.read_for_send("a") is None
    setup.settle()
    assert not setup.lost
    assert "a" in setup.store
    assert not caplog.messages


class Bytes(AgainstADict):
    """Random operations and a random order of what lanes do: values are those of a dict."""

    def __init__(self):
        super().__init__()
        self.setup = Setup(n_tiers=2, upcoming=lambda: self.soon)

    @rule(key=KEYS, value=st.binary(max_size=60))
    def put(self, key, value):
        self.setup.store[key] = value
        self.model[key] = value

    @rule(key=KEYS)
    def get(self, key):
        if key in self.model:
            assert self.setup.store[key] == self.model[key]
        else:
            with pytest.raises(KeyError):
                self.setup.store[key]

    @rule(keys=st.lists(KEYS, unique=True, max_size=3), nbytes=st.integers(0, 80))
    def claim(self, keys, nbytes):
        self.ask(keys, nbytes, HOST)

    @rule(key=KEYS)
    def read_for_send(self, key):
        self.borrow(key)

    @invariant()
    def same_keys(self):
        assert set(self.setup.store) == set(self.model)
        assert len(self.setup.store) == len(self.model)

    @invariant()
    def books_are_right(self):
        store = self.setup.store
        for key in self.model:
            assert (key in store.memory) == self.setup.residency.values[key].in_memory
        at_home = sum(len(self.model[key]) for key in store.memory)
        assert self.setup.residency.levels[0].used_nbytes == at_home
        assert self.setup.residency.levels[0].reserved_nbytes >= 0

    def teardown(self):
        self.settle()
        for key, value in self.model.items():
            assert self.setup.store[key] == value
        for number, tier in enumerate(self.setup.tiers, 1):
            assert tier.used_nbytes == self.setup.residency.levels[number].used_nbytes
        assert self.setup.residency.levels[0].reserved_nbytes == 0
        assert self.setup.residency.levels[0].leaving_nbytes == 0
        for key in list(self.model):
            del self.setup.store[key]
        self.setup.settle()
        assert all(tier.used_nbytes == 0 for tier in self.setup.tiers)


TestAgainstADict = Bytes.TestCase
TestAgainstADict.settings = settings(max_examples=300, stateful_step_count=60)
