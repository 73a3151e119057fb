"""Draws docs/concepts/two_steps.svg from two all-reduces: around a ring, and in two steps.

    python docs/make_two_steps.py

Every bar is a message of a real run, from its departure to its answer. The picture is a
measurement, and comes out a little different each time. Ranks are workers of one process; messages
are held back for 2 ms, as on a network between data centres.
"""

from __future__ import annotations

import asyncio
import pathlib
import sys
import time
from typing import Any, NamedTuple

import numpy as np
from distributed import Client, LocalCluster

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import dask_gpurt
from benchmarks.train import DELAY_S, forced
from dask_gpurt.collectives import Communicator
from dask_gpurt.plugins.collectives.groups.group_member import GroupMember

PICTURE = pathlib.Path(__file__).parent / "concepts" / "two_steps.svg"
N_RANKS, NBYTES, N_RUNS = 8, 64 << 10, 5
WIDTH, LEFT, TOP, ROW, PANEL = 1000, 100, 74, 20, 226


class Sent(NamedTuple):
    """A message: who sent it, in which step, and when."""

    rank: int
    step: int
    start_s: float
    end_s: float


_sent: list[Sent] = []
_deliver = GroupMember.deliver


async def _noted(member: GroupMember, peer: int, compose: Any) -> None:
    run, began_s = member._current, time.perf_counter()
    assert run is not None
    step = run.step
    await asyncio.sleep(DELAY_S)
    await _deliver(member, peer, compose)
    _sent.append(Sent(member.rank, step, began_s, time.perf_counter()))


def all_reduces(comm: Any, _: Any) -> float:
    """Return when the last all-reduce began; the messages of that one alone are left."""
    array = np.ones(NBYTES // 8)
    for _ in range(N_RUNS):
        comm.barrier()
        if not comm.rank:
            _sent.clear()
        began_s = time.perf_counter()
        comm.allreduce(array)
    return began_s


def messages(client: Client, algorithm: str) -> list[Sent]:
    """Run an algorithm; return the messages of an all-reduce, with the time since it began."""
    with Communicator(client) as comm, forced(algorithm):
        began_s = max(client.gather(comm.run(all_reduces)))
    n_steps = 2 * (N_RANKS - 1) if algorithm == "ring" else 2
    of_last = [one for one in _sent if one.start_s >= began_s - DELAY_S and one.step < n_steps]
    first_s = min(one.start_s for one in of_last)
    return [
        one._replace(start_s=one.start_s - first_s, end_s=one.end_s - first_s) for one in of_last
    ]


def panel(title: str, found: list[Sent], scale: float, top: int) -> list[str]:
    took_s, half = max(one.end_s for one in found), max(one.step for one in found) // 2
    lines = [
        f'<text class="head" x="30" y="{top}">{title}</text>',
        f'<text class="text" x="{WIDTH - 30}" y="{top}" text-anchor="end">'
        f"{1e3 * took_s:.0f} ms</text>",
    ]
    for rank in range(N_RANKS):
        y = top + 14 + rank * ROW
        lines.append(f'<text class="text" x="30" y="{y + 13}">rank {rank}</text>')
        lines.append(
            f'<rect class="lane" x="{LEFT}" y="{y}" width="{WIDTH - LEFT - 30}" height="16"/>'
        )
        lines += [
            f'<rect class="{"gather" if one.step > half else "add"}" '
            f'x="{LEFT + one.start_s * scale:.1f}" y="{y + 2}" '
            f'width="{max(1.0, (one.end_s - one.start_s) * scale - 1):.1f}" height="12"/>'
            for one in found
            if one.rank == rank
        ]
    return lines


def main() -> None:
    GroupMember.deliver = _noted  # type: ignore[method-assign]
    with (
        LocalCluster(
            n_workers=N_RANKS, threads_per_worker=1, processes=False, dashboard_address=":0"
        ) as made,
        Client(made, set_as_default=False) as client,
    ):
        dask_gpurt.enable(client)
        ring, two = (messages(client, one) for one in ("ring", "two-shot"))
    scale = (WIDTH - LEFT - 30) / max(one.end_s for one in ring)
    height = TOP + 2 * PANEL - 50
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        'aria-labelledby="title desc"',
        "     font-family=\"system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif\">",
        '  <title id="title">An all-reduce around a ring, and in two steps</title>',
        f'  <desc id="desc">{N_RANKS} ranks add up {NBYTES >> 10} KiB. Each bar is a message that '
        f"takes {DELAY_S * 1e3:.0f} ms or more. Above, {2 * (N_RANKS - 1)} messages of each rank "
        "wait for each other. Below, each rank sends to all others at once, two times.</desc>",
        "  <style>",
        "    .back { fill: #ffffff } .lane { fill: #f3f4f6 }",
        "    .head { fill: #111827; font-size: 17px; font-weight: 700 }",
        "    .text { fill: #374151; font-size: 14px }",
        "    .add { fill: #d9730d } .gather { fill: #2f9c95 }",
        "    @media (prefers-color-scheme: dark) {",
        "      .back { fill: #0d1117 } .lane { fill: #161b22 }",
        "      .head { fill: #f0f3f6 } .text { fill: #c3cad2 }",
        "    }",
        "  </style>",
        f'  <rect class="back" width="{WIDTH}" height="{height}" rx="10"/>',
        *("  " + line for line in panel("Around a ring", ring, scale, TOP - 34)),
        *("  " + line for line in panel("In two steps", two, scale, TOP + PANEL - 34)),
        f'  <text class="text" x="30" y="{height - 14}">orange: parts are sent to be added up'
        " · green: sums are sent to all</text>",
        "</svg>",
    ]
    PICTURE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
