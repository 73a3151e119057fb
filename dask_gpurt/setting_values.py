"""Values of settings: from what a user may write to what the runtime uses. Pure.

Each function gets the value of a key from `get`. It raises `ConfigError`, with the key, the value
and the valid ones, if the value is invalid. `config` knows the keys.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

from dask.utils import parse_bytes

from dask_gpurt.errors import ConfigError

#: A function that returns the value of a setting by its key.
Get = Callable[[str], Any]

AUTO: Final = "auto"
_WORDS = {"true": True, "yes": True, "on": True, "1": True}
_WORDS |= {"false": False, "no": False, "off": False, "0": False}


def flag(get: Get, key: str) -> bool:
    value = get(key)
    if isinstance(value, bool):
        return value
    try:
        return _WORDS[str(value).strip().lower()]
    except KeyError:
        raise ConfigError(f"gpurt.{key} is {value!r}; it may be true or false") from None


def choice(get: Get, key: str, allowed: Sequence[str]) -> Any:
    value = get(key)
    if value is None and "none" in allowed:
        # Dask parses the word "none" in an environment variable as None.
        return "none"
    if value not in allowed:
        raise ConfigError(f"gpurt.{key} is {value!r}; it may be {' or '.join(allowed)}")
    return value


def switch(get: Get, key: str, allowed: Sequence[str]) -> Any:
    """Return a choice. YAML reads the unquoted words "on" and "off" as truth values."""
    value = get(key)
    if isinstance(value, bool):
        return "on" if value else "off"
    return choice(get, key, allowed)


#: Messages to the scheduler hold no larger number.
_TOO_MANY_NBYTES = 1 << 63


def parsed_nbytes(value: Any) -> int:
    """Return the bytes of a number, or of a text such as `2 GiB`; 0 if it is neither."""
    # `parse_bytes` accepts the empty string and True as one byte.
    if isinstance(value, bool) or value == "":
        return 0
    try:
        return int(parse_bytes(value))
    except (ValueError, TypeError, AttributeError, OverflowError):
        return 0


def nbytes(get: Get, key: str) -> int:
    value = get(key)
    found = parsed_nbytes(value)
    if not 0 < found < _TOO_MANY_NBYTES:
        raise ConfigError(f"gpurt.{key} is {value!r}; it may be a size such as '16 MiB'")
    return found


def auto_or_nbytes(get: Get, key: str) -> int | Literal["auto"]:
    if get(key) == AUTO:
        return AUTO
    try:
        return nbytes(get, key)
    except ConfigError as error:
        raise ConfigError(f"{error}, or {AUTO!r}") from None


def optional_nbytes(get: Get, key: str) -> int | None:
    return None if get(key) is None else nbytes(get, key)


def directory(get: Get, key: str) -> str | None:
    value = get(key)
    if value is not None and not (isinstance(value, str) and value):
        raise ConfigError(f"gpurt.{key} is {value!r}; it may be a directory")
    return value


#: Numbers between 1 and this are more likely shares or percentages than sizes.
_LEAST_NBYTES = 1024


def share_or_nbytes(get: Get, key: str) -> float:
    value = get(key)
    try:
        amount = math.nan if isinstance(value, bool) else float(value)
        # Numbers from `_LEAST_NBYTES` are bytes. A number slightly above 1 is a mistaken share.
        fits = 0 < amount <= 1 or _LEAST_NBYTES <= amount < _TOO_MANY_NBYTES
    except (TypeError, ValueError):
        amount = math.nan
        with contextlib.suppress(ConfigError):
            amount = float(nbytes(get, key))
        fits = amount > 1  # `amount_nbytes` would take one byte for all of it
    if not fits:
        raise ConfigError(f"gpurt.{key} is {value!r}; it may be a share (0.3) or a size ('4 GiB')")
    return amount


def amount_nbytes(amount: float, total_nbytes: int) -> int:
    """Return the bytes that a share or a size amounts to."""
    return int(amount * total_nbytes) if amount <= 1.0 else int(amount)
