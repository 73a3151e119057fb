"""Draws docs/concepts/devices.svg from the ledger of a pipeline on the emulated device.

    python docs/make_timeline.py

Every bar is an entry of a ledger: the picture is a measurement, and comes out a little different
each time.
"""

from __future__ import annotations

import pathlib
import time

import numpy as np

from dask_gpurt.devices.device import Priority
from dask_gpurt.devices.emulated.emulated_device import EmulatedDevice
from dask_gpurt.devices.emulated.engines import Rate
from dask_gpurt.devices.emulated.queues import Engine
from dask_gpurt.devices.ledger import Ledger, LedgerEntry, overlap

PICTURE = pathlib.Path(__file__).parent / "concepts" / "devices.svg"
N_ROUNDS, STEP_S = 8, 0.05
LANES = ("copies in", "compute", "copies out")
WIDTH, LEFT, TOP, ROW, PANEL = 1000, 130, 74, 34, 176


def pipeline(*, overlapped: bool) -> list[LedgerEntry]:
    """Values are copied to the device, computed with and copied back."""
    ledger = Ledger()
    rates = {Engine.IN: Rate(1e12, STEP_S), Engine.OUT: Rate(1e12, STEP_S)}
    device = EmulatedDevice(1 << 20, rates=rates, ledger=ledger)
    copies_in, compute, copies_out = (
        device.stream(name, Priority.NORMAL if name == "compute" else Priority.HIGH)
        for name in LANES
    )
    for _ in range(N_ROUNDS):
        buffer = device.allocate(1000, copies_in)
        copies_in.to_device(buffer, np.ones(1000, dtype=np.uint8))
        compute.wait(copies_in.record())
        compute.launch(lambda target: time.sleep(STEP_S), writes=[buffer])
        copies_out.wait(compute.record())
        copies_out.to_host(np.empty(1000, dtype=np.uint8), buffer)
        buffer.free(copies_out)
        if not overlapped:
            copies_in.wait(copies_out.record())
    copies_out.synchronize()
    device.close()
    return ledger.entries()


def panel(title: str, entries: list[LedgerEntry], scale: float, top: int) -> list[str]:
    found = overlap(entries)
    assert found.efficiency is not None
    first = min(entry.start_s for entry in entries)
    lines = [
        f'<text class="head" x="30" y="{top}">{title}</text>',
        f'<text class="text" x="{WIDTH - 30}" y="{top}" text-anchor="end">'
        f"{found.measured_s:.2f} s, efficiency {max(0.0, found.efficiency):.2f}</text>",
    ]
    for row, lane in enumerate(LANES):
        y = top + 14 + row * ROW
        lines.append(f'<text class="text" x="30" y="{y + 18}">{lane}</text>')
        lines.append(
            f'<rect class="lane" x="{LEFT}" y="{y}" width="{WIDTH - LEFT - 30}" height="26"/>'
        )
        lines += [
            f'<rect class="{"compute" if lane == "compute" else "copy"}" '
            f'x="{LEFT + (entry.start_s - first) * scale:.1f}" y="{y + 3}" '
            f'width="{max(1.0, (entry.end_s - entry.start_s) * scale - 1):.1f}" height="20"/>'
            for entry in entries
            if entry.lane == lane
        ]
    return lines


def main() -> None:
    serial, overlapped = pipeline(overlapped=False), pipeline(overlapped=True)
    scale = (WIDTH - LEFT - 30) / overlap(serial).measured_s
    height = TOP + 2 * PANEL - 70
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        'aria-labelledby="title desc"',
        "     font-family=\"system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif\">",
        '  <title id="title">A pipeline on the emulated device, without and with overlap</title>',
        f'  <desc id="desc">{N_ROUNDS} rounds of a copy in, a kernel and a copy out, each made to '
        f"take {STEP_S * 1000:.0f} ms. Above one after the other, below each on its own stream "
        "with events between them, in less than half the time.</desc>",
        "  <style>",
        "    .back { fill: #ffffff } .lane { fill: #f3f4f6 }",
        "    .head { fill: #111827; font-size: 17px; font-weight: 700 }",
        "    .text { fill: #374151; font-size: 14px }",
        "    .compute { fill: #d9730d } .copy { fill: #2f9c95 }",
        "    @media (prefers-color-scheme: dark) {",
        "      .back { fill: #0d1117 } .lane { fill: #161b22 }",
        "      .head { fill: #f0f3f6 } .text { fill: #c3cad2 }",
        "    }",
        "  </style>",
        f'  <rect class="back" width="{WIDTH}" height="{height}" rx="10"/>',
        *("  " + line for line in panel("One after the other", serial, scale, TOP - 34)),
        *("  " + line for line in panel("Streams and events", overlapped, scale, TOP + PANEL - 34)),
        "</svg>",
    ]
    PICTURE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
