"""Gives a worker the store back that it had, with everything that ours has by then.

What is not in memory goes from our files to Dask's beside the event loop, one value at a time,
while tasks go on; each of our files goes before the next value is written, so no more than one of
them is on disk twice. What is in memory is handed over by reference in the end, in one step of the
event loop, so that the worker has the one store or the other. Which store a worker uses is
changed in `plugins.patches.worker_memory`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable, MutableMapping
from typing import Any

from dask_gpurt.devices.lanes import Lane
from dask_gpurt.memory.store import TieredStore
from dask_gpurt.plugins.patches import worker_memory

logger = logging.getLogger("dask_gpurt.memory")

#: So often what left memory meanwhile is handed over beside the loop. It need not come to an end by
#: itself: tasks that go on put other values out.
_MAX_ROUNDS = 8

#: Keys to the serial numbers of the values that were handed over under them.
Returned = dict[Hashable, int]


async def return_spilled(
    store: TieredStore,
    stock: MutableMapping[Any, Any],
    lane: Lane,
    inherited_level: int,
    is_over: Callable[[], bool] = lambda: False,
) -> Returned:
    """Hand over what is not in memory, until next to all that is left is.

    Parameters
    ----------
    lane
        What writes and drops values: whatever was begun before is done when this is.
    inherited_level
        Where values lie as the worker's own store left them. It has those.
    is_over
        Whether nobody has a use for the rest, because the worker closes.
    """
    given = store.copies_at(inherited_level)
    for _ in range(_MAX_ROUNDS):
        rest = {key: n for key, n in store.spilled().items() if given.get(key) != n}
        if not rest:
            break
        for key, serial in rest.items():
            if is_over():
                return given
            # One a job: what a job lets go of is dropped after it, and before the next.
            job = lane.submit(_return, store, stock, key, serial, inherited_level)
            if await asyncio.wrap_future(job):
                given[key] = serial
    return given


def _return(
    store: TieredStore,
    stock: MutableMapping[Any, Any],
    key: Hashable,
    serial: int,
    inherited_level: int,
) -> bool:
    """Hand over a value that is not in memory; False if that cannot be done now."""
    try:
        worker_memory.put_on_disk(stock, key, store[key])
        if key in worker_memory.on_disk(stock):
            store.add_copy_at(inherited_level, key, serial)
    except Exception:
        # Released meanwhile, or lost, of which the store tells by itself. Or memory or descriptors
        # are short, and in the end there may be some.
        return False
    return True


def return_in_memory(store: TieredStore, stock: MutableMapping[Any, Any], given: Returned) -> None:
    """Hand over what is in memory, and take back what was released meanwhile.

    What leaves memory while this goes on is handed over all the same. Moves no bytes of ours but
    those of the few values that left it since `return_cold` looked last.
    """
    held, serials = store.contents()
    for key in [key for key in stock if key not in serials]:
        del stock[key]
    rest = {key: n for key, n in serials.items() if given.get(key) != n}
    for key, value in held.items():
        if key in rest:
            stock[key] = value
    for key in [key for key in rest if key not in held]:
        try:
            worker_memory.put_on_disk(stock, key, store[key])
        except KeyError:
            pass  # released meanwhile, or lost
        except Exception as error:
            # As text: the error holds the value.
            logger.error(
                "%r cannot be handed over (%s); it is lost, or is computed again if a task made it",
                key,
                error,
            )
            store.mark_lost(key)
            if key in stock:  # a value before it
                del stock[key]
