"""The store has the same values as a dict, also in each known race."""

from __future__ import annotations

import threading

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import invariant, rule

from dask_gpurt.memory.store import HOST
from tests.memory.against_a_dict import KEYS, AgainstADict
from tests.memory.store_setup import Setup, filled


def test_value_is_reachable_at_every_step_of_a_spill_and_read():
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


def test_measured_size_is_reused():
    setup = Setup()
    setup.store.measured["a"] = 33
    setup.store["a"] = b"a" * 40
    assert setup.residency.values["a"].nbytes == 33
    # The measured size applies only once, because the next value of the key may differ.
    setup.store["a"] = b"a" * 40
    assert setup.residency.values["a"].nbytes == 40


def test_insertion_never_waits_and_lookup_moves_nothing():
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


def test_value_replaced_during_its_write_is_the_new_one():
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


def test_value_deleted_after_its_copy_leaves_nothing():
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


def test_value_deleted_during_its_read_frees_its_room():
    setup = Setup()
    filled(setup, *"abc")
    told = []
    claim, ready = setup.store.claim("task", ["a"], 0, (), told.append)
    assert not ready
    while not setup.read.calls:
        setup.lanes[0].step()
    del setup.store["a"]
    setup.settle()
    # The task may begin, and then gets an error because its input was released.
    assert told == [set()]
    with pytest.raises(KeyError):
        setup.store["a"]
    setup.store.end(claim)
    assert setup.residency.levels[0].reserved_nbytes == 0


def test_two_messages_share_one_read():
    setup = Setup()
    filled(setup, *"abc")
    assert setup.store.is_spilled("a")
    loans = [setup.store.read_for_send("a"), setup.store.read_for_send("a")]
    assert loans[0] is not None
    assert setup.residency.levels[0].reserved_nbytes == 40
    assert setup.store["a"] is setup.store["a"]
    # Sending does not restore the value to memory.
    assert setup.store.is_spilled("a")
    setup.store.end_send(loans[0])
    assert setup.store["a"] == b"a" * 40
    setup.store.end_send(loans[1])
    assert setup.store.read_for_send("gone") is None
    assert setup.residency.levels[0].reserved_nbytes == 0


def test_inputs_of_running_tasks_stay():
    setup = Setup()
    filled(setup, "a")
    claim, ready = setup.store.claim("task", ["a"], 0, (), lambda lost: None)
    assert ready
    filled(setup, *"bcd")
    assert "a" in setup.store.memory
    setup.store.end(claim)
    filled(setup, "e")
    assert setup.store.is_spilled("a") or setup.store.is_spilled("b")


def test_seceded_task_reserves_no_room():
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


def test_store_follows_the_eviction_protocol_of_dask():
    setup = Setup()
    filled(setup, *"ab")
    assert setup.store.fast
    assert setup.store.evict() == 40
    setup.settle()
    assert setup.store.spilled_total == (40, 40)
    assert setup.store.evict() == 40
    setup.settle()
    assert not setup.store.fast
    assert setup.store.evict() == -1


def test_explain_and_report_agree_with_the_store():
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


def test_explain_gives_the_reason_in_a_sentence():
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


def test_pop_is_refused_as_in_dask():
    with pytest.raises(NotImplementedError, match="del"):
        Setup().store.pop("a")


def test_cleared_store_goes_on():
    setup = Setup()
    for names in ("abcd", "efgh"):
        filled(setup, *names)
        assert setup.store.disk
        assert setup.store.spilled_total.memory > 0 < setup.store.spilled_total.disk
        setup.store.clear()
        setup.settle()
        assert len(setup.store) == 0
        assert setup.tiers[0].used_nbytes == 0


def test_store_closed_with_moves_in_flight_is_empty():
    setup = Setup()
    for key in "abcdef":
        setup.store[key] = key.encode() * 40
    setup.owner.step()
    setup.store.close()
    setup.store.free_tiers()
    setup.settle()
    assert setup.tiers[0].used_nbytes == 0


@pytest.mark.parametrize("is_begun", [False, True])
def test_store_closed_during_reads_loses_no_value(is_begun, caplog):
    setup = Setup()
    filled(setup, *"abcd")
    setup.store.claim("task", ["a"], 0, (), lambda lost: None)
    while not setup.read.calls:
        setup.lanes[0].step()

    def close():
        setup.store.close()
        setup.store.free_tiers()

    if is_begun:
        get = setup.tiers[0]._tier.get
        setup.tiers[0]._tier.get = lambda place: (close(), get(place))
        setup.settle()
    else:
        close()
        setup.settle()
    assert setup.store.read_for_send("b") is None
    setup.settle()
    # Values of a closed store are not lost: its owner has taken them, or does not need them.
    assert not setup.lost
    assert {"a", "b"} <= set(setup.store)
    assert not caplog.messages


def test_store_closed_during_a_send_loses_no_value(caplog):
    setup = Setup()
    filled(setup, *"abc")
    get = setup.tiers[0]._tier.get

    def close_and_get(place):
        setup.store.close()
        setup.store.free_tiers()
        return get(place)

    setup.tiers[0]._tier.get = close_and_get
    assert setup.store.read_for_send("a") is None
    setup.settle()
    assert not setup.lost
    assert "a" in setup.store
    assert not caplog.messages


class Bytes(AgainstADict):
    """Random operations and a random order of lane calls; values equal those of a dict."""

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
