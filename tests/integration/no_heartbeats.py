"""A preload of workers that stops their heartbeats."""

from __future__ import annotations

from distributed import Worker

NEVER_MS = 1e9


def dask_setup(worker: Worker) -> None:
    worker.periodic_callbacks["heartbeat"].callback_time = NEVER_MS
