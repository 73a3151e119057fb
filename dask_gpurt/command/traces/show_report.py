"""``dask gpurt report``: print the report of a trace as text or JSON, or write it as a page."""

from __future__ import annotations

from pathlib import Path

from dask_gpurt.command.json_text import to_json
from dask_gpurt.command.layout import terminal_width
from dask_gpurt.command.traces.report_text import as_text
from dask_gpurt.errors import TraceFileError
from dask_gpurt.tracing import files
from dask_gpurt.tracing.report.trace_report import report_of
from dask_gpurt.tracing.report.web.report_page import report_page


def show(path: Path, as_json: bool, html: Path | None) -> int:
    """Print the report of the trace in a file, or write it to `html` as a page.

    Returns
    -------
    int
        Always 0, whether a rule found a bottleneck or not.

    Raises
    ------
    TraceFileError
        There is no such file, it is damaged, or the page cannot be written.
    """
    if html is not None and html.exists() and path.exists() and html.samefile(path):
        raise TraceFileError(f"{html} is the trace itself; name another file for the page")
    report = report_of(files.read(path))
    if html is not None:
        try:
            html.write_text(report_page(report, path.name), encoding="utf-8")
        except OSError as error:
            raise TraceFileError(f"cannot write {html}: {error.strerror or error}") from error
    if as_json:
        print(to_json(report.to_dict()))
    elif html is None:
        print(as_text(report, terminal_width()))
    else:
        print(f"wrote {html}: {report.headline}")
    return 0
