"""The programs in docs/devices.md run as written; they assert what they claim."""

from __future__ import annotations

import pathlib
import re

import pytest

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "devices.md"
PROGRAMS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def test_the_page_has_programs():
    assert len(PROGRAMS) >= 4
    assert all("assert" in program for program in PROGRAMS)


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_programs_run(number):
    exec(compile(PROGRAMS[number], f"{PAGE}, program {number + 1}", "exec"), {})
