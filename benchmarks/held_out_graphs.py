"""Generated task graphs that placement was not tuned on, for `benchmarks.simulated_placement`.

Their shapes differ from those of the example graphs. A placement rule that is good for the examples
only is worse here. Sizes and durations follow from the same `Scale`; random choices follow from a
seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from dask_gpurt.simulate.examples import Scale
from dask_gpurt.simulate.workload import StableStr, TaskModel, Workload


class _Graph:
    """A graph under construction: tasks in the order in which they are added."""

    def __init__(self) -> None:
        self.tasks: list[TaskModel] = []

    def add(
        self,
        name: str,
        number: int,
        needs: tuple[int, ...],
        duration_s: float,
        nbytes: float,
        *,
        is_source: bool = False,
    ) -> int:
        """Add a task and return its position, by which other tasks name it as an input."""
        key = StableStr(str((f"{name}-0", number)))
        self.tasks.append(TaskModel(key, needs, duration_s, int(nbytes), is_source))
        return len(self.tasks) - 1

    def sources(self, scale: Scale, count: int, name: str = "load") -> list[int]:
        """Add tasks that load a block each and have no inputs."""
        nbytes = scale.block_nbytes
        duration_s = nbytes / scale.load_rate
        return [self.add(name, i, (), duration_s, nbytes, is_source=True) for i in range(count)]

    def nbytes(self, *positions: int) -> int:
        """Return the total size of the results of these tasks."""
        return sum(self.tasks[position].nbytes for position in positions)

    def workload(self, name: str, *wanted: int) -> Workload:
        """Return the finished graph; `wanted` are the positions of its outputs."""
        return Workload(name, tuple(self.tasks), wanted)


def random_layers(scale: Scale, seed: int) -> Workload:
    """Layers of tasks of random sizes, which need one to three tasks of the layer before."""
    draw = random.Random(seed)
    graph = _Graph()
    count = scale.side**2
    layer = graph.sources(scale, count)
    for level in range(4):
        following = []
        for i in range(count):
            near = [layer[(i + draw.choice((-1, 0, 1))) % count]]
            needs = tuple(sorted({*near, *draw.sample(layer, draw.choice((0, 0, 1, 2)))}))
            nbytes = scale.block_nbytes * draw.uniform(0.1, 1.5)
            duration_s = draw.uniform(0.5, 4.0) * (graph.nbytes(*needs) + nbytes) / scale.rate
            following.append(graph.add(f"layer{level}", i, needs, duration_s, nbytes))
        layer = following
    return graph.workload(f"random layers, seed {seed}", *layer)


def uneven_map(scale: Scale, seed: int) -> Workload:
    """Blocks that are loaded and processed one by one, with very different durations."""
    draw = random.Random(seed)
    graph = _Graph()
    nbytes = scale.block_nbytes
    usual_s = 10 * nbytes / scale.rate
    wanted = [
        graph.add("work", i, (source,), usual_s * draw.lognormvariate(0.0, 1.0), nbytes / 10)
        for i, source in enumerate(graph.sources(scale, scale.side**2))
    ]
    return graph.workload(f"uneven map, seed {seed}", *wanted)


def groupby_tree(scale: Scale, seed: int) -> Workload:
    """A groupby-aggregation: small results of each block, gathered eight by eight to one."""
    draw = random.Random(seed)
    graph = _Graph()
    layer = [
        graph.add("chunk", i, (source,), 3 * graph.nbytes(source) / scale.rate,
                  graph.nbytes(source) * draw.uniform(0.02, 0.2))
        for i, source in enumerate(graph.sources(scale, scale.side**2))
    ]  # fmt: skip
    level = 0
    while len(layer) > 1:
        groups = [tuple(layer[i : i + 8]) for i in range(0, len(layer), 8)]
        layer = [
            graph.add(f"combine{level}", i, group, 3 * graph.nbytes(*group) / scale.rate,
                      0.5 * graph.nbytes(*group))
            for i, group in enumerate(groups)
        ]  # fmt: skip
        level += 1
    return graph.workload(f"groupby tree, seed {seed}", *layer)


def power_iteration(scale: Scale, seed: int) -> Workload:
    """A matrix that stays where it is, multiplied again and again with a vector that travels."""
    draw = random.Random(seed)
    graph = _Graph()
    side = max(2, scale.side // 2)
    blocks = graph.sources(scale, side * side, "matrix")
    part = scale.block_nbytes * draw.uniform(0.002, 0.02)
    block_s = scale.block_nbytes / scale.rate
    vector = [graph.add("start", i, (), block_s / 10, part) for i in range(side)]
    for step in range(4):
        products = [
            [
                graph.add(f"product{step}", i * side + j, (blocks[i * side + j], vector[j]),
                          4 * block_s, part)
                for j in range(side)
            ]
            for i in range(side)
        ]  # fmt: skip
        sums = [
            graph.add(f"sum{step}", i, tuple(row), block_s / 10, part)
            for i, row in enumerate(products)
        ]
        norm = graph.add(f"norm{step}", 0, tuple(sums), block_s / 10, 8)
        vector = [
            graph.add(f"scale{step}", i, (one, norm), block_s / 10, part)
            for i, one in enumerate(sums)
        ]
    return graph.workload(f"power iteration, seed {seed}", *vector)


HELD_OUT: tuple[Callable[[Scale, int], Workload], ...] = (
    random_layers,
    uneven_map,
    groupby_tree,
    power_iteration,
)
