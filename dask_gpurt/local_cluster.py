"""Clusters that this package starts on the user's own machine, which nobody else may use.

Dask's workers run whatever code a connection sends, and every user of a machine can connect to its
loopback. These clusters take encrypted connections alone, with a certificate that is made for each
of them and kept in memory.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from dask_gpurt.errors import GpurtError

if TYPE_CHECKING:
    from distributed import LocalCluster
    from distributed.security import Security


class InsecureClusterError(GpurtError, RuntimeError):
    """A cluster was not started, because other users of the machine could use it."""


def temporary_security() -> Security:
    """A certificate for one cluster, and the settings that require it.

    Raises
    ------
    InsecureClusterError
        The package that makes certificates is missing.
    """
    from distributed.security import Security

    try:
        found: Security = Security.temporary()  # type: ignore[no-untyped-call]
    except ImportError as error:
        raise InsecureClusterError(
            "the package cryptography is missing, and without it every user of this machine could"
            " run code on the cluster; run `pip install cryptography`, or start a cluster of your"
            " own"
        ) from error
    return found


def start(n_workers: int | None, threads_per_worker: int | None) -> LocalCluster:
    """Start a cluster of processes that only takes connections with its own certificate.

    Parameters
    ----------
    n_workers, threads_per_worker
        None leaves it to `LocalCluster`, which takes what this process may use of the machine.

    Raises
    ------
    InsecureClusterError
        As `temporary_security`.
    """
    import dask.config
    from distributed import LocalCluster

    # Pages over HTTP are not encrypted. They tell of tasks and show logs to everybody.
    pages: dict[str, list[str]] = {
        "distributed.scheduler.http.routes": [],
        "distributed.worker.http.routes": [],
    }
    security = temporary_security()
    with dask.config.set(pages):
        return LocalCluster(  # type: ignore[no-untyped-call]
            n_workers=n_workers,
            threads_per_worker=threads_per_worker,
            processes=True,
            host="127.0.0.1",
            security=security,
            # For workers that are started later, in place of others.
            config=pages,
            # With None the scheduler would still take port 8787, and say so if it cannot.
            dashboard_address="127.0.0.1:0",
            scheduler_kwargs={"dashboard": False},
            # Every shuffle is announced as a warning.
            silence_logs=logging.ERROR,
        )
