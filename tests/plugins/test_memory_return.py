"""What leaves memory in the last moment is handed over, too: lanes do not stop for that."""

from __future__ import annotations

import asyncio
import errno

import pytest

from dask_gpurt.devices.lanes import Lane
from dask_gpurt.errors import DamagedValueError
from dask_gpurt.plugins.memory_return import return_cold, return_rest
from tests.memory.test_store import Setup, filled


class Stock(dict):
    """A store that takes its time: our lanes go on while it takes a value."""

    def __init__(self, meanwhile):
        super().__init__()
        self._meanwhile = meanwhile

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        self._meanwhile()


def contents(*keys):
    return {key: key.encode() * 40 for key in keys}


def test_values_that_left_since_anybody_looked_are_handed_over():
    setup = Setup()
    filled(setup, "a", "b", "c")
    assert setup.store.cold()
    stock = Stock(lambda: None)
    return_rest(setup.store, stock, {})
    assert stock == contents("a", "b", "c")


def test_values_that_leave_meanwhile_are_handed_over():
    setup = Setup()
    for key in "abcd":
        setup.store[key] = key.encode() * 40
    assert not setup.store.cold()
    stock = Stock(setup.settle)
    return_rest(setup.store, stock, {})
    assert setup.store.cold()
    assert stock == contents("a", "b", "c", "d")


def test_what_was_handed_over_before_is_left_and_what_was_released_since_is_taken_back():
    setup = Setup()
    filled(setup, "a", "b")
    given = dict(setup.store.contents()[1])
    stock = Stock(lambda: None)
    stock.update(a=b"as it was given", b=b"as it was given", gone=b"released")
    setup.store["b"] = b"b" * 40
    return_rest(setup.store, stock, given)
    assert stock == {"a": b"as it was given", "b": b"b" * 40}


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.EMFILE, "too many open files")])
def test_what_cannot_be_read_for_a_moment_is_not_lost(error):
    setup = Setup()
    filled(setup, *"abcd")
    stock = {}
    setup.tiers[0].fail("get", error)
    with Lane("write") as lane:
        given = asyncio.run(return_cold(setup.store, stock, lane, -1))
    return_rest(setup.store, stock, given)
    assert stock == contents(*"abcd")
    assert not setup.lost


def test_what_can_never_be_read_is_lost_and_nothing_else():
    setup = Setup()
    filled(setup, *"abcd")
    stock = {"a": b"a value before"}
    damaged, *_ = setup.store.cold()
    setup.tiers[0].fail("get", DamagedValueError("checksum"))
    with Lane("write") as lane:
        given = asyncio.run(return_cold(setup.store, stock, lane, -1))
    return_rest(setup.store, stock, given)
    setup.settle()
    assert setup.lost == [damaged] == ["a"]
    assert stock == contents(*"bcd")


def test_what_cannot_be_read_until_the_end_is_lost(caplog):
    setup = Setup()
    filled(setup, *"abcd")
    stock = {"a": b"a value before"}
    assert "a" in setup.store.cold()
    read_through = setup.store._carrier.read_through

    def short(key):
        if key == "a":
            raise MemoryError("no room")
        return read_through(key)

    setup.store._carrier.read_through = short
    with Lane("write") as lane:
        given = asyncio.run(return_cold(setup.store, stock, lane, -1))
    return_rest(setup.store, stock, given)
    setup.settle()
    assert setup.lost == ["a"]
    assert stock == contents(*"bcd")
    assert [record.levelname for record in caplog.records] == ["ERROR"]
