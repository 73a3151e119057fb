"""Array rechunks: the spec that replaces the stock one, and the run it creates.

`frames.chunks` cuts chunks along the new chunking. An input chunk is an input partition, and
`exchange_run` does the rest. A run carries chunks of any array type. So it needs no sample before
it begins; the stock spec describes none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from distributed.protocol.pickle import dumps, loads

from dask_gpurt.config import ShuffleSettings
from dask_gpurt.frames.adapter import DEVICE_SHARD_NBYTES, Piece
from dask_gpurt.frames.chunks.arrays import Arrays
from dask_gpurt.frames.chunks.device_arrays import DeviceArrays
from dask_gpurt.frames.chunks.open_chunk import Part
from dask_gpurt.frames.chunks.rechunking import Index, Rechunking
from dask_gpurt.frames.pickling import Pickling
from dask_gpurt.plugins.memory.gpu_budget import shard_budget
from dask_gpurt.plugins.patches.p2p import ArrayRechunkSpec, join_arrays
from dask_gpurt.plugins.patches.values.value_bytes import safe_sizeof
from dask_gpurt.plugins.shuffle.exchange_run import ExchangeRun, Inputs
from dask_gpurt.plugins.shuffle.pickled_once import SpecPickledOnce
from dask_gpurt.shuffle.figures import ARRAY
from dask_gpurt.shuffle.plan import SHARD_TARGET_NBYTES, ExchangePlan, RowsBySlot
from dask_gpurt.transport import wire

if TYPE_CHECKING:
    from dask_gpurt.plugins.patches.p2p import ShuffleWorkerPlugin


def _open_cupy(settings: ShuffleSettings) -> DeviceArrays:
    from dask_gpurt.frames.device.cupy_ import CupyArrays, CupyMemory

    return CupyArrays(partial(shard_budget(settings).take, CupyMemory.empty))


#: Libraries of device arrays, by the full name of the array type.
DEVICE_ARRAYS: dict[str, Callable[[ShuffleSettings], DeviceArrays]] = {"cupy.ndarray": _open_cupy}


@dataclass(frozen=True)
class ArraySpec(SpecPickledOnce, ArrayRechunkSpec):
    """The stock description of a rechunk, run on this package's data plane.

    Attributes
    ----------
    settings
        Settings of the client that enabled the runtime.
    read_order
        Output chunks in the order of their tasks.
    """

    settings: ShuffleSettings
    read_order: tuple[Index, ...]
    keeps_outputs: bool = False

    @classmethod
    def replacing(
        cls,
        stock: ArrayRechunkSpec,
        settings: ShuffleSettings,
        read_order: Sequence[Index] = (),
        keeps_outputs: bool = False,
    ) -> ArraySpec:
        return cls(
            id=stock.id,
            disk=stock.disk,
            new=stock.new,
            old=stock.old,
            settings=settings,
            read_order=tuple(read_order),
            keeps_outputs=keeps_outputs,
        )

    def pick_worker(self, partition: Index, workers: Sequence[str]) -> str:
        """Return the owner of an output chunk: equal shares, with neighbours on one worker.

        Stock Dask numbers chunks of three and more axes so that most get low numbers. So the first
        workers get most of the chunks.
        """
        number = 0
        for position, axis in zip(partition, self.new, strict=True):
            number = number * len(axis) + position
        return workers[len(workers) * number // prod(map(len, self.new))]

    def create_run_on_worker(  # type: ignore[override]
        self,
        run_id: int,
        span_id: str | None,
        worker_for: dict[Index, str],
        plugin: ShuffleWorkerPlugin,
    ) -> ArrayRun:
        return ArrayRun(self, run_id, span_id, worker_for, plugin)


class ArrayRun(ExchangeRun):
    """One attempt at a rechunk, on one worker."""

    def __init__(
        self,
        spec: ArraySpec,
        run_id: int,
        span_id: str | None,
        worker_for: dict[Index, str],
        plugin: ShuffleWorkerPlugin,
    ) -> None:
        self._rechunking = Rechunking(spec.old, spec.new)
        self._arrays = Arrays(
            self._rechunking,
            join=join_arrays,
            devices={name: partial(made, spec.settings) for name, made in DEVICE_ARRAYS.items()},
            sizeof=safe_sizeof,
            pickling=Pickling(dumps, loads),
        )
        plan = ExchangePlan(worker_for, spec.read_order, spec.keeps_outputs)
        super().__init__(spec, spec.settings, ARRAY, self._arrays, run_id, span_id, plan, plugin)

    def _shards_of(self, inputs: Inputs) -> Iterator[tuple[str, wire.ShardHeader, Any]]:
        ((partition_id, data),) = inputs
        opened = self._arrays.open(data, partition_id)
        plan = self._plan
        parts: list[Part | None] = [None] * plan.n_slots
        for part in opened.parts:
            parts[plan.slot_of[part.output]] = part
        before = np.cumsum([0, *(part.n_rows if part else 0 for part in parts)], dtype=np.int64)
        source = self._rechunking.number(partition_id)
        shard_nbytes = DEVICE_SHARD_NBYTES if opened.is_on_device else SHARD_TARGET_NBYTES
        rows = RowsBySlot(opened.layout_key, before, opened.row_nbytes, shard_nbytes)
        for _, worker, header, empty in self._cut(source, [rows]):
            first = header.first_slot
            mine = parts[first : first + header.n_slots]
            leaves = worker != self.local_address
            yield worker, header, opened.cut([part for part in mine if part], leaves, empty)

    def _assemble(self, partition_id: Index, pieces: Sequence[Piece]) -> Any:
        return self._arrays.concatenate(partition_id, pieces, self._runtime.pool.empty_alone)
