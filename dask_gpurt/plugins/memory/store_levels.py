"""Levels, tiers and packings of a worker's store, chosen by the settings and the machine.

Top levels come first: host memory, and a GPU if there is one. Tiers follow, fastest first. Only GPU
values go to pinned memory: for host values, that would be a useless copy. This module does not
decide what moves between levels (`memory.decisions.residency`), and does not connect the store to
the worker (`plugins.memory.manager`).
"""

from __future__ import annotations

import errno
import logging
import os
import tempfile
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import dask.config

from dask_gpurt.config import MemorySettings
from dask_gpurt.devices.host_memory.pinned import PinnedPool
from dask_gpurt.frames.flat.values import flatten, restore
from dask_gpurt.memory.decisions.levels import Level
from dask_gpurt.memory.files.directory import sweep
from dask_gpurt.memory.files.disk_tier import DiskTier
from dask_gpurt.memory.files.inherited import InheritedTier
from dask_gpurt.memory.files.page_cache import PageCache
from dask_gpurt.memory.host_tiers import CompressedTier, PinnedTier
from dask_gpurt.memory.store import HOST
from dask_gpurt.memory.tiers import Packing, Tier
from dask_gpurt.plugins.memory import gpu_level
from dask_gpurt.plugins.memory.gpu_level import StoreDevice
from dask_gpurt.plugins.patches import worker_memory
from dask_gpurt.plugins.patches.values import value_bytes

if TYPE_CHECKING:
    from distributed import Worker

logger = logging.getLogger("dask_gpurt.memory")

#: Number of the top level on a GPU, if there is one.
DEVICE = 1
#: Share of a host tier that is used before values move on to disk. The rest takes new values while
#: others are written: a full tier is skipped.
USUAL_SHARE = 0.8
#: Share of a worker's memory limit that may be pinned. Pinned memory reduces the room of other
#: values as it grows. It is never freed: pinning memory costs more than copying it.
PINNED_SHARE = 0.2


def parent_directory(wanted: str | None, local_directory: str) -> str:
    """Return the absolute path of the directory under which a worker spills values.

    Parameters
    ----------
    wanted
        The setting `gpurt.memory.directory`. If nothing can be written there, the worker spills
        under its local directory and logs why. Without any disk it would pause for good.
    local_directory
        The worker's own directory, which Dask has made.
    """
    # Absolute, as Dask's own is: a task may change the working directory.
    default = os.path.abspath(local_directory)
    if wanted is None:
        return default
    parent = os.path.abspath(os.path.expanduser(wanted))
    try:
        os.makedirs(parent, exist_ok=True)
        with tempfile.TemporaryFile(dir=parent):
            return parent
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return parent  # the disk tier tries again later
        logger.warning(
            "gpurt.memory.directory is %s, where nothing can be written (%s); "
            "values are spilled under %s instead",
            parent,
            error.strerror,
            default,
        )
        return default


class StoreLevels:
    """The levels of one worker's store.

    Parameters
    ----------
    stock
        The store that the worker has.
    room_nbytes
        Most bytes that values may take in memory.
    on_io
        Called with what a disk moved: `TieredStore.on_io`.

    Attributes
    ----------
    device
        None if no value of this process can be on a GPU.
    inherited_level
        Number of the level for the values that `stock` has on disk.
    """

    def __init__(
        self,
        worker: Worker,
        settings: MemorySettings,
        stock: Any,
        room_nbytes: int,
        on_io: Callable[[str, int, float], None],
    ) -> None:
        packing = Packing(
            value_bytes.safe_sizeof,
            partial(flatten, dumps=value_bytes.dumps, take_apart=value_bytes.take_apart),
            partial(restore, loads=value_bytes.loads, rebuild=value_bytes.rebuild),
        )
        self.packings = [packing]
        self.levels = [Level("memory", room_nbytes)]
        self.tiers: list[Tier] = []
        self.device: StoreDevice | None = None
        self.pinned: PinnedPool | None = None
        if gpu_level.why_no_gpu(gpu_level.local_facts()) is None:
            self.device = StoreDevice(settings, packing)
            self.packings.append(self.device.packing)
            # Its capacity is known once the GPU is open.
            self.levels.append(Level("device"))
            limit_nbytes = int(worker.memory_manager.memory_limit or 0)
            self.pinned = PinnedPool(int(PINNED_SHARE * limit_nbytes), pin=self.device.pin)
            self._add(PinnedTier(self.pinned), USUAL_SHARE)
        if settings.compressed_nbytes:
            self._add(CompressedTier(settings.compressed_nbytes), USUAL_SHARE)
        parent = parent_directory(settings.directory, worker.local_directory)
        # Dask removes the worker's own directory when the worker closes.
        own = os.path.abspath(worker.local_directory)
        aside = os.path.dirname(own) if parent == own else None
        # Users switch Dask's locks off if those of a file system do not work.
        locks = bool(dask.config.get("distributed.worker.use-file-locking", True))
        sweep(aside or parent, locks)
        disk_nbytes: int | None = settings.disk_limit_nbytes
        max_spill = worker.memory_manager.max_spill
        if disk_nbytes is None and max_spill is not False:  # 0 is a limit
            disk_nbytes = max_spill
        self.disk = DiskTier(
            parent,
            disk_nbytes,
            None if settings.compression == "none" else settings.compression,
            on_io,
            cache_takes=PageCache().takes,
            locks=locks,
            aside=aside,
        )
        self._add(self.disk)
        self.inherited = InheritedTier(worker_memory.on_disk(stock), packing.flatten)
        self._add(self.inherited)
        self.inherited_level = len(self.levels) - 1

    def _add(self, tier: Tier, share: float = 1.0) -> None:
        most_nbytes = tier.capacity_nbytes
        usual_nbytes = int(share * most_nbytes) if most_nbytes is not None else None
        self.levels.append(Level(tier.name, usual_nbytes))
        self.tiers.append(tier)

    @property
    def chains(self) -> dict[int, tuple[int, ...]]:
        """The tiers below each top level that take values: `inherited` only gives them back."""
        below = tuple(range(len(self.packings), self.inherited_level))
        if self.device is None:
            return {HOST: below}
        return {HOST: below[1:], DEVICE: below}

    @property
    def pinned_nbytes(self) -> int:
        """Host memory that is pinned."""
        return self.pinned.used_nbytes + self.pinned.idle_nbytes if self.pinned else 0
