"""The recorder of `dask gpurt profile`: it also traces the first cluster of a script.

`command.run` runs the script and reports. The trace begins when the script's first client connects,
and ends before that client or its cluster closes. The file is written when the script has ended.
"""

from __future__ import annotations

import shlex
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from dask_gpurt.command.layout import terminal_width
from dask_gpurt.command.observe import Recorder
from dask_gpurt.command.traces.report_text import as_text
from dask_gpurt.plugins.tracing.cluster_trace import ClusterTrace, Keys
from dask_gpurt.tracing import files
from dask_gpurt.tracing.report.trace_report import report_of

if TYPE_CHECKING:
    from distributed import Client

    from dask_gpurt.tracing.events import Trace


class TracingRecorder(Recorder):
    """Reads every cluster of a script, and traces the first one.

    Parameters
    ----------
    path
        File of the trace.
    keys
        Whether the trace has whole keys of tasks, or only their prefixes.
    """

    #: A trace of many workers takes a while to collect.
    last_timeout_s = 600.0

    def __init__(
        self,
        on_first: Callable[[], None],
        with_tasks: bool,
        path: Path,
        keys: Keys,
    ) -> None:
        super().__init__(on_first, with_tasks)
        self._path, self._keys = path, keys
        self._tracing: ClusterTrace | None = None
        self._traced: weakref.ref[Client] | None = None
        self._trace: Trace | None = None
        self._problem = "the script connected to no cluster"

    async def begin(self, client: Client) -> None:
        """Start to read a client, and to trace its cluster if it is the first one."""
        await super().begin(client)
        if self._traced is not None:
            return
        self._traced = weakref.ref(client)
        tracing = ClusterTrace(client, self._path, self._keys)
        try:
            await tracing.begin()
        except Exception as error:  # the script must run all the same
            self._problem = str(error) or type(error).__name__
        else:
            self._tracing = tracing
            self._problem = "the cluster was gone before its trace was read"

    async def read_last(self, client: Client) -> None:
        """End the trace of this client, and read it for the last time."""
        if self._traced is not None and self._traced() is client:
            tracing, self._tracing = self._tracing, None
            if tracing is not None:
                try:
                    self._trace = await tracing.collect()
                except Exception as error:
                    self._problem = str(error) or type(error).__name__
        await super().read_last(client)

    def closing_text(self) -> str:
        """Write the file, and return the report of the trace, or why there is none."""
        if self._trace is None:
            return f"no trace is written: {self._problem}"
        try:
            files.write(self._trace, self._path)
            # From the file, so that `dask gpurt report` says the same.
            trace = files.read(self._path)
        except OSError as error:
            return f"no trace is written: {error}"
        self.has_verdict = True
        lines = [as_text(report_of(trace), terminal_width(sys.stderr)), ""]
        if (n := len(self._records)) > 1:
            lines.append(f"The script used {n} clusters; the first was traced.")
        lines.append(f"Trace: {self._path}. Open it at ui.perfetto.dev.")
        if trace.tasks:
            name = shlex.quote(str(self._path))
            lines.append(f"Time on other machines: dask gpurt predict {name}")
        return "\n".join(lines)
