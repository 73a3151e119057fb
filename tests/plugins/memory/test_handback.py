"""All values return to Dask's store, including those that are spilled meanwhile."""

from __future__ import annotations

import asyncio
import errno
import os

import pytest
from distributed.spill import SpillBuffer

from dask_gpurt.devices.lanes import Lane
from dask_gpurt.errors import DamagedValueError
from dask_gpurt.memory.decisions.eviction_policy import POLICIES
from dask_gpurt.memory.decisions.levels import Level
from dask_gpurt.memory.decisions.residency import Residency
from dask_gpurt.memory.files.disk_tier import DiskTier
from dask_gpurt.memory.files.inherited import InheritedTier
from dask_gpurt.memory.store import TieredStore
from dask_gpurt.memory.tiers import Lanes, Packing
from dask_gpurt.plugins.memory.handback import return_in_memory, return_spilled
from dask_gpurt.plugins.patches import worker_memory
from tests.memory.stepping import ListLane
from tests.memory.store_setup import Setup, filled, flatten, restore, sizeof


class Stock(dict):
    """A slow store: our lanes continue while it accepts a value."""

    def __init__(self, meanwhile):
        super().__init__()
        self._meanwhile = meanwhile

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        self._meanwhile()


def contents(*keys):
    return {key: key.encode() * 40 for key in keys}


def test_values_spilled_before_the_handback_are_handed_over():
    setup = Setup()
    filled(setup, "a", "b", "c")
    assert setup.store.spilled()
    stock = Stock(lambda: None)
    return_in_memory(setup.store, stock, {})
    assert stock == contents("a", "b", "c")


def test_values_spilled_during_the_handback_are_handed_over():
    setup = Setup()
    for key in "abcd":
        setup.store[key] = key.encode() * 40
    assert not setup.store.spilled()
    stock = Stock(setup.settle)
    return_in_memory(setup.store, stock, {})
    assert setup.store.spilled()
    assert stock == contents("a", "b", "c", "d")


def test_repeated_handback_skips_known_and_removes_released():
    setup = Setup()
    filled(setup, "a", "b")
    given = dict(setup.store.contents()[1])
    stock = Stock(lambda: None)
    stock.update(a=b"as it was given", b=b"as it was given", gone=b"released")
    setup.store["b"] = b"b" * 40
    return_in_memory(setup.store, stock, given)
    assert stock == {"a": b"as it was given", "b": b"b" * 40}


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.EMFILE, "too many open files")])
def test_temporarily_unreadable_value_is_not_lost(error):
    setup = Setup()
    filled(setup, *"abcd")
    stock = {}
    setup.tiers[0].fail("get", error)
    with Lane("write") as lane:
        given = asyncio.run(return_spilled(setup.store, stock, lane, -1))
    return_in_memory(setup.store, stock, given)
    assert stock == contents(*"abcd")
    assert not setup.lost


def test_only_permanently_unreadable_values_are_lost():
    setup = Setup()
    filled(setup, *"abcd")
    stock = {"a": b"a value before"}
    damaged, *_ = setup.store.spilled()
    setup.tiers[0].fail("get", DamagedValueError("checksum"))
    with Lane("write") as lane:
        given = asyncio.run(return_spilled(setup.store, stock, lane, -1))
    return_in_memory(setup.store, stock, given)
    setup.settle()
    assert setup.lost == [damaged] == ["a"]
    assert stock == contents(*"bcd")


def test_value_unreadable_until_the_end_is_lost(caplog):
    setup = Setup()
    filled(setup, *"abcd")
    stock = {"a": b"a value before"}
    assert "a" in setup.store.spilled()
    read_through = setup.store._carrier.read_through

    def short(key):
        if key == "a":
            raise MemoryError("no room")
        return read_through(key)

    setup.store._carrier.read_through = short
    with Lane("write") as lane:
        given = asyncio.run(return_spilled(setup.store, stock, lane, -1))
    return_in_memory(setup.store, stock, given)
    setup.settle()
    assert setup.lost == ["a"]
    assert stock == contents(*"bcd")
    assert [record.levelname for record in caplog.records] == ["ERROR"]


class OnDisk:
    """A store with `room_nbytes` of memory and a disk tier, which replaced Dask's store."""

    INHERITED = 2

    def __init__(self, directory, lane, room_nbytes=0):
        self.lane = lane
        self.stock = SpillBuffer(str(directory / "stock"), target=1 << 30)
        self.disk = DiskTier(str(directory), None, None)
        self.lost, self.read, self.owner = [], ListLane(), ListLane()
        levels = [Level("memory", room_nbytes), Level("disk"), Level("inherited")]
        self.residency = Residency(levels, {0: (1, self.INHERITED)}, POLICIES["lru"])
        self.store = TieredStore(
            self.residency,
            [self.disk, InheritedTier(worker_memory.on_disk(self.stock), flatten)],
            [Packing(sizeof, flatten, restore)],
            Lanes(self._write, self.read, self.owner, self.owner),
            on_lost=self.lost.append,
        )

    def _write(self, call, path="", nbytes=0):
        self.lane.submit(call)

    def fill(self, values):
        for key, value in values.items():
            self.store[key] = value
            self.settle()
        assert set(self.store.spilled()) == set(values)

    def settle(self):
        """Run all moves that were decided, and those that follow from them."""
        self.lane.submit(int).result()
        while self.owner.calls:
            self.owner.step()
            self.lane.submit(int).result()

    def give_back(self, meanwhile=lambda key: None):
        """Hand all values over as a worker does; call `meanwhile` just before each."""
        put_on_disk = worker_memory.put_on_disk

        def watched(stock, key, value):
            meanwhile(key)
            put_on_disk(stock, key, value)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(worker_memory, "put_on_disk", watched)
            given = asyncio.run(return_spilled(self.store, self.stock, self.lane, self.INHERITED))
        self.lane.submit(int).result()
        return given


def stored_nbytes(directory):
    return sum(
        os.path.getsize(os.path.join(folder, name))
        for folder, _, names in os.walk(directory)
        for name in names
    )


def test_at_most_one_value_is_on_disk_twice(tmp_path):
    values = {key: os.urandom(100_000) for key in "abcdefghij"}
    with Lane("write") as lane:
        setup = OnDisk(tmp_path, lane)
        setup.fill(values)
        before_nbytes = stored_nbytes(tmp_path)
        taken = []
        given = setup.give_back(lambda key: taken.append(stored_nbytes(tmp_path)))
        assert set(given) == set(values)
        assert max(taken) < before_nbytes + 20_000
        # A reader finds the value meanwhile, in one store or the other.
        assert {key: setup.store[key] for key in values} == values
        return_in_memory(setup.store, setup.stock, given)
        assert set(setup.stock.disk) == set(values)
        assert dict(setup.stock) == values
    assert not setup.lost


def test_handback_keeps_a_value_that_is_being_read(tmp_path):
    values = {key: os.urandom(1000) for key in "ab"}
    with Lane("write") as lane:
        setup = OnDisk(tmp_path, lane, room_nbytes=1000)
        setup.fill({**values, "c": os.urandom(2000)})
        setup.store.claim("task", ["a"], 0, (), lambda lost: None)
        setup.settle()
        assert len(setup.read.calls) == 1
        setup.give_back()
        setup.read.step()
        assert setup.store.memory["a"] == values["a"]
    assert not setup.lost


def test_handed_over_values_may_be_released_or_replaced(tmp_path):
    with Lane("write") as lane:
        setup = OnDisk(tmp_path, lane)
        setup.fill({key: key.encode() * 1000 for key in "abc"})
        given = setup.give_back()
        del setup.store["a"]
        setup.store["b"] = b"new" * 1000
        setup.settle()
        assert set(worker_memory.on_disk(setup.stock)) == {"c"}
        return_in_memory(setup.store, setup.stock, given)
        assert dict(setup.stock) == {"b": b"new" * 1000, "c": b"c" * 1000}
    assert not setup.lost
