"""The worker plugin that a trace sends to every worker, now and as workers join.

It travels as the source text of this module, as `bootstrap` does, so that a worker without this
package stays as it is. The module therefore imports nothing of this package before the plugin runs.
"""

from __future__ import annotations

import logging
from typing import Any

from distributed.diagnostics.plugin import WorkerPlugin


class TracePlugin(WorkerPlugin):
    """A worker plugin that records events of its worker, while it is registered.

    Parameters
    ----------
    trace
        Identifies the trace.
    version
        Version of dask_gpurt on the scheduler.
    limit_nbytes, full_keys
        As for `EventRecorder`.
    """

    def __init__(self, trace: str, version: str, limit_nbytes: int, full_keys: bool) -> None:
        self.name = f"gpurt-trace-{trace}"
        self._trace, self._version = trace, version
        self._limit_nbytes, self._full_keys = limit_nbytes, full_keys
        self._traced: Any = None

    async def setup(self, worker: Any) -> None:
        problem = self._begin(worker)
        try:
            await worker.scheduler.gpurt_trace_begun(
                worker=worker.address, trace=self._trace, problem=problem
            )
        except Exception as error:  # the trace, or the scheduler, is gone
            logging.getLogger("dask_gpurt").info("nothing is traced on this worker: %r", error)

    def _begin(self, worker: Any) -> str | None:
        """Begin to record, or return why not."""
        try:
            import dask_gpurt
        except ImportError:
            return "dask-gpurt is not installed there"
        if dask_gpurt.__version__ != self._version:
            return f"dask-gpurt {dask_gpurt.__version__} is there, not {self._version}"
        try:
            from dask_gpurt.plugins.tracing.traced_worker import TracedWorker

            self._traced = TracedWorker(worker, self._trace, self._limit_nbytes, self._full_keys)
        except Exception as error:
            logging.getLogger("dask_gpurt").exception("nothing is traced on this worker")
            return f"recording failed there: {repr(error)[:1000]}"
        return None

    def transition(self, key: Any, start: str, finish: str, **kwargs: Any) -> None:
        if self._traced is not None:
            self._traced.transition(key, start, finish)

    async def teardown(self, worker: Any) -> None:
        if self._traced is not None:
            await self._traced.detach()
