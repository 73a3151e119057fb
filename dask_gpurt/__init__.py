"""dask_gpurt: the data-movement runtime for Dask.

Set `DASK_GPURT__ENABLED=true` and run a Dask program as it is. The functions here are for programs
that want to switch the runtime on a client they already have, or look at what it does.

Importing this package loads nothing else of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distributed import Client

__version__ = "0.1.0"
__all__ = ["__version__", "disable", "enable", "explain", "status"]


def enable(client: Client) -> Any:
    """Switch the runtime on for the cluster of a client. Doing so twice changes nothing.

    The `gpurt.*` settings of this process hold for the cluster from now on, whatever the flag
    says; where it is on already, those of `gpurt.memory` for workers that start from now on. With
    an asynchronous client, await the result.

    Raises
    ------
    ActivationError
        The runtime cannot be active there; says where and what to do. Stock Dask goes on.
    """
    from dask_gpurt.plugins import activation

    return activation.enable(client)


def disable(client: Client) -> Any:
    """Give a live cluster stock behaviour back. Shuffles that are under way end as they began.

    With an asynchronous client, await the result.
    """
    from dask_gpurt.plugins import activation

    return activation.disable(client)


def status(client: Client) -> Any:
    """What is active on a cluster, what fell back to stock Dask and why, and what was moved.

    With an asynchronous client, await the result.

    Returns
    -------
    dict
        `active` and, if not, `reason`; `runs` on our data plane and on stock's; `fallbacks`, each
        with `what`, `why` and `count`; `workers` with their counters and the path to each peer;
        `placement`, how many tasks were placed and how many differently than by stock, None if
        stock places; `totals` over all workers, those that left included (bytes, as
        `dask_gpurt.metrics.MEANING` explains them), since the runtime was last switched on;
        `departed`, how many `workers` left, and their `totals`;
        `shuffles`, the last runs on our data plane, each with its rows, bytes, seconds by phase,
        busiest link, skew and hot partitions (see `dask_gpurt.shuffle.figures.summarised`).
    """
    from dask_gpurt.plugins import activation

    return activation.status(client)


def explain(client: Client, key: Any) -> Any:
    """Why a task ran where it did, and where its output is.

    With an asynchronous client, await the result.

    Parameters
    ----------
    key
        Of the task, or its future.

    Returns
    -------
    dict
        `known`, and if that is false `reason` says why: only the last decisions are remembered.
        Else `worker`, `reason`, `stock_worker` that stock Dask would have chosen, `saved_s` that
        this is estimated to save, and `candidates`, each with the terms of its cost in seconds
        (see `dask_gpurt.placement.cost.Cost`), the cheapest first. In both cases `memory` has for
        each worker that holds the output and manages its memory: `levels` that it is in, with its
        bytes in each, and a `reason` (see `dask_gpurt.memory.store_report.explained`).
    """
    from dask_gpurt.plugins import activation

    return activation.explain(client, key)
