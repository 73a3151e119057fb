"""Handlers that do not keep their owner alive.

Dask caches each handler that it ever called (`functools.cache` on `distributed.core`), and a bound
method refers to its owner. A process may start many workers in turn, and a scheduler may be traced
each day. Each worker and each trace would stay in memory. Patches of stock's own handlers need
another way: `patches.connections.forget_handlers`, at the end of the runtime.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from weakref import WeakMethod

from dask_gpurt.errors import TransportError

#: A handler of distributed: a coroutine function.
Handler = Callable[..., Awaitable[Any]]


def weak_handlers(*methods: Handler, prefix: str = "") -> dict[str, Handler]:
    """Return a weak handler for each bound method, by the method's name after a prefix."""
    return {prefix + one.__name__: weak_handler(one) for one in methods}


def remove_handlers(registered: dict[str, Any], ours: Mapping[str, Handler]) -> None:
    """Remove our handlers, unless others have taken their place."""
    for name, handler in ours.items():
        if registered.get(name) is handler:
            del registered[name]


def weak_handler(method: Handler) -> Handler:
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
            raise TransportError(f"{name} has no answer: its owner is closed")
        return await found(*args, **kwargs)

    # Not `functools.wraps`, which would add a reference to the method. distributed reads both.
    handler.__name__ = name
    handler.__signature__ = inspect.signature(method)  # type: ignore[attr-defined]
    return handler
