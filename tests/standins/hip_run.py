"""Runs a Python program on the stand-in for HIP: `python -m tests.standins.hip_run -m pytest`."""

from __future__ import annotations

import os
import sys

from tests.standins.hip_build import environment, why_no_standin

if __name__ == "__main__":
    if (why := why_no_standin()) is not None:
        print(f"skipped: no stand-in for HIP: {why}", file=sys.stderr)
        sys.exit()
    os.execve(sys.executable, [sys.executable, *sys.argv[1:]], environment())
