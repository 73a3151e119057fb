"""Checks of requests to our handlers: types, ranges and sizes, before anything changes.

Any process that reaches a scheduler or worker can call a handler with any values. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dask_gpurt.errors import ProtocolError

#: Most characters in an address, a version or the id of a shuffle.
MAX_NAME = 1_000
#: Most characters in a worker's reason for not taking part.
MAX_PROBLEM = 10_000
#: Most keys in one request. A worker asks for fewer.
MAX_KEYS = 100_000
#: Deepest nesting of the tuples in a key.
_MAX_DEPTH = 32
#: Most rows in a partition: above any real count, and low enough that sums stay exact.
_MAX_ROWS = 2**48
#: Most bytes in a part of a value: more than any memory, so a real limit comes after the sum.
_MAX_NBYTES = 2**50


def name(what: str, value: Any) -> str:
    """Check a short text, such as an address."""
    if not isinstance(value, str) or len(value) > MAX_NAME:
        raise _wrong(what, value, f"a text of at most {MAX_NAME} characters")
    return value


def flag(what: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _wrong(what, value, "true or false")
    return value


def message(sender: Any, number: Any) -> None:
    """Check the sender of a message of data and its number there."""
    serial("message", number)
    if not number:
        raise _wrong("message", number, "the number of a message")
    name("sender", sender)


def serial(what: str, value: Any) -> int:
    """Check a number that counts up for as long as a process runs."""
    if type(value) is not int or not 0 <= value < 1 << 64:
        raise _wrong(what, value, "a number from 0 to 2**64 - 1")
    return value


def count(what: str, value: Any) -> int:
    """Check a number of entries."""
    if type(value) is not int or not 0 <= value <= MAX_KEYS:
        raise _wrong(what, value, f"a number from 0 to {MAX_KEYS}")
    return value


def lengths(value: Any) -> list[int]:
    """Check the bytes of each part of a value."""
    return _numbers("lengths", value, MAX_KEYS, _MAX_NBYTES)


def problem(value: Any) -> str | None:
    """Check a worker's reason for not taking part, or None."""
    if value is not None and (not isinstance(value, str) or len(value) > MAX_PROBLEM):
        raise _wrong("problem", value, f"null, or a text of at most {MAX_PROBLEM} characters")
    return value


def key(value: Any) -> Any:
    """Check the key of a task."""
    if not _is_key(value, _MAX_DEPTH):
        raise _wrong("key", value, "the key of a task")
    return value


def keys(value: Any) -> Sequence[Any]:
    """Check a list of keys."""
    if not isinstance(value, (list, tuple)) or len(value) > MAX_KEYS:
        raise _wrong("keys", value, f"a list of at most {MAX_KEYS} keys")
    for one in value:
        key(one)
    return value


def rows(value: Any, n_partitions: int) -> list[int]:
    """Check the rows of each output partition of a shuffle. Empty last partitions are omitted."""
    return _numbers("rows", value, n_partitions, _MAX_ROWS)


def _numbers(what: str, value: Any, n_most: int, largest: int) -> list[int]:
    if not isinstance(value, (list, tuple)) or len(value) > n_most:
        raise _wrong(what, value, f"a list of at most {n_most} numbers")
    for number in value:
        if type(number) is not int or not 0 <= number <= largest:
            raise _wrong(what, number, f"numbers from 0 to {largest}")
    return list(value)


def _is_key(value: Any, depth: int) -> bool:
    if isinstance(value, tuple):
        return depth > 0 and all(_is_key(one, depth - 1) for one in value)
    return isinstance(value, (str, bytes, int, float))


def _wrong(what: str, value: Any, wanted: str) -> ProtocolError:
    shown = f"of {len(value)} entries" if isinstance(value, (list, tuple, dict)) else repr(value)
    return ProtocolError(f"{what} is a {type(value).__name__} {shown[:80]}; it must be {wanted}")
