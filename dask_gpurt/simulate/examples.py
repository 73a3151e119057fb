"""Example workloads on which placement matters, from graphs that Dask makes.

Each is a function of a `Scale`; `EXAMPLES` has them all. Sources are separate tasks, not fused into
their dependents: they represent files or persisted collections.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import dask
import dask.array as da
import dask.dataframe as dd
import pandas as pd
from dask.utils import key_split

from dask_gpurt.simulate.graphs import TaskCost, chunk_nbytes, workload_of
from dask_gpurt.simulate.workload import Workload


@dataclass(frozen=True)
class Scale:
    """The size of examples, and the speed of tasks.

    Attributes
    ----------
    side
        Blocks along an edge of a matrix. A table has as many partitions as a matrix has blocks.
    block_nbytes
        Approximate size of a block or partition.
    load_rate
        Bytes per second that a source yields.
    rate
        Bytes per second that a task processes.
    """

    side: int
    block_nbytes: int
    load_rate: float
    rate: float

    @property
    def edge(self) -> int:
        """Elements along an edge of a block."""
        return max(1, int((self.block_nbytes / 8) ** 0.5))

    def work(self, **options: Any) -> TaskCost:
        """Return the cost of an ordinary task."""
        return TaskCost(rate=self.rate, **options)

    def load(self, **options: Any) -> TaskCost:
        """Return the cost of a task without inputs."""
        return TaskCost(of="nothing", nbytes=self.block_nbytes, rate=self.load_rate, **options)

    def matrix(self, fill: Callable[..., Any] = da.ones) -> Any:
        """Return a square matrix of `side` times `side` blocks."""
        length = self.side * self.edge
        return fill((length, length), chunks=(self.edge, self.edge))

    def table(self, column: str, partitions: int) -> Any:
        """Return a table with a key and a column. It has few rows; the cost model sets its size."""
        rows = pd.DataFrame({"key": range(4 * partitions), column: 1.0})
        return dd.from_pandas(rows, npartitions=partitions, sort=False)


def uneven_tree_sum(scale: Scale) -> Workload:
    """Sum many images by pairs. Every fourth source has three images instead of one."""
    edge = scale.edge
    lengths = tuple(3 if number % 4 == 0 else 1 for number in range(scale.side**2))
    x = da.ones((sum(lengths), edge, edge), chunks=(lengths, edge, edge))
    costs = {
        "ones_like": TaskCost(rate=scale.load_rate),
        # A sum of images has the size of one image.
        "": TaskCost(of="nothing", nbytes=8 * edge * edge, rate=scale.rate),
    }
    summed = x.sum(axis=0, split_every=2)
    return workload_of("uneven tree-sum", summed, costs, sizes=chunk_nbytes(x))


def add(scale: Scale) -> Workload:
    """`a + b` of two independent collections."""
    a, b = scale.matrix(da.ones), scale.matrix(da.zeros)
    costs = {"ones_like": scale.load(), "zeros_like": scale.load(), "add": scale.work()}
    return workload_of("a + b", a + b, costs)


def transpose_add(scale: Scale) -> Workload:
    """`x.T + x`, which combines blocks created far apart."""
    x = scale.matrix()
    costs = {"ones_like": scale.load(), "": scale.work()}
    return workload_of("x.T + x", x.T + x, costs)


def matmul(scale: Scale) -> Workload:
    """A product of two matrices. A whole row or column of tasks needs each block."""
    small = Scale(max(2, scale.side // 2), scale.block_nbytes, scale.load_rate, scale.rate)
    a, b = small.matrix(da.ones), small.matrix(da.zeros)
    costs = {
        "ones_like": small.load(),
        "zeros_like": small.load(),
        "matmul": TaskCost(rate=small.rate / 10),
        "": small.work(),
    }
    return workload_of("matmul", a @ b, costs)


def merge_small(scale: Scale) -> Workload:
    """A merge of a large table with a table of one partition."""
    left = scale.table("left", scale.side**2)
    right = scale.table("right", 1)
    merged = left.merge(right, on="key").optimize()
    costs = {"frompandas": scale.load(), "": scale.work()}
    sources = [key for key in merged.__dask_graph__() if key_split(key) == "frompandas"]
    partitions = Counter(key[0] for key in sources)
    small = {key: scale.block_nbytes // 50 for key in sources if partitions[key[0]] == 1}
    return workload_of("merge with a small table", merged, costs, sizes=small)


def stencil(scale: Scale) -> Workload:
    """Two steps of a stencil, in which each block needs the edges of its neighbours."""
    x = scale.matrix()
    for _ in range(2):
        x = x.map_overlap(_same, depth=1, boundary="none")
    costs = {
        "ones_like": scale.load(),
        "getitem": TaskCost(ratio=1 / scale.edge),
        "": scale.work(),
    }
    # Keys of neighbours' edges contain fractions. Keys without fractions are whole blocks.
    whole = {
        key: scale.block_nbytes
        for key in x.__dask_graph__()
        if key_split(key) != "getitem" or all(index == int(index) for index in key[1:])
    }
    return workload_of("map_overlap stencil", x, costs, sizes=whole)


def joins(scale: Scale) -> Workload:
    """Two joins and an aggregation with task shuffles, as in TPC-H's third query."""
    partitions = max(4, scale.side**2 // 2)
    with dask.config.set({"dataframe.shuffle.method": "tasks"}):
        orders = scale.table("orders", partitions)
        items = scale.table("items", partitions)
        customers = scale.table("customers", max(2, partitions // 4))
        joined = orders.merge(customers, on="key").merge(items, on="key")
        query = joined.groupby("key").items.sum().optimize()
    split = TaskCost(of="share", rate=scale.rate)
    costs = {
        "frompandas": scale.load(),
        "split-taskshuffle": split,
        "split-stage": split,
        "taskshuffle": scale.work(of="sum"),
        "stage": scale.work(of="sum"),
        "": scale.work(),
    }
    return workload_of("joins by task shuffles", query, costs)


def pipeline(scale: Scale) -> Workload:
    """Three levels: load and clean, features of neighbours, statistics over windows."""
    count = scale.side**2
    x = da.ones((count * scale.edge, scale.edge), chunks=(scale.edge, scale.edge))
    clean = x.map_blocks(_same, name="clean", dtype=float)
    pairs = da.map_blocks(
        _same, clean[scale.edge :], clean[: -scale.edge], dtype=float, name="pair"
    )
    windows = pairs.rechunk({0: 4 * scale.edge}).sum(axis=1)
    costs = {
        "ones_like": scale.load(),
        "rechunk-merge": scale.work(of="sum"),
        "sum": scale.work(ratio=1 / scale.edge),
        "": scale.work(),
    }
    return workload_of("3-level pipeline", windows, costs)


def _same(block: Any, *others: Any) -> Any:
    return block


EXAMPLES: tuple[Callable[[Scale], Workload], ...] = (
    uneven_tree_sum,
    add,
    transpose_add,
    matmul,
    merge_small,
    stencil,
    joins,
    pipeline,
)
