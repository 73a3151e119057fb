"""Joins give the right answer in a few runs of `tests.failure.random_killer`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("duckdb", reason="needs the demo's packages")

from dask_gpurt.demo.tpch_data import make_tpch
from tests.failure.random_killer import SCALE, Arena, open_arena
from tests.thoroughness import some

# A run takes some seconds. After one that hangs, the others hang, too.
pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def arena(request: Any, tmp_path_factory: Any) -> Iterator[Arena]:
    if request.param == "ucx":
        pytest.importorskip("ucxx", reason="the ucx extra is not installed")
    directory: Path = make_tpch(SCALE, tmp_path_factory.mktemp("tpch"))
    with open_arena(directory, request.param) as arena:
        yield arena


# With these three seeds, each kind of victim dies.
@pytest.mark.parametrize(
    ("arena", "seed"),
    some([("ucx", 1), ("auto", 0), ("auto", 1), ("ucx", 2)], 1),
    indirect=["arena"],
)
def test_random_worker_deaths_keep_the_right_answer(arena: Arena, seed: int) -> None:
    outcome = arena.once(seed)
    # A worker that dies before the last partition is read takes part in some shuffle.
    assert outcome.n_runs >= outcome.n_shuffles
