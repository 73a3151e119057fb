"""Local clusters that other users of the machine cannot connect to.

Dask's workers run any code that a connection sends, and every user of a machine can connect to its
loopback. Clusters started here accept only encrypted connections. Each has its own certificate,
kept in memory. Their dashboards open only with the key in their address.
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
    """Return the security settings of one cluster, with a new certificate.

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


def start(
    n_workers: int | None, threads_per_worker: int | None, memory_limit_nbytes: int | None = None
) -> LocalCluster:
    """Start a cluster of processes that only accepts connections with its own certificate.

    Parameters
    ----------
    n_workers, threads_per_worker, memory_limit_nbytes
        None uses the default of `LocalCluster`: as much of the machine as this process may use.

    Raises
    ------
    InsecureClusterError
        As `temporary_security`.
    """
    import dask.config
    from distributed import LocalCluster

    # Pages over HTTP show tasks and logs to every user. `offer_dashboard` adds them behind a key.
    pages: dict[str, list[str]] = {
        "distributed.scheduler.http.routes": [],
        "distributed.worker.http.routes": [],
    }
    security = temporary_security()
    with dask.config.set(pages):
        return LocalCluster(  # type: ignore[no-untyped-call]
            n_workers=n_workers,
            threads_per_worker=threads_per_worker,
            memory_limit="auto" if memory_limit_nbytes is None else memory_limit_nbytes,
            processes=True,
            host="127.0.0.1",
            security=security,
            # Also applies to workers that start later to replace others.
            config=pages,
            # With None, the scheduler would still open port 8787, and warn if it cannot.
            dashboard_address="127.0.0.1:0",
            scheduler_kwargs={"dashboard": False},
            # distributed announces every shuffle with a warning.
            silence_logs=logging.ERROR,
        )


def offer_dashboard(cluster: LocalCluster) -> str | None:
    """Return the address of the dashboard of a cluster that `start` returned; None without Bokeh.

    The address has a key, without which the dashboard answers nothing. It is started when the
    address is opened, and costs nothing before.
    """
    from dask_gpurt.plugins.patches.shown.keyed_dashboard import KeyedDashboard, has_bokeh

    scheduler = cluster.scheduler
    assert scheduler is not None
    return KeyedDashboard(scheduler).address if has_bokeh() else None
