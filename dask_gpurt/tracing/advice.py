"""Advice that rules over a cluster's figures and rules over a trace both give."""

from __future__ import annotations

SLOW_WORKER = (
    "Look for other programs, fewer processors, or a hot or throttled machine on that host, or "
    "leave it out."
)
#: Skew where a few keys have many rows.
HOT_KEYS = (
    "Treat hot keys apart, often nulls or a default: drop them, aggregate first, or broadcast the "
    "small side of a join."
)
#: Skew where a worker has too many rows of many keys.
UNEVEN_PARTITIONS = "Use more output partitions, and input partitions of more than 10,000 rows."
#: Many small messages of a shuffle of frames.
SMALL_PARTITIONS = (
    "Make fewer, larger partitions before the shuffle, with `repartition` or a larger "
    "`blocksize`, and pass a smaller `npartitions` to it."
)
SLOW_RECEIVERS = (
    "Find out what slows the receivers: their processors, their disks, or other programs."
)
MEMORY_WAIT = (
    "Make partitions smaller, start fewer threads on each worker, or give workers more memory."
)
RESTARTS = "See the log lines of the scheduler and the workers: workers died, or results were lost."


def of_fallback(why: str) -> str:
    """Return the advice for a shuffle that ran on stock Dask, given the reason."""
    if "pip install" in why:
        return "Install the package there, and restart the worker."
    if "no adapter" in why:
        return "Use DataFrames of pandas, GeoPandas or cuDF themselves, and not of a subclass."
    if "no word from worker" in why:
        return "Check the log of that worker, or restart it."
    return "See the reason, and the logs of the scheduler and the workers."


#: The share of memory for shards that advice names.
_MORE_FOR_SHARDS = 0.5


def more_for_shards(now: object) -> str:
    """Return the setting that gives shards more memory; empty if they have as much already.

    Parameters
    ----------
    now
        `gpurt.shuffle.memory`, a share or bytes; None if it is unknown.
    """
    is_more = isinstance(now, int | float) and now >= _MORE_FOR_SHARDS
    return "" if is_more else f"gpurt.shuffle.memory: {_MORE_FOR_SHARDS}"


def of_spill(is_shards: bool, memory_now: object = None) -> tuple[str, str]:
    """Return the advice if data went to disk, and the setting to paste.

    Parameters
    ----------
    is_shards
        Whether it was data of shuffles, not outputs of tasks.
    memory_now
        As for `more_for_shards`.
    """
    if is_shards:
        setting = more_for_shards(memory_now)
        if setting:
            return (
                "Let shards have more of the workers' memory if some is free, or add workers.",
                setting,
            )
        return "Give workers more memory, or add workers.", ""
    return "Make partitions smaller, release results, or give workers more memory.", ""
