"""Return of all values to the store that a worker had before, when the runtime is detached.

First, spilled values move from our files to Dask's, one at a time, off the event loop and while
tasks run. Each of our files is removed before the next value is written, so at most one value is
on disk twice. Last, the values in memory are handed over by reference, in one step of the event
loop. So at any time the worker has either the one store or the other.
`plugins.patches.worker_memory` swaps the stores.
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

#: Rounds off the event loop for values that were spilled meanwhile. Without a limit there might be
#: no end: running tasks spill more values.
_MAX_ROUNDS = 8

#: Serial numbers of the values that were handed over, by key.
HandedOver = dict[Hashable, int]


async def return_spilled(
    store: TieredStore,
    stock: MutableMapping[Any, Any],
    lane: Lane,
    inherited_level: int,
    is_over: Callable[[], bool] = lambda: False,
) -> HandedOver:
    """Hand over spilled values, until nearly all values that remain are in memory.

    Parameters
    ----------
    lane
        The lane that writes and drops values. Its earlier work is complete when this returns.
    inherited_level
        Level of the values that are still where the worker's own store left them.
    is_over
        Returns whether the rest is useless, because the worker closes.
    """
    given = store.copies_at(inherited_level)
    for _ in range(_MAX_ROUNDS):
        rest = {key: n for key, n in store.spilled().items() if given.get(key) != n}
        if not rest:
            break
        for key, serial in rest.items():
            if is_over():
                return given
            # One value in each job: the copies that a job frees are dropped before the next job.
            job = lane.submit(_hand_over, store, stock, key, serial, inherited_level)
            if await asyncio.wrap_future(job):
                given[key] = serial
    return given


def _hand_over(
    store: TieredStore,
    stock: MutableMapping[Any, Any],
    key: Hashable,
    serial: int,
    inherited_level: int,
) -> bool:
    """Hand over a spilled value; return False if that is not possible now."""
    try:
        worker_memory.put_on_disk(stock, key, store[key])
        if key in worker_memory.on_disk(stock):
            store.add_copy_at(inherited_level, key, serial)
    except Exception:
        # The value was released, or was lost, which the store reports. Or memory or descriptors are
        # short: `return_in_memory` tries again.
        return False
    return True


def return_in_memory(
    store: TieredStore, stock: MutableMapping[Any, Any], given: HandedOver
) -> None:
    """Hand over the values in memory, and delete those that were released meanwhile.

    This includes values that are spilled while it runs. It reads only the few values that were
    spilled since the last round of `return_spilled`.
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
            pass  # it was released or lost
        except Exception as error:
            # Logged as text: the error holds the value.
            logger.error(
                "%r cannot be handed over (%s); it is lost, or is computed again if a task made it",
                key,
                error,
            )
            store.mark_lost(key)
            if key in stock:  # an earlier value
                del stock[key]
