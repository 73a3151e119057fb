"""The steps of the kit: the archives that each one needs, and the tests and sections that it runs.

Both sides use this module. It needs the standard library only.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

#: The longest that a call may take.
CALL_S = 600.0
#: Seconds of a call that belong to no test and no section.
START_S = 15.0
#: The limit of the process that imports the modules of a step.
IMPORTS_S = 40.0
#: How fast the machine unpacks an archive, at least.
UNPACKED_NBYTES_PER_S = 40e6


@dataclass(frozen=True)
class Work:
    """One process of a step, which ends at its limit.

    Attributes
    ----------
    name
        A module of `tests/gpu`, or a section of `benchmarks.gpu`.
    only
        An expression that selects tests, as for `pytest -k`.
    """

    name: str
    limit_s: float
    only: str = ""

    @property
    def is_test(self) -> bool:
        return self.name.startswith("test_")

    def command(self, rows_path: str) -> list[str]:
        """Return the command of the process; a section writes its rows to a file."""
        if not self.is_test:
            section = [sys.executable, "-m", "benchmarks.gpu", "--only", self.name]
            return [*section, "--json", rows_path]
        # The machine's own plugins of pytest may not fit the pytest of the kit.
        plugins = ("timeout", "hypothesispytest", "benchmarks.gpu.kit.outcomes")
        return [
            *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider"),
            *(option for plugin in plugins for option in ("-p", plugin)),
            # Fixtures of the other tests need Dask.
            *("--confcutdir", "tests/gpu", f"tests/gpu/{self.name}.py"),
            *(("-k", self.only) if self.only else ()),
        ]


@dataclass(frozen=True)
class Step:
    """What one call runs, and the archives that it needs."""

    name: str
    title: str
    archives: tuple[str, ...]
    #: Modules that must import, in this order, with a GPU and without.
    imports: tuple[str, ...]
    works: tuple[Work, ...]

    def most_s(self, unpacked_nbytes: int) -> float:
        """Return the time that the step takes at most."""
        limits_s = IMPORTS_S + sum(work.limit_s for work in self.works)
        return START_S + unpacked_nbytes / UNPACKED_NBYTES_PER_S + limits_s


_FIRST = ("cupy", "cuda.core", "hypothesis", "pyarrow", "pytest", "pytest_timeout")
_SECOND = ("dask", "distributed", "distributed_ucxx", "pynvml", "rmm", "ucxx")
# cuDF cannot be imported after nvCOMP.
_THIRD = ("cudf", "dask_cudf", "pylibcudf", "nvidia.nvcomp")

STEPS = (
    Step(
        "cupy",
        "the device suite and copies, with CuPy alone",
        ("tests",),
        _FIRST,
        (
            Work("facts", 30),
            Work("test_cuda_device", 100),
            Work("test_cuda_launches", 60),
            Work("test_cuda_memory", 40),
            Work("test_tiers", 40),
            Work("copies", 40),
            Work("pipeline", 40),
        ),
    ),
    Step(
        "dask",
        "Dask, RMM and UCX",
        ("tests", "dask"),
        (*_FIRST, *_SECOND),
        (
            Work("facts", 30),
            Work("test_environment", 40),
            Work("test_cuda_memory", 40, "rmm"),
            Work("test_cupti", 20),
            Work("test_store", 80, "not cudf"),
            Work("test_frames", 60, "cupy"),
            Work("test_partition_sizes", 20),
            Work("tiers", 60),
            Work("shaping", 50),
            Work("overcommit", 70),
        ),
    ),
    Step(
        "cudf",
        "cuDF in the store of task outputs; CuPy in shards, messages and processes",
        ("tests", "dask", "codecs", "cudf", "older"),
        (*_FIRST, *_SECOND, *_THIRD),
        (
            Work("facts", 30),
            Work("test_environment", 40),
            Work("test_store", 120),
            Work("test_packed_frames", 60),
            Work("test_messages", 40),
            Work("test_processes", 70),
            Work("messages", 40),
        ),
    ),
    Step(
        "exchange",
        "frames, shuffles and codecs",
        ("tests", "dask", "codecs", "cudf", "older"),
        (*_FIRST, *_SECOND, *_THIRD),
        (
            Work("facts", 30),
            Work("test_frames", 150),
            Work("test_carried_types", 40),
            Work("test_codecs", 70),
            Work("shards", 40),
            Work("exchange", 150),
            Work("codecs", 30),
        ),
    ),
)
