"""dask_gpurt: a data-movement runtime for Dask.

Set `DASK_GPURT__ENABLED=true` and run a Dask program as it is. This module has the functions for
programs that switch the runtime on or off on an existing client, or ask what it does.

Importing this package imports nothing else of it, neither Dask nor distributed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from os import PathLike
    from typing import Literal

    from distributed import Client

__version__ = "0.1.0"
__all__ = ["__version__", "disable", "enable", "explain", "progress", "status", "trace"]


def enable(client: Client) -> Any:
    """Switch the runtime on for the cluster of a client.

    The `gpurt.*` settings of this process apply to the cluster from now on; `gpurt.enabled` is
    ignored. If the runtime is already on, the new settings replace the old ones, with two
    exceptions. `gpurt.memory` applies to workers that start afterwards, and
    `gpurt.collectives.enabled` stays as it is until `disable`.

    Parameters
    ----------
    client : distributed.Client
        A connected client.

    Returns
    -------
    None or awaitable
        None. With an asynchronous client: an awaitable of None.

    Raises
    ------
    ActivationError
        The runtime cannot run on this cluster. The message names the process and the remedy.
        Stock Dask continues to work.
    ConfigError
        A `gpurt.*` setting, or the file that describes the machines, is invalid.

    See Also
    --------
    disable : Switch the runtime off.

    Examples
    --------
    >>> import dask_gpurt
    >>> from distributed import Client
    >>> client = Client()
    >>> dask_gpurt.enable(client)
    >>> dask_gpurt.status(client)["active"]
    True
    """
    from dask_gpurt.plugins import activation

    return activation.enable(client)


def disable(client: Client) -> Any:
    """Switch the runtime off and restore stock Dask on a running cluster.

    Shuffles in progress finish on the runtime. If the runtime is off already, nothing changes.

    Parameters
    ----------
    client : distributed.Client
        A connected client.

    Returns
    -------
    None or awaitable
        None. With an asynchronous client: an awaitable of None.

    Raises
    ------
    ActivationError
        The client is not connected to a scheduler.

    See Also
    --------
    enable : Switch the runtime on.

    Examples
    --------
    >>> dask_gpurt.enable(client)
    >>> dask_gpurt.disable(client)
    >>> dask_gpurt.status(client)["reason"]
    'disabled by a client'
    """
    from dask_gpurt.plugins import activation

    return activation.disable(client)


def status(client: Client) -> Any:
    """Return what the runtime does on a cluster: activity, fallbacks, counters.

    Parameters
    ----------
    client : distributed.Client
        A connected client. The runtime may be on or off.

    Returns
    -------
    dict or awaitable
        A notebook shows it as tables. With an asynchronous client, an awaitable of the dict. Its
        most useful entries:

        ``active`` : bool
            Whether the runtime is on; if not, ``reason`` says why.
        ``runs`` : dict
            Number of shuffle runs on the runtime (``"gpurt"``) and on stock Dask (``"stock"``).
        ``fallbacks`` : list of dict
            Shuffles left to stock Dask, each with ``what``, ``why`` and ``count``.
        ``workers`` : dict
            Report of each worker by address: its counters and its transport to each peer.
        ``placement`` : dict or None
            Number of tasks placed, and of tasks placed on another worker than stock Dask would
            choose. None if the runtime does not place tasks.
        ``totals`` : dict
            Counters summed over all workers, including workers that left, since the runtime was
            last switched on. `dask_gpurt.metrics.MEANING` explains each counter.
        ``spent`` : dict
            Seconds and bytes of all workers, by what they were spent on, since then too.
            `dask_gpurt.metrics.SPENT` explains each.
        ``departed`` : dict
            Number of ``workers`` that left, and their ``totals``.
        ``shuffles`` : list of dict
            The last runs on the runtime, each with rows, bytes, seconds by phase, busiest link,
            skew and hot partitions. See `dask_gpurt.shuffle.figures.RunSum.summary`.

    Raises
    ------
    ActivationError
        The client is not connected to a scheduler.

    See Also
    --------
    explain : Ask about one task.
    progress : Watch a block of a program.

    Examples
    --------
    >>> dask_gpurt.enable(client)
    >>> shuffled = df.shuffle("name").compute()
    >>> dask_gpurt.status(client)["runs"]
    {'gpurt': 1, 'stock': 0}
    """
    from dask_gpurt.plugins import activation

    return activation.status(client)


def progress(client: Client) -> Any:
    """Show what shuffles move while a block runs, and the sum when it ends.

    A notebook shows one output below the cell: the running shuffles with phase, percentage, bytes
    and skew, and what each worker holds. Elsewhere, standard error gets the line and the report of
    `dask gpurt run`; the line only on a terminal. The block runs as without it, errors included.

    Parameters
    ----------
    client : distributed.Client
        A connected client. The runtime may be on or off.

    Returns
    -------
    context manager
        For `with`. With an asynchronous client, for `async with`.

    Raises
    ------
    ActivationError
        The client is not connected to a scheduler. Raised where the block begins.
    TypeError
        The client needs the other kind of `with`. Raised where the block begins.

    See Also
    --------
    status : Ask what has moved since the runtime is on.

    Examples
    --------
    >>> with dask_gpurt.progress(client):
    ...     shuffled = df.shuffle("name").compute()
    """
    from dask_gpurt.command.live.live_progress import LiveProgress

    return LiveProgress(client)


def trace(
    client: Client, path: str | PathLike[str], keys: Literal["prefix", "full"] = "prefix"
) -> Any:
    """Trace the cluster while a block runs, and write the trace to a file when it ends.

    The file has tasks with their dependencies, messages, copies, reads and writes of all workers on
    one clock. Open it at ui.perfetto.dev. The block runs as without it, errors included. With the
    runtime off, the trace has tasks and samples alone, and a warning says so.

    Parameters
    ----------
    client : distributed.Client
        A connected client.
    path : str or PathLike
        File to write.
    keys : {"prefix", "full"}
        Whether the file has only the prefixes of keys, such as ``read-parquet``, or whole keys.
        Keys may hold user data.

    Returns
    -------
    context manager
        For `with`. With an asynchronous client, for `async with`.

    Raises
    ------
    ActivationError
        The client is not connected, or the scheduler has another version of this package or none.
        Raised where the block begins.
    TraceFileError
        No file can be written at `path`. Raised where the block begins.
    TraceInProgressError
        This cluster is being traced already. Raised where the block begins.
    TracingError
        The trace was lost: the client was closed in the block, or the scheduler does not answer.
        Raised where the block ends, unless the block raised an error itself.

    See Also
    --------
    progress : Watch a block of a program.

    Examples
    --------
    >>> with dask_gpurt.trace(client, "shuffle.json.gz"):
    ...     shuffled = df.shuffle("name").compute()
    """
    from dask_gpurt.plugins.tracing.cluster_trace import ClusterTrace

    return ClusterTrace(client, path, keys)


def explain(client: Client, key: Any) -> Any:
    """Return why a task ran on its worker, and where its output is stored.

    Parameters
    ----------
    client : distributed.Client
        A connected client.
    key : Key or Future
        Key of the task, or its future.

    Returns
    -------
    dict or awaitable
        With an asynchronous client, an awaitable of the dict. Its entries:

        ``known`` : bool
            Whether the placement decision is on record; if not, ``reason`` says why. The scheduler
            keeps only its latest decisions.
        ``worker``, ``reason`` : str
            The chosen worker, and why.
        ``stock_worker`` : str or None
            The worker that stock Dask would have chosen; None if the rule did not need it.
        ``saved_s`` : float or None
            Estimated seconds saved compared to stock Dask's choice; None if they were not compared.
        ``candidates`` : list of dict
            Workers considered, cheapest first, each with the terms of its cost in seconds. See
            `dask_gpurt.placement.cost.Cost`.
        ``memory`` : dict
            For each worker that holds the output and manages its memory: ``levels`` with the bytes
            in each, and a ``reason``. Present even if ``known`` is false. See
            `dask_gpurt.memory.store_report.explained`.
        ``broadcast`` : dict or None
            How the output was copied to many workers: ``copies``, ``hosts``, ``slices``,
            ``seconds``, and ``stock_s``, the seconds that stock Dask would have taken at least.

    Raises
    ------
    ActivationError
        The client is not connected to a scheduler.
    TypeError
        `key` is neither a key nor a future.

    See Also
    --------
    status : Ask about the whole cluster.

    Examples
    --------
    >>> future = client.submit(sum, [1, 2, 3])
    >>> explanation = dask_gpurt.explain(client, future)
    >>> explanation["known"], explanation["worker"]
    (True, 'tcp://127.0.0.1:36543')
    """
    from dask_gpurt.plugins import activation

    return activation.explain(client, key)
