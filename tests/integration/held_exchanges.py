"""Shuffles and rechunks that wait for their last input partition, and pages drawn meanwhile."""

from __future__ import annotations

import contextlib
import logging
import threading

import dask
import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
from distributed.utils_test import async_poll_for, captured_logger

N_INPUTS = 4
#: An exchange cannot end before its last input partition is there.
last_input = threading.Event()


def part(number):
    if number == N_INPUTS - 1:
        assert last_input.wait(60)
    return pd.DataFrame({"key": range(number, number + 4_000), "x": 0.5})


def shuffled(n_outputs):
    lazy = dd.from_map(part, range(N_INPUTS), meta=pd.DataFrame({"key": [0], "x": [0.5]}))
    with dask.config.set({"dataframe.shuffle.method": "p2p"}):
        return lazy.shuffle("key", npartitions=n_outputs).to_delayed()


def block(block_info=None):
    (where,) = [one["chunk-location"] for one in block_info.values()]
    if where[1] == N_INPUTS - 1:
        assert last_input.wait(60)
    return np.full((N_INPUTS * 1_000, 10), where[1], dtype=float)


def rechunked(n_outputs):
    lazy = da.map_blocks(block, chunks=((N_INPUTS * 1_000,), (10,) * N_INPUTS), dtype=float)
    # With a larger one, Dask would join the input blocks first.
    small = {"array.chunk-size": "100 KiB"}
    with dask.config.set({"array.rechunk.method": "p2p", **small}):
        height = N_INPUTS * 1_000 // n_outputs
        return list(lazy.rechunk((height, 10 * N_INPUTS)).to_delayed().ravel())


def transferred(s):
    return sum(
        task.state == "memory"
        for task in s.tasks.values()
        if task.prefix.name.endswith(("shuffle-transfer", "rechunk-transfer"))
    )


def beats(s):
    """Return the heartbeat data of all workers about the newest exchange."""
    known = [*s.extensions["shuffle"].heartbeats.values()]
    return {worker: dict(beat) for worker, beat in known[-1].items()} if known else {}


@contextlib.asynccontextmanager
async def held(c, s, outputs, has_moved):
    """Compute outputs; the body runs while they wait for their last input partition.

    Parameters
    ----------
    has_moved
        Says, given `beats`, whether enough has moved for the body to begin.
    """
    last_input.clear()
    futures = c.compute(outputs)
    try:
        await async_poll_for(lambda: transferred(s) == N_INPUTS - 1, timeout=60)
        await async_poll_for(lambda: has_moved(beats(s)), timeout=60)
        yield
    finally:
        last_input.set()
    found = await c.gather(futures)
    assert sum(map(len, found)) in (N_INPUTS * 4_000, N_INPUTS * 1_000)


def all_say(known):
    return len(known) == 2


def all_moved(known):
    moved = [beat["comm"]["written"] for beat in known.values()]
    received = [beat["comm"]["read"] for beat in known.values()]
    spilled = [beat["disk"]["written"] for beat in known.values()]
    return len(known) == 2 and 0 < sum(moved) == sum(received) and min(spilled) > 0


def update(document):
    """Update a page as for a browser that shows it."""
    for callback in document.session_callbacks:
        callback.callback()


def draw(applications, server, variables):
    """Open each page and update it.

    Returns the pages, and the kinds of errors of the pages that failed.
    """
    from bokeh.document import Document

    pages, failed = {}, {}
    for route, application in applications.items():
        if route == "/hardware":
            # This page measures the machine for ten seconds, and shows no tasks or shuffles.
            continue
        pages[route] = page = Document()
        with captured_logger(logging.getLogger(), level=logging.ERROR) as errors:
            try:
                application(server, {"prefix": "", **variables}, page)
                update(page)
            except Exception as error:
                failed[route] = type(error).__name__
        assert route in failed or not errors.getvalue(), route
    return pages, failed
