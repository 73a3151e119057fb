"""Lengths of buffers and helpers for the suites of the disk tier."""

from __future__ import annotations

import errno
import pathlib

PATIENCE_S = 60.0
LARGE = (1_000_000, 10, 200_001)


def files(parent):
    return sorted(p for p in pathlib.Path(parent).rglob("*") if p.is_file() and p.suffix != ".lock")


SMALL = (100,)


def failing_pwrite(real, *args):
    raise OSError(errno.ENOSPC, "No space left on device")
