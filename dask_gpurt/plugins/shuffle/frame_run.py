"""DataFrame shuffles: the spec that replaces the stock one, and the run it creates.

A run groups rows by receiving worker and partition (`shuffle.plan`, `frames.gather`) and cuts them
into shards; `exchange_run` does the rest. `ADAPTERS` lists the supported kinds of frame.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from distributed.protocol.pickle import dumps, loads
from distributed.sizeof import safe_sizeof

from dask_gpurt.config import ShuffleSettings
from dask_gpurt.frames.adapter import FrameAdapter, Piece, Selection
from dask_gpurt.frames.device.device_frames import DeviceFrames
from dask_gpurt.frames.pickling import Pickling
from dask_gpurt.plugins.memory.gpu_budget import shard_budget
from dask_gpurt.plugins.patches.p2p import DataFrameShuffleSpec
from dask_gpurt.plugins.shuffle.exchange_run import ExchangeRun
from dask_gpurt.plugins.shuffle.pickled_once import SpecPickledOnce
from dask_gpurt.shuffle.balance import LatestOwners
from dask_gpurt.shuffle.plan import SHARD_TARGET_NBYTES, ExchangePlan
from dask_gpurt.transport import wire

if TYPE_CHECKING:
    from dask_gpurt.plugins.patches.p2p import ShuffleWorkerPlugin


#: On the scheduler's event loop.
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

    @classmethod
    def replacing(
        cls,
        stock: DataFrameShuffleSpec,
        frame_kind: str,
        settings: ShuffleSettings,
        rows: Sequence[int] | None = None,
        read_order: Sequence[int] = (),
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
    """Pad the row counts with zeros to one per partition; return none if there are too many."""
    if not rows or len(rows) > n_partitions:
        return ()
    return (*rows, *[0] * (n_partitions - len(rows)))


def _open_pandas(spec: FrameSpec) -> FrameAdapter:
    from dask_gpurt.frames.pandas_ import PandasFrames

    return PandasFrames(
        spec.meta, spec.column, spec.drop_column, safe_sizeof, Pickling(dumps, loads)
    )


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
        super().__init__(
            spec,
            spec.settings,
            spec.frame_kind,
            self._frames,
            run_id,
            span_id,
            ExchangePlan(worker_for, spec.read_order),
            plugin,
        )

    def _shards_of(
        self, data: Any, partition_id: int
    ) -> Iterator[tuple[str, wire.ShardHeader, Any]]:
        opened = self._frames.open(data)
        plan = self._plan
        rows, offsets = opened.group(plan)
        before = np.asarray(offsets, dtype=np.int64)
        wanted: list[tuple[str, wire.ShardHeader]] = []
        selections: list[Selection] = []
        shard_nbytes = self._frames.shard_nbytes or SHARD_TARGET_NBYTES
        cuts = self._cut(partition_id, opened.layout_key, before, opened.row_nbytes, shard_nbytes)
        for worker, header, empty in cuts:
            a = header.first_slot
            b = a + header.n_slots
            wanted.append((worker, header))
            leaves = worker != self.local_address
            mine = rows[before[a] : before[b]]
            selections.append(Selection(mine, leaves, empty, ascending=b - a == 1))
        for (worker, header), made in zip(wanted, opened.gather(selections), strict=True):
            yield worker, header, made

    def _assemble(self, partition_id: int, pieces: Sequence[Piece]) -> Any:
        return self._frames.concatenate(pieces, self._state.pool.empty_alone)
