"""State that the workers of one simulation share: the cluster, the tasks, and what happened."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import dask
from dask.typing import Key
from dask.utils import parse_bytes

from dask_gpurt.simulate.clock import VirtualClock
from dask_gpurt.simulate.cluster_model import ClusterModel
from dask_gpurt.simulate.result import TaskRun, TransferRun
from dask_gpurt.simulate.transfers import Transfers
from dask_gpurt.simulate.workload import TaskModel

if TYPE_CHECKING:
    from dask_gpurt.plugins.simulation.simulated_exchange import ModelledExchange
    from dask_gpurt.plugins.simulation.simulated_worker import ModelledWorker


@dataclass(frozen=True)
class Limits:
    """Limits that a worker process reads from Dask's configuration.

    Attributes
    ----------
    incoming_count, outgoing_count
        Concurrent transfers.
    message_nbytes
        Size of one transfer, unless it has a single result.
    memory_fraction
        Share of a worker's memory that may be in flight to it.
    """

    incoming_count: int
    outgoing_count: int
    message_nbytes: int
    memory_fraction: float

    @classmethod
    def from_config(cls) -> Limits:
        """Return the limits of a worker that starts now."""
        setting = dask.config.get
        return cls(
            incoming_count=setting("distributed.worker.connections.incoming"),
            outgoing_count=setting("distributed.worker.connections.outgoing"),
            message_nbytes=parse_bytes(setting("distributed.worker.transfer.message-bytes-limit")),
            memory_fraction=setting("distributed.worker.memory.transfer") or math.inf,
        )


@dataclass
class Exchanges:
    """Shuffles of a simulation, by the keys of their tasks."""

    of_transfer: dict[Key, ModelledExchange] = field(default_factory=dict)
    of_barrier: dict[Key, ModelledExchange] = field(default_factory=dict)
    of_output: dict[Key, list[ModelledExchange]] = field(default_factory=dict)


@dataclass
class SharedState:
    """State shared by the workers of one simulation.

    Attributes
    ----------
    send
        Sends a message from a worker (by address) to the scheduler.
    models
        Duration and size of each task.
    next_use
        Returns when a result is needed next, as a number that grows with time.
    exchanges
        Shuffles by the keys of their tasks.
    done
        Keys of the tasks that have run.
    """

    clock: VirtualClock
    cluster: ClusterModel
    transfers: Transfers
    models: dict[Key, TaskModel]
    send: Callable[[str, dict[str, Any]], None]
    limits: Limits
    next_use: Callable[[Hashable], float]
    exchanges: Exchanges = field(default_factory=Exchanges)
    workers: dict[str, ModelledWorker] = field(default_factory=dict)
    tasks: list[TaskRun] = field(default_factory=list)
    moved: list[TransferRun] = field(default_factory=list)
    link_nbytes: dict[str, int] = field(default_factory=dict)
    done: set[Key] = field(default_factory=set)

    def count_on_links(self, links: Iterable[str], nbytes: int) -> None:
        """Count bytes that have passed links."""
        for link in links:
            self.link_nbytes[link] = self.link_nbytes.get(link, 0) + nbytes
