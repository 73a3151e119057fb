"""What leaves memory in the last moment is handed over, too: lanes do not stop for that."""

from __future__ import annotations

from dask_gpurt.plugins.memory_return import return_rest
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
