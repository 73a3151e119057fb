"""Examples, figures and picture of the page about shaping equal the package's results."""

from __future__ import annotations

import doctest
import pathlib
import re
import shlex

from click.testing import CliRunner

from dask_gpurt.cli import gpurt
from dask_gpurt.devices.cuda import ranges
from dask_gpurt.devices.occupancy import architectures
from dask_gpurt.devices.occupancy.architectures import GPUS, KIB, SM90
from dask_gpurt.devices.occupancy.planner import Reason, plan_beside
from dask_gpurt.devices.occupancy.resident_blocks import (
    Launch,
    charged_nbytes,
    registers_of_warp,
    warps_of,
)

DOCS = pathlib.Path(__file__).parents[3] / "docs" / "internals"
PAGE = (DOCS / "occupancy.md").read_text()
PICTURE = (DOCS / "occupancy.svg").read_text()


def blocks_of(language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_python_examples_of_the_page_run():
    """They build on each other, in the order of the page."""
    examples = "\n".join(block for block in blocks_of("python") if block.startswith(">>>"))
    test = doctest.DocTestParser().get_doctest(examples, {}, "occupancy.md", None, 0)
    assert len(test.examples) > 10
    said: list[str] = []
    doctest.DocTestRunner().run(test, out=said.append)
    assert "".join(said) == ""


def test_docstring_examples_run():
    for module in (architectures, ranges):
        found = doctest.testmod(module)
        assert found.attempted > 0
        assert found.failed == 0


def test_the_page_shows_the_output_of_the_command():
    (session,) = blocks_of("console")
    command, _, printed = session.partition("\n")
    assert command.startswith("$ dask gpurt ")
    outcome = CliRunner().invoke(gpurt, shlex.split(command)[3:])
    assert outcome.stdout == printed


def test_table_of_limits_is_up_to_date():
    rows = [
        f"| {gpu.name} | {one.name} | {one.warps_per_sm} | {one.blocks_per_sm} "
        f"| {one.shared_per_sm_nbytes // KIB} KiB "
        f"| {one.shared_per_block_opt_in_nbytes // KIB} KiB "
        f"| {one.shared_reserved_nbytes} B | {one.shared_granule_nbytes} B |"
        for gpu in GPUS.values()
        for one in [gpu.architecture]
    ]
    assert "\n".join(rows) in PAGE


def test_table_of_reasons_is_up_to_date():
    assert re.findall(r"^\| `([A-Z_]+)` \|", PAGE, re.MULTILINE) == [one.name for one in Reason]


def test_picture_shows_the_example():
    """Its bars are 432 wide and show the result of the example."""
    compute = Launch(threads=256, registers=64)
    pack = Launch(threads=256, registers=32, dynamic_nbytes=24 * KIB)
    found = plan_beside(SM90, compute, pack, pending=True)
    shaped = Launch(256, 64, dynamic_nbytes=found.dynamic_nbytes)

    def widths(launch):
        registers = warps_of(SM90, launch) * registers_of_warp(SM90, launch)
        shared = charged_nbytes(SM90, launch)
        return (
            round(432 * registers / SM90.registers_per_sm, 1),
            round(432 * shared / SM90.shared_per_sm_nbytes, 1),
        )

    drawn = re.findall(r'class="(compute|pack)" [^>]*y="(94|186)" width="([\d.]+)"', PICTURE)
    before, after, packing = widths(compute), widths(shaped), widths(pack)
    registers = [before[0]] * 4 + [after[0]] * found.blocks + [packing[0]]
    assert [float(width) for _, y, width in drawn if y == "94"] == registers
    shared = [round(4 * before[1], 1)] + [after[1]] * found.blocks + [packing[1]]
    assert [float(width) for _, y, width in drawn if y == "186"] == shared
    for nbytes in (
        found.dynamic_nbytes,
        found.free_nbytes,
        charged_nbytes(SM90, shaped),
        charged_nbytes(SM90, pack),
    ):
        assert f"{nbytes:,}" in PICTURE
