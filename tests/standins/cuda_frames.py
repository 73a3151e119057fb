"""A plugin of pytest: memory of the emulated device is the CUDA stand-in's, and UCX is itself.

At the end it writes the stand-in's counters to the file `STANDIN_COUNTERS`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.frames.emulated_device import EmulatedMemory
from tests.standins import cuda_memory

COUNTERS = ("allocations", "copies", "copied_nbytes", "used_nbytes")


def pytest_configure() -> None:
    EmulatedMemory.provide = staticmethod(cuda_memory.allocate)


def pytest_sessionfinish() -> None:
    counters = {name: cuda_memory.get(name) for name in COUNTERS}
    Path(os.environ["STANDIN_COUNTERS"]).write_text(json.dumps(counters))
