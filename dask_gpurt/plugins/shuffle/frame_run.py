"""DataFrame shuffles: the spec that replaces the stock one, and the run it creates.

A run groups rows by receiving worker and partition (`shuffle.plan`, `frames.gather`) and cuts them
into shards; `exchange_run` does the rest. `ADAPTERS` lists the supported kinds of frame.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from distributed.protocol.pickle import dumps, loads

from dask_gpurt.config import ShuffleSettings
from dask_gpurt.frames.adapter import (
    FrameAdapter,
    GatheredRows,
    OpenPartition,
    Piece,
    Selection,
)
from dask_gpurt.frames.device.device_frames import DeviceFrames
from dask_gpurt.frames.pickling import Pickling
from dask_gpurt.plugins.memory.gpu_budget import shard_budget
from dask_gpurt.plugins.patches.graphs.transfer_tasks import Execution, execution_in_this_thread
from dask_gpurt.plugins.patches.p2p import DataFrameShuffleSpec
from dask_gpurt.plugins.patches.values.value_bytes import safe_sizeof
from dask_gpurt.plugins.shuffle.exchange_run import ExchangeRun, Inputs
from dask_gpurt.plugins.shuffle.pickled_once import SpecPickledOnce
from dask_gpurt.shuffle.balance import LatestOwners
from dask_gpurt.shuffle.plan import SHARD_TARGET_NBYTES, ExchangePlan, RowsBySlot
from dask_gpurt.transport import wire

if TYPE_CHECKING:
    from dask_gpurt.frames.pandas_ import PandasFrames
    from dask_gpurt.plugins.patches.p2p import ShuffleWorkerPlugin


#: Owners of the latest run. Only the scheduler's event loop uses them.
_OWNERS = LatestOwners()


@dataclass(frozen=True)
class FrameSpec(SpecPickledOnce, DataFrameShuffleSpec):
    """The stock description of a shuffle, run on this package's data plane.

    Attributes
    ----------
    frame_kind
        Name of the frame adapter, a key of `ADAPTERS`.
    settings
        Settings of the client that enabled the runtime.
    rows
        Rows of each output partition in a sample; empty without a sample.
    read_order
        Output partitions in the order of their tasks.
    """

    frame_kind: str
    settings: ShuffleSettings
    rows: tuple[int, ...]
    read_order: tuple[int, ...]
    keeps_outputs: bool = False

    @classmethod
    def replacing(
        cls,
        stock: DataFrameShuffleSpec,
        frame_kind: str,
        settings: ShuffleSettings,
        rows: Sequence[int] | None = None,
        read_order: Sequence[int] = (),
        keeps_outputs: bool = False,
    ) -> FrameSpec:
        return cls(
            id=stock.id,
            disk=stock.disk,
            npartitions=stock.npartitions,
            column=stock.column,
            meta=stock.meta,
            parts_out=stock.parts_out,
            drop_column=stock.drop_column,
            frame_kind=frame_kind,
            settings=settings,
            rows=_padded(rows or (), stock.npartitions),
            read_order=tuple(read_order),
            keeps_outputs=keeps_outputs,
        )

    def pick_worker(self, partition: int, workers: Sequence[str]) -> str:
        """Return the owner of an output partition. All calls of one run pass the same workers."""
        if not self.rows:
            return super().pick_worker(partition, workers)
        return _OWNERS.of(self.rows, workers)[partition]

    def create_run_on_worker(  # type: ignore[override]
        self,
        run_id: int,
        span_id: str | None,
        worker_for: dict[int, str],
        plugin: ShuffleWorkerPlugin,
    ) -> FrameRun:
        return FrameRun(self, run_id, span_id, worker_for, plugin)


def _padded(rows: Sequence[int], n_partitions: int) -> tuple[int, ...]:
    """Return one row count for each partition, padded with zeros; empty if there are too many."""
    if not rows or len(rows) > n_partitions:
        return ()
    return (*rows, *[0] * (n_partitions - len(rows)))


def _open_pandas(spec: FrameSpec) -> FrameAdapter:
    from dask_gpurt.frames.pandas_ import PandasFrames

    return _open_in_host_memory(PandasFrames, spec)


def _open_geo(spec: FrameSpec) -> FrameAdapter:
    from dask_gpurt.frames.geo.geo_frames import GeoFrames

    return _open_in_host_memory(GeoFrames, spec)


def _open_in_host_memory(frames: type[PandasFrames], spec: FrameSpec) -> FrameAdapter:
    return frames(spec.meta, spec.column, spec.drop_column, safe_sizeof, Pickling(dumps, loads))


def _open_cudf(spec: FrameSpec) -> FrameAdapter:
    from dask_gpurt.frames.device.cudf_ import CudfMemory, CudfTables

    allocate_device = partial(shard_budget(spec.settings).take, CudfMemory.empty)
    return DeviceFrames(CudfTables(), spec.meta, spec.column, spec.drop_column, allocate_device)


#: Full name of cuDF's DataFrame. Not imported, because a scheduler may have no GPU.
_CUDF = "cudf.core.dataframe.DataFrame"

#: Frame adapters by the full type name of a shuffle's meta. Names must match exactly: a subclass
#: carries state that the adapter of its base would lose.
ADAPTERS: dict[str, Callable[[FrameSpec], FrameAdapter]] = {
    "pandas.DataFrame": _open_pandas,
    "pandas.core.frame.DataFrame": _open_pandas,
    "geopandas.geodataframe.GeoDataFrame": _open_geo,
    _CUDF: _open_cudf,
}


def frame_kind(meta: Any) -> str:
    """Return the name of a kind of frame in `ADAPTERS`."""
    return f"{type(meta).__module__}.{type(meta).__qualname__}"


def obstacle(meta: Any) -> str | None:
    """Return why a run cannot carry frames like this one, or None if it can."""
    kind = frame_kind(meta)
    if kind not in ADAPTERS:
        return "there is no adapter for this kind of data"
    if kind != _CUDF:
        return None
    # Not at import: every scheduler imports this module, and a program may need no pandas.
    from dask_gpurt.frames.device.carried_types import is_carried

    levels = meta.index.dtypes if meta.index.nlevels > 1 else {meta.index.name: meta.index.dtype}
    for what, dtypes in (("column", meta.dtypes), ("index level", levels)):
        for name, dtype in dtypes.items():
            if not is_carried(dtype):
                return f"{what} {name!r} is of type {dtype}, which is not supported on devices"
    return None


#: Most bytes of inputs that wait for other inputs of their task. A task takes at most half of this
#: from memory. Inputs that a task makes itself, for example from a file, may be of any size.
MOST_WAITING_NBYTES = 32 << 20


class _Given(NamedTuple):
    """Numbers of the inputs that an execution has handed over, and those that wait for others."""

    start_s: float
    numbers: set[int]
    waiting: dict[int, Any]


class TaskInputs:
    """Inputs that a task hands over one after the other, until all of them are there.

    They are cut together. To cut an input has a fixed cost, most of all in pandas, however small
    the input is. And the shards of a small input alone would be far too small.

    An input that is larger than its share of `MOST_WAITING_NBYTES` does not wait. Only the first
    estimate of its own size decides, although estimates change later. A task that runs again
    therefore forms the same groups. The store needs that: it recognises a second attempt by the
    lowest number in a group.

    Each execution of a task counts alone. One that began in an earlier run, and then fails, has
    handed over only a part of its inputs here.
    """

    def __init__(self) -> None:
        self._given: dict[Any, _Given] = {}
        self._is_large: dict[int, bool] = {}

    def add(self, execution: Execution, partition: int, data: Any, nbytes: float) -> list[Inputs]:
        """Return groups of inputs to cut now: a large one alone; small ones once all are there."""
        task, start_s, n_inputs = execution
        given = self._given.get(task)
        if given is None or given.start_s != start_s:
            given = self._given[task] = _Given(start_s, set(), {})
        given.numbers.add(partition)
        groups: list[Inputs] = []
        if self._is_large.setdefault(partition, nbytes * n_inputs > MOST_WAITING_NBYTES):
            groups.append([(partition, data)])
        else:
            given.waiting[partition] = data
        if len(given.numbers) == n_inputs:
            # `clear` may have removed the task meanwhile.
            self._given.pop(task, None)
            if given.waiting:
                groups.append(sorted(given.waiting.items(), key=itemgetter(0)))
        return groups

    def clear(self) -> None:
        """Forget the inputs of tasks that failed half-way."""
        self._given.clear()


class _Opened(NamedTuple):
    """Input partitions of one layout, the order of their rows by slot, and the rows of slots."""

    partition: GatheredRows
    order: Any
    rows: RowsBySlot


class FrameRun(ExchangeRun):
    """One attempt at the shuffle of a DataFrame, on one worker."""

    def __init__(
        self,
        spec: FrameSpec,
        run_id: int,
        span_id: str | None,
        worker_for: dict[int, str],
        plugin: ShuffleWorkerPlugin,
    ) -> None:
        self._frames = ADAPTERS[spec.frame_kind](spec)
        self._task_inputs = TaskInputs()
        super().__init__(
            spec,
            spec.settings,
            spec.frame_kind,
            self._frames,
            run_id,
            span_id,
            ExchangePlan(worker_for, spec.read_order, spec.keeps_outputs),
            plugin,
        )

    def _ready_groups(self, data: Any, partition_id: int) -> Sequence[Inputs]:
        opened = self._frames.open(data)
        if self._frames.join is None:
            return [[(partition_id, opened)]]
        execution, nbytes = execution_in_this_thread(self._worker), len(data) * opened.row_nbytes
        return self._task_inputs.add(execution, partition_id, opened, nbytes)

    def _shards_of(self, inputs: Inputs) -> Iterator[tuple[str, wire.ShardHeader, Any]]:
        opened = self._opened(inputs)
        wanted: list[list[tuple[str, wire.ShardHeader]]] = [[] for _ in opened]
        selections: list[list[Selection]] = [[] for _ in opened]
        source = min(source for source, _ in inputs)
        for which, worker, header, empty in self._cut(source, [one.rows for one in opened]):
            one = opened[which]
            a = header.first_slot
            b = a + header.n_slots
            leaves = worker != self.local_address
            mine = one.order[one.rows.before[a] : one.rows.before[b]]
            wanted[which].append((worker, header))
            selections[which].append(Selection(mine, leaves, empty, ascending=b - a == 1))
        for one, shards, selected in zip(opened, wanted, selections, strict=True):
            for (worker, header), made in zip(shards, one.partition.gather(selected), strict=True):
                yield worker, header, made

    def _opened(self, inputs: Inputs) -> list[_Opened]:
        """Return the rows of inputs, grouped by slot. Inputs of one layout are taken together."""
        if len(inputs) == 1:
            partition = inputs[0][1]
            order, offsets = partition.group(self._plan)
            return [_Opened(partition, order, self._rows(partition, offsets))]
        assert self._frames.join is not None
        alike: dict[bytes, list[tuple[int, OpenPartition]]] = {}
        for source, partition in inputs:
            alike.setdefault(partition.layout_key, []).append((source, partition))
        found = []
        for several in alike.values():
            try:
                found.append(self._joined(several))
            except ValueError:
                # Arrow cannot join dictionaries if their codes have too few bits for all values.
                found += [self._joined([one]) for one in several]
        return found

    def _joined(self, several: Sequence[tuple[int, OpenPartition]]) -> _Opened:
        assert self._frames.join is not None
        sources, partitions = zip(*several, strict=True)
        joined = self._frames.join(partitions)
        order, offsets, n_rows = joined.group_sources(self._plan)
        rows = self._rows(joined, offsets, sources=sources, n_rows=n_rows)
        return _Opened(joined, order, rows)

    def _rows(self, opened: GatheredRows, offsets: Any, **more: Any) -> RowsBySlot:
        before = np.asarray(offsets, dtype=np.int64)
        target_nbytes = self._frames.shard_nbytes or SHARD_TARGET_NBYTES
        return RowsBySlot(opened.layout_key, before, opened.row_nbytes, target_nbytes, **more)

    def _free(self) -> None:
        self._task_inputs.clear()
        super()._free()

    def _assemble(self, partition_id: int, pieces: Sequence[Piece]) -> Any:
        return self._frames.concatenate(pieces, self._runtime.pool.empty_alone)
