"""Draws docs/results.svg, the picture of measured times, from figures of docs/performance.md.

    python docs/make_results.py            rewrites the picture
    python docs/make_results.py --check    exits with 1 if the picture is not up to date

`tests/test_docs.py` looks for every figure in docs/performance.md, so that the picture cannot say
what the page does not.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from typing import NamedTuple

PAGE = pathlib.Path(__file__).with_name("results.svg")


class Row(NamedTuple):
    """A workload, and its times in seconds as docs/performance.md has them."""

    workload: str
    stock: str
    enabled: str


ROWS = (
    Row("shuffle, 1 GB of numbers", "5.27", "0.72"),
    Row("shuffle with strings and categories", "1.91", "0.44"),
    Row("set_index on an unsorted key", "3.94", "1.15"),
    Row("merge of two frames of 16M rows", "5.81", "1.92"),
    Row("rechunk, rows to columns", "1.09", "0.21"),
    Row("shuffle, 3 GB on 2 GB of memory", "20.9", "6.9"),
    Row("4 passes, 2.4 GB on 2 GB of memory", "4.7", "2.5"),
    Row("TPC-H, 22 queries at scale 1", "32.4", "13.4"),
)
WIDTH, LEFT, BAR_WIDTH, TOP, ROW_HEIGHT = 760, 268, 400, 62, 40
STYLE = """
.page { fill: #ffffff }
.head { fill: #111827; font: bold 16px system-ui, sans-serif }
.text { fill: #111827; font: 13px system-ui, sans-serif }
.small { fill: #374151; font: 12px system-ui, sans-serif }
.stock { fill: #c3cad2 }
.enabled { fill: #2f9c95 }
@media (prefers-color-scheme: dark) {
  .page { fill: #0d1117 }
  .head, .text { fill: #f0f3f6 }
  .small { fill: #c3cad2 }
  .stock { fill: #58606b }
}
"""


def row(one: Row, top: int) -> list[str]:
    """Return the two bars of a workload: stock Dask at full width, the runtime in proportion."""
    width = BAR_WIDTH * float(one.enabled) / float(one.stock)
    return [
        f'<text class="text" x="{LEFT - 12}" y="{top + 19}" text-anchor="end">'
        f"{one.workload}</text>",
        f'<rect class="stock" x="{LEFT}" y="{top}" width="{BAR_WIDTH}" height="13"/>',
        f'<text class="small" x="{LEFT + BAR_WIDTH + 8}" y="{top + 11}">{one.stock} s</text>',
        f'<rect class="enabled" x="{LEFT}" y="{top + 14}" width="{width:.1f}" height="13"/>',
        f'<text class="small" x="{LEFT + width + 8:.1f}" y="{top + 25}">{one.enabled} s</text>',
    ]


def picture() -> str:
    """Return the whole picture as SVG."""
    height = TOP + len(ROWS) * ROW_HEIGHT + 34
    said = "; ".join(f"{one.workload}: {one.stock} s and {one.enabled} s" for one in ROWS)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>Seconds with stock Dask and with dask_gpurt. {said}.</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{WIDTH}" height="{height}"/>',
        f'<text class="head" x="{LEFT}" y="24">'
        "Seconds of a program, without the flag and with it</text>",
        f'<rect class="stock" x="{LEFT}" y="36" width="13" height="13"/>',
        f'<text class="small" x="{LEFT + 19}" y="47">stock Dask</text>',
        f'<rect class="enabled" x="{LEFT + 110}" y="36" width="13" height="13"/>',
        f'<text class="small" x="{LEFT + 129}" y="47">'
        "Dask with dask_gpurt (shorter is better)</text>",
    ]
    for number, one in enumerate(ROWS):
        lines += row(one, TOP + number * ROW_HEIGHT)
    lines += [
        f'<text class="small" x="{LEFT}" y="{height - 14}">'
        "virtual machine with 2 cores, no GPU</text>",
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Write the picture, or say whether it is up to date."""
    parser = argparse.ArgumentParser(description="Draw docs/results.svg.")
    parser.add_argument("--check", action="store_true", help="only say whether it is up to date")
    wanted = picture()
    if not parser.parse_args(arguments).check:
        PAGE.write_text(wanted)
        return 0
    if PAGE.exists() and PAGE.read_text() == wanted:
        return 0
    print("docs/results.svg is stale: run python docs/make_results.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
