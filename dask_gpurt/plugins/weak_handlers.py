"""Handlers that do not keep their owner alive.

Dask caches each handler that it ever called (`functools.cache` on `distributed.core`), and a bound
method refers to its owner. A process may start many workers in turn, and each would stay in memory.
`worker` registers all handlers of a worker this way. Those of the scheduler are left as they are,
since stock's own keep it.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any
from weakref import WeakMethod

from dask_gpurt.errors import TransportError


def weak_handler(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Return a coroutine function that calls a bound method as long as its owner exists.

    Raises
    ------
    TransportError
        On a call: the owner is gone.
    """
    weak, name = WeakMethod(method), method.__name__

    async def handler(*args: Any, **kwargs: Any) -> Any:
        found = weak()
        if found is None:
            raise TransportError(f"{name} has no answer: the worker is closed")
        return await found(*args, **kwargs)

    # Not `functools.wraps`, which would add a reference to the method. distributed reads both.
    handler.__name__ = name
    handler.__signature__ = inspect.signature(method)  # type: ignore[attr-defined]
    return handler
