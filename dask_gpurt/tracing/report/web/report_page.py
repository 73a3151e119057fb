"""The page of a report: the verdict, the critical path, and the tables with their pictures."""

from __future__ import annotations

import datetime
import json
import re
from html import escape

from dask_gpurt.tracing.amounts import count_text, seconds_text
from dask_gpurt.tracing.bottleneck import Bottleneck
from dask_gpurt.tracing.report.table_columns import (
    GAPS,
    HAPPENINGS,
    KERNELS,
    WAITING,
    WORKERS,
    host_columns,
    path_columns,
    task_columns,
    transfer_columns,
)
from dask_gpurt.tracing.report.trace_report import TraceReport
from dask_gpurt.tracing.report.web.html_parts import table_html, text_html
from dask_gpurt.tracing.report.web.over_time import (
    COLOURS,
    links_over_time,
    path_over_time,
    workers_over_time,
)
from dask_gpurt.tracing.report.web.page_style import STYLE

#: Longest value in the list of settings.
_MOST_CHARACTERS = 2000


def report_page(report: TraceReport, name: str) -> str:
    """Return the page as a complete document, which is well-formed XML too.

    Parameters
    ----------
    name
        Name of the trace, for the title.
    """
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'"/>
<title>{text_html(name)}: dask_gpurt report</title>
<style>{STYLE}</style>
</head>
<body>
<main>
<h1>{text_html(name)}</h1>
<p class="faint">{_about_line(report)}</p>
{_verdict(report)}
{_path(report)}
{_workers(report)}
{_transfers(report)}
{_tasks(report)}
{_gaps(report)}
{_happenings(report)}
{_kernels(report)}
{_notes(report)}
</main>
</body>
</html>
"""


def _about_line(report: TraceReport) -> str:
    trace = report.findings.columns.trace
    parts = [
        seconds_text(report.wall_s),
        count_text(len(report.workers), "worker"),
        count_text(report.findings.n_threads, "thread"),
        count_text(len(trace.tasks), "task"),
    ]
    if trace.began_utc_s:
        began = datetime.datetime.fromtimestamp(trace.began_utc_s, datetime.UTC)
        parts.append(f"began {began:%Y-%m-%d %H:%M:%S} UTC")
    return escape(", ".join(parts))


def _verdict(report: TraceReport) -> str:
    headline = f'<p class="headline">{text_html(report.headline, 1000)}</p>'
    if not report.bottlenecks:
        return f'{headline}<p class="box">{text_html(report.closing)}</p>'
    return f'{headline}<ol class="verdict">{"".join(map(_bottleneck, report.bottlenecks))}</ol>'


def _bottleneck(one: Bottleneck) -> str:
    saves = ""
    if one.saves_s is not None:
        saves = f'<span class="saves">saves up to {seconds_text(one.saves_s)}</span>'
    setting = f"<code>{text_html(one.setting)}</code>" if one.setting else ""
    return (
        f'<li class="box" id="{escape(one.rule)}">{saves}<b>{escape(one.rule)}</b>'
        f"<p>{text_html(one.evidence, 1000)}.</p><p>{_advice(one.advice)}</p>{setting}</li>"
    )


def _advice(advice: str) -> str:
    """Return advice, with names of functions between backticks set apart."""
    return re.sub("`([^`]+)`", r'<code class="name">\1</code>', text_html(advice, 1000))


def _path(report: TraceReport) -> str:
    if not report.wall_s:
        return ""
    name, *rest = path_columns(report.wall_s)
    keys = [name._replace(colour=lambda part: COLOURS[part.kind]), *rest]
    return f"""<h2>Critical path</h2>
<p class="faint">The chain of causes that ends with the last result. What is not on it costs no
time.</p>
{path_over_time(report)}
<div class="below">{table_html(keys, report.path.parts, "")}</div>"""


def _workers(report: TraceReport) -> str:
    pictures = f'<div class="box">{workers_over_time(report)}</div>' if report.workers else ""
    return f"""<h2>Workers</h2>
<p class="faint">Threads over time, the busiest worker first: <i class="key computing"></i>ran
tasks, <i class="key receivers"></i>waited in a task for peers.{_see(report, "workers")}</p>
{pictures}
<div class="below">{table_html(WORKERS, report.workers, "The trace has no worker.")}</div>
"""


def _transfers(report: TraceReport) -> str:
    longest_s = max((row.busy_s for row in report.transfers), default=0.0) or 1.0
    columns, hosts = transfer_columns(longest_s), host_columns(longest_s)
    of_hosts = f"<p></p>{table_html(hosts, report.hosts, '')}" if report.hosts else ""
    return f"""<h2>Transfers</h2>
<p class="faint">Busiest first. The rate is that of one kind while it was busy. Kinds that move at
once share the link.{_see(report, "transfers")}</p>
{table_html(columns, report.transfers, "Nothing moved.")}
{of_hosts}
<div class="below">{links_over_time(report)}</div>"""


def _tasks(report: TraceReport) -> str:
    most_s = max((row.task_s for row in report.tasks), default=0.0) or 1.0
    return f"""<h2>Tasks</h2>
<p class="faint">By prefix. Times are added up over threads.{_see(report, "tasks")}</p>
{table_html(task_columns(most_s), report.tasks, "No task ran.")}
<h2>Tasks that waited for data</h2>
<p class="faint">From the scheduler's decision where a task runs until its inputs were there, added
up over tasks.{_see(report, "waits")}</p>
{table_html(WAITING, report.waiting, "No task waited for data.")}"""


def _gaps(report: TraceReport) -> str:
    return f"""<h2>Idle threads</h2>
<p class="faint">Gaps from 0.1 s between tasks: {seconds_text(report.gaps.total_s)} over all
threads.{_see(report, "idle threads")}</p>
{table_html(GAPS, report.gaps.rows, "No thread was idle for as long.")}"""


def _happenings(report: TraceReport) -> str:
    if not report.happenings:
        return ""
    return f"""<h2>What happened</h2>
<p class="faint">The rarest first.{_see(report, "happenings")}</p>
{table_html(HAPPENINGS, report.happenings, "")}"""


def _kernels(report: TraceReport) -> str:
    if not report.kernels:
        return ""
    return f"""<h2>Kernels of GPUs</h2>
<p class="faint">Busiest first, over all launches.</p>
{table_html(KERNELS, report.kernels, "")}"""


def _see(report: TraceReport, section: str) -> str:
    """Return the rules of the verdict that a section shows."""
    rules = report.rules_about(section)
    return f" See <b>{'</b>, <b>'.join(map(escape, rules))}</b> above." if rules else ""


def _notes(report: TraceReport) -> str:
    notes = "".join(f"<li>{text_html(note)}</li>" for note in report.notes[:20])
    if len(report.notes) > 20:
        notes += f"<li>and {len(report.notes) - 20:,} more</li>"
    lacks = f"<h2>What the trace lacks</h2><ul>{notes}</ul>" if notes else ""
    items = "".join(
        f"<dt>{text_html(str(name))}</dt><dd>{_value(value)}</dd>"
        for name, value in report.about.items()
    )
    about = f'<h2>Program and settings</h2><dl class="box">{items}</dl>' if items else ""
    return lacks + about


def _value(value: object) -> str:
    is_text = isinstance(value, str)
    return text_html(value if is_text else json.dumps(value, default=str), _MOST_CHARACTERS)  # type: ignore[arg-type]
