"""What a forked child shares with its parent by accident, and has to let go of.

A fork copies descriptors, not what they stand for. Both processes have one epoll then. A child that
ends by `sys.exit` inside of a coroutine closes its event loop, which takes the loop's descriptors
out of that epoll, and the parent's loop is not woken by other threads any more.
"""

from __future__ import annotations

import asyncio
import os
import select
import selectors
import weakref

_loops: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()


def guard(loop: asyncio.AbstractEventLoop) -> None:
    """See to it that no forked child takes anything from this loop."""
    _loops.add(loop)


def _part_from_parent() -> None:
    """Give the guarded loops of a child an epoll of their own, with the same in it."""
    for loop in list(_loops):
        # Other loops have other names for it, and are left as they are.
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
