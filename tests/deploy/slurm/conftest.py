"""One SLURM for all tests of this folder that a process runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.deploy.slurm.throwaway import Slurm, running_slurm


@pytest.fixture(scope="package")
def slurm() -> Iterator[Slurm]:
    with running_slurm() as started:
        yield started
