"""Pictures of the report that run along the time of the trace."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from dask_gpurt.tracing.amounts import rate_text, seconds_text, share_text
from dask_gpurt.tracing.report.busy_time import Column, amount_over_time
from dask_gpurt.tracing.report.task_stories import (
    CLIENT,
    COMPUTING,
    DISK,
    HELD,
    MEMORY,
    NETWORK,
    PEER,
    SCHEDULER,
    THREAD,
    WORKER,
)
from dask_gpurt.tracing.report.trace_report import TraceReport
from dask_gpurt.tracing.report.transfer_rows import TransferRow
from dask_gpurt.tracing.report.web.html_parts import (
    StripPart,
    area_svg,
    axis_html,
    strip_svg,
    text_html,
)

#: Class of the colour of each kind of segment.
COLOURS = {
    COMPUTING: "computing",
    NETWORK: "network",
    PEER: "receivers",
    MEMORY: "memory",
    DISK: "disk",
    THREAD: "thread",
    HELD: "held",
    WORKER: "loop",
    SCHEDULER: "scheduler",
    CLIENT: "client",
}
#: Parts of the strip of the critical path; of the strips of workers and links.
_N_STEPS, _N_CELLS = 400, 100
#: Workers and links that have a picture; the others are counted.
_MOST_WORKERS, _MOST_LINKS = 24, 4
#: Smaller shares are not drawn.
_LEAST = 0.005


def path_over_time(report: TraceReport) -> str:
    """Return the critical path as a strip: the cause that took most of each moment."""
    wall_s = report.wall_s
    step_s = wall_s / _N_STEPS
    seconds: list[defaultdict[tuple[str, str], float]] = [
        defaultdict(float) for _ in range(_N_STEPS)
    ]
    for one in report.path.segments:
        first, last = (min(int(s / step_s), _N_STEPS - 1) for s in (one.start_s, one.end_s))
        for i in range(first, last + 1):
            within_s = min(one.end_s, (i + 1) * step_s) - max(one.start_s, i * step_s)
            seconds[i][one.kind, one.where] += within_s
    causes = [max(found, key=lambda cause: found[cause], default=None) for found in seconds]
    parts: list[StripPart] = []
    first = 0
    for i, cause in enumerate(causes):
        if i + 1 < _N_STEPS and causes[i + 1] == cause:
            continue
        if cause is not None:
            kind, where = cause
            begin, end = first / _N_STEPS, (i + 1) / _N_STEPS
            title = f"{kind} {where}".strip() + f", from {seconds_text(begin * wall_s)}"
            parts.append(StripPart(begin, end, COLOURS[kind], title))
        first = i + 1
    return strip_svg(parts, "The critical path over time") + axis_html(wall_s)


def workers_over_time(report: TraceReport) -> str:
    """Return a strip for each worker: the share of its threads that ran tasks, or waited in one."""
    columns, edges_s = report.findings.columns, _edges(report)
    tasks, work = columns.tasks, columns.work
    is_work = columns.working_s > 0
    held_start_s, held_end_s = work.start_s[columns.held_back], work.end_s[columns.held_back]
    rows = []
    # The busiest ones, and the least busy ones: the others are between them.
    shown = report.workers
    if len(shown) > _MOST_WORKERS:
        shown = [*shown[: _MOST_WORKERS // 2], *shown[-_MOST_WORKERS // 2 :]]
    for worker in shown:
        mine = (tasks.process == worker.process) & is_work
        held = work.process[columns.held_back] == worker.process
        had_s = np.diff(edges_s.clip(*columns.life_s(worker.process))) * max(worker.n_threads, 1)
        running = _share(tasks.start_s[mine], tasks.free_s[mine], edges_s, had_s)
        waiting = np.minimum(_share(held_start_s[held], held_end_s[held], edges_s, had_s), running)
        parts: list[StripPart] = []
        for i, (top, wait) in enumerate(zip(running.tolist(), waiting.tolist(), strict=True)):
            begin, end = i / _N_CELLS, (i + 1) / _N_CELLS
            at = f"at {seconds_text(float(edges_s[i]))}"
            if top - wait > _LEAST:
                title = f"{share_text(top - wait)} ran tasks {at}"
                parts.append(StripPart(begin, end, "computing", title, 0.0, top - wait))
            if wait > _LEAST:
                title = f"{share_text(wait)} waited for peers {at}"
                parts.append(StripPart(begin, end, "receivers", title, top - wait, top))
        label = f"{worker.name}: {share_text(worker.busy_share)} busy"
        rows.append(f"<span>{text_html(label, 60)}</span>{strip_svg(parts, label, 'use')}")
    more = ""
    if len(report.workers) > len(shown):
        n_more = len(report.workers) - len(shown)
        more = f'<p class="more">The busiest and the least busy; {n_more:,} more between them.</p>'
    return f'<div class="rows">{"".join(rows)}{axis_html(report.wall_s)}</div>{more}'


def _share(start_s: Column, end_s: Column, edges_s: Column, had_s: Column) -> Column:
    """Return the share of what threads had, between neighbouring edges; 0 if that was nothing."""
    ran_s = amount_over_time(start_s, end_s, end_s - start_s, edges_s)
    return np.minimum(ran_s / np.where(had_s > 0, had_s, np.inf), 1.0)


def links_over_time(report: TraceReport) -> str:
    """Return the rate of the busiest links between hosts over time."""
    links = list(dict.fromkeys(row.link for row in report.transfers if row.is_network))
    rows: dict[str, TransferRow] = {}
    for row in report.transfers:
        if row.is_network:
            rows.setdefault(row.link, row)
    hops, edges_s = report.findings.columns.hops, _edges(report)
    drawn = []
    for link in links[:_MOST_LINKS]:
        source, target = (hops.hosts.index(host) for host in (rows[link].source, rows[link].target))
        mine = (hops.source == source) & (hops.target == target)
        order = np.argsort(hops.wire_end_s[mine], kind="stable")
        arrived_s, nbytes = hops.wire_end_s[mine][order], hops.nbytes[mine][order]
        # Bytes that waited behind others moved after these had arrived.
        began_s = np.maximum(hops.start_s[mine][order], np.append(-np.inf, arrived_s[:-1]))
        nbytes = amount_over_time(began_s, arrived_s, nbytes, edges_s)
        rate, limit = nbytes / np.diff(edges_s), rows[link].bandwidth
        most = max(float(rate.max()), limit)
        label = f"{link}: up to {rate_text(float(rate.max()))}"
        label += f"; it can carry {rate_text(limit)}" if limit else ""
        drawn.append(f"<h3>{text_html(label)}</h3>{area_svg(rate, most, limit, label)}")
        drawn.append(axis_html(report.wall_s))
    if not drawn:
        return '<p class="faint">No bytes went from one host to another.</p>'
    n_more = len(links) - _MOST_LINKS
    more = f'<p class="more">and {n_more:,} more links</p>' if n_more > 0 else ""
    return f'<div class="box">{"".join(drawn)}{more}</div>'


def _edges(report: TraceReport) -> np.ndarray:
    return np.linspace(0.0, max(report.wall_s, 1e-9), _N_CELLS + 1)
