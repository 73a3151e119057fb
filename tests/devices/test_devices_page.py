"""The programs of the two pages about devices run as printed; each asserts what it claims."""

from __future__ import annotations

import pathlib
import re

import pytest

DOCS = pathlib.Path(__file__).parents[2] / "docs"
PAGES = ["concepts/devices.md", "internals/devices.md"]
PROGRAM = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
PROGRAMS = [
    pytest.param(page, program, id=f"{page}-{number}")
    for page in PAGES
    for number, program in enumerate(PROGRAM.findall((DOCS / page).read_text()))
]


@pytest.mark.parametrize("page", PAGES)
def test_each_page_has_programs(page):
    assert len(PROGRAM.findall((DOCS / page).read_text())) >= 3


@pytest.mark.parametrize(("page", "program"), PROGRAMS)
def test_programs_run(page, program):
    assert "assert" in program
    exec(compile(program, page, "exec"), {})
