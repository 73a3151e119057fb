"""Protection of an event loop's epoll against forked child processes.

A fork copies descriptors but not the kernel objects behind them, so both processes share one epoll.
A child that ends by `sys.exit` inside a coroutine closes its event loop. That removes the loop's
descriptors from the shared epoll, and other threads can no longer wake the parent's loop.
"""

from __future__ import annotations

import asyncio
import os
import select
import selectors
import weakref

_loops: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()


def guard(loop: asyncio.AbstractEventLoop) -> None:
    """Keep forked children from changing this loop's epoll."""
    _loops.add(loop)


def _part_from_parent() -> None:
    """Give the guarded loops of a child their own epolls with the same registrations."""
    for loop in list(_loops):
        # Loops of other libraries lack this attribute, and stay as they are.
        selector = getattr(loop, "_selector", None)
        if not isinstance(selector, selectors.EpollSelector) or loop.is_closed():
            continue
        with select.epoll() as own:
            for key in selector.get_map().values():
                wanted = select.EPOLLIN if key.events & selectors.EVENT_READ else 0
                wanted |= select.EPOLLOUT if key.events & selectors.EVENT_WRITE else 0
                own.register(key.fd, wanted)
            os.dup2(own.fileno(), selector.fileno(), inheritable=False)


os.register_at_fork(after_in_child=_part_from_parent)
