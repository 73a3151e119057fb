"""Random programs with three times more data than memory give right answers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.failure.gates import DEADLINE_S
from tests.failure.memory_stage import (
    MEMORY_NBYTES,
    assert_no_values_left,
    open_small,
    orphans,
    stores,
)
from tests.thoroughness import some

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

N_TASKS = 500
N_WORKERS = 2
#: Bytes of all results. At most two thirds of a worker's memory hold values.
TOTAL_NBYTES = 3 * N_WORKERS * MEMORY_NBYTES


def make(number: int, n_items: int, *inputs: np.ndarray) -> np.ndarray:
    """Return a result that depends on every item of every input, and on their order."""
    made = np.random.default_rng(number).integers(0, 1 << 40, n_items)
    for place, block in enumerate(inputs, 1):
        made += place * (int(block.sum()) % 1009) + len(block)
    return made


def graph_of(seed: int) -> dict[str, tuple[Any, ...]]:
    """Return tasks of random sizes, mostly small, with earlier tasks as random inputs."""
    rng = random.Random(seed)
    # Weights are limited, so that each task fits into memory with its inputs.
    weights = [min(rng.paretovariate(1.2), 12.0) for _ in range(N_TASKS)]
    nbytes = [int(TOTAL_NBYTES * weight / sum(weights)) for weight in weights]
    graph: dict[str, tuple[Any, ...]] = {}
    for number in range(N_TASKS):
        n_inputs = min(number, rng.choice((0, 0, 1, 1, 2, 3)))
        # Inputs are mostly recent tasks, and sometimes old ones.
        among = range(number) if rng.random() < 0.2 else range(max(0, number - 40), number)
        inputs = rng.sample(among, min(n_inputs, len(among)))
        graph[f"make-{seed}-{number}"] = (
            make,
            number,
            nbytes[number] // 8 + 1,
            *(f"make-{seed}-{other}" for other in inputs),
        )
    return graph


def computed_here(graph: dict[str, tuple[Any, ...]]) -> dict[str, int]:
    values: dict[str, np.ndarray] = {}
    for key, (function, number, n_items, *inputs) in graph.items():
        values[key] = function(number, n_items, *(values[other] for other in inputs))
    return {key: int(value.sum()) for key, value in values.items()}


def total(block: np.ndarray) -> int:
    return int(block.sum())


@pytest.mark.parametrize("seed", some(range(3), 1))
def test_random_program_gives_the_right_result(tmp_path: Path, seed: int) -> None:
    graph = graph_of(seed)
    expected = computed_here(graph)
    with open_small(tmp_path, n_workers=N_WORKERS, threads=2) as client:
        # Every result is kept until the end.
        futures: dict[str, Any] = {}
        for key, (function, number, n_items, *inputs) in graph.items():
            needs = [futures[other] for other in inputs]
            futures[key] = client.submit(function, number, n_items, *needs, key=key)
        totals = client.map(total, list(futures.values()), pure=False)
        got = client.gather(totals)
        assert dict(zip(graph, got, strict=True)) == expected
        assert any(store.cumulative_metrics["disk-write", "bytes"] for store in stores(client))
        # Results are read in random order, and some twice.
        rng = random.Random(seed)
        for key in rng.choices(list(graph), k=50):
            assert total(futures[key].result(DEADLINE_S)) == expected[key]
        del futures, totals, needs
        assert_no_values_left(client)
    assert not orphans(tmp_path)
