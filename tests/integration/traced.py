"""Traces of small shuffles on clusters in this process, and what tests read in them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd

from dask_gpurt.tracing.events import LaneWork, Trace
from dask_gpurt.tracing.formats.arrows import ArrowFinder
from dask_gpurt.tracing.lane_names import COLLECTIVE, RECEIVE, RELAY, SEND

ROWS = 20_000
N_PARTS = 8

Ends = dict[tuple[str, str, int], LaneWork]


def part(number: int) -> pd.DataFrame:
    rng = np.random.default_rng(number)
    return pd.DataFrame({"key": rng.integers(0, 10_000, ROWS), "x": rng.random(ROWS)})


def shuffled() -> Any:
    """Return the shuffle of `N_PARTS` frames into as many."""
    lazy = dd.from_map(part, range(N_PARTS), meta=part(0).iloc[:0])
    with dask.config.set({"dataframe.shuffle.method": "p2p"}):
        return lazy.shuffle("key")


def message_ends(trace: Trace) -> tuple[Ends, Ends]:
    """Return sends and receives by sender, receiver and number."""
    address = [one.address for one in trace.processes]
    sends, receives = {}, {}
    for one in trace.work:
        if one.path in (SEND, RELAY):
            sends[address[one.process], one.peer, one.message] = one
        elif one.path == RECEIVE:
            receives[one.peer, address[one.process], one.message] = one
    return sends, receives


def assert_messages_match(trace: Trace) -> None:
    """Each send has its receive and none points backwards; bytes are those of the counters."""
    sends, receives = message_ends(trace)
    assert sends and sends.keys() == receives.keys()
    assert all(receives[one].start_s >= sends[one].start_s for one in sends)
    for number, process in enumerate(trace.processes):
        for path, counter in ((SEND, "sent_nbytes"), (RECEIVE, "received_nbytes")):
            moved = (one.nbytes for one in trace.work if one.process == number and one.path == path)
            assert sum(moved) == process.counters.get(counter, 0)


def assert_received(trace: Trace, sent: list[LaneWork]) -> None:
    """Each of these sends has a receive at its peer, of as many bytes, and an arrow to it."""
    here = [one for one in trace.work if one.lane == COLLECTIVE]
    received = [one for one in here if one.path == RECEIVE]
    names = [process.address for process in trace.processes]

    def ends(one: LaneWork, sender: str, receiver: str) -> tuple[str, str, int, int, int]:
        return sender, receiver, one.message, one.nbytes, arrows.of_work(one).chain

    arrows = ArrowFinder(trace)
    of_sends = sorted(ends(one, names[one.process], one.peer) for one in sent)
    assert of_sends == sorted(ends(one, one.peer, names[one.process]) for one in received)
    assert all(chain for *_, chain in of_sends)


def trace_files(*folders: str) -> Iterator[str]:
    """Yield files without a name that this process has open in these folders, such as traces."""
    for descriptor in os.listdir("/proc/self/fd"):
        # The descriptor of the list itself is closed by now.
        with contextlib.suppress(FileNotFoundError):
            file = os.readlink(f"/proc/self/fd/{descriptor}")
            if file.endswith("(deleted)") and os.path.dirname(file) in folders:
                yield file
