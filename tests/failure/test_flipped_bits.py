"""A thousand flipped bits in files and messages cause no wrong row and no crash."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.limits import HANG_S

ROOT = Path(__file__).parents[2]


def test_flipped_bits_never_change_a_result() -> None:
    command = [sys.executable, "-m", "tests.failure.flipped_bits", "--flips", "1000"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert "1,000 flips, 0 wrong or unexpected" in done.stdout
    # This fails if the program reads bytes that it did not flip.
    noticed = sum(map(int, re.findall(r"'noticed': (\d+)", done.stdout)))
    assert noticed > 950
