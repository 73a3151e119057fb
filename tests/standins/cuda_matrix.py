"""A plugin of pytest: the failure matrix has device frames in its workers, and UCX alone."""

from __future__ import annotations

import dask

from tests.failure import stage


def pytest_configure() -> None:
    for transport in set(stage.TRANSPORTS) - {"ucx"}:
        del stage.TRANSPORTS[transport]
    dask.config.set({"distributed.worker.preload": ["tests.standins.cuda_worker"]})
