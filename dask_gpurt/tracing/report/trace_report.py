"""The whole report of a trace, as values: the verdict first, then the tables."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from dask_gpurt.tracing.amounts import count_text, seconds_text, share_text
from dask_gpurt.tracing.bottleneck import Bottleneck
from dask_gpurt.tracing.events import Trace
from dask_gpurt.tracing.report.critical_path import CriticalPath, critical_path
from dask_gpurt.tracing.report.event_columns import Columns
from dask_gpurt.tracing.report.happenings import (
    Happening,
    KernelRow,
    happenings,
    kernel_rows,
)
from dask_gpurt.tracing.report.host_rows import HostRow, host_rows
from dask_gpurt.tracing.report.idle_gaps import IdleGaps, idle_gaps
from dask_gpurt.tracing.report.rules.findings import Findings
from dask_gpurt.tracing.report.rules.processor_rules import processors
from dask_gpurt.tracing.report.rules.task_rules import TASK_RULES
from dask_gpurt.tracing.report.rules.transfer_rules import TRANSFER_RULES
from dask_gpurt.tracing.report.task_rows import TaskRow, task_rows
from dask_gpurt.tracing.report.task_stories import TaskStories
from dask_gpurt.tracing.report.transfer_rows import TransferRow, transfer_rows
from dask_gpurt.tracing.report.worker_rows import WorkerRow, worker_rows

#: Sections of the report, and the rules whose evidence is there.
SECTIONS = {
    "transfers": {"slow-link", "compression", "small-messages", "pageable-copies", "spill"},
    "workers": {"skew", "slow-worker", "processors", "back-pressure"},
    "tasks": {"skew", "few-partitions", "too-many-partitions"},
    "waits": {"memory-wait", "scheduler-bound", "slow-link"},
    "idle threads": {"idle-threads", "client-bound", "few-partitions", "slow-worker"},
    "happenings": {"restarts"},
}
#: The clock of a process is named if its error can be larger.
_SMALL_ERROR_S = 0.005


@dataclass(frozen=True)
class TraceReport:
    """Where the time of a traced program went.

    Attributes
    ----------
    bottlenecks
        What limited the program, by what the change could save.
    notes
        Gaps of the trace: events that were dropped, recordings that ended early.
    """

    wall_s: float
    path: CriticalPath
    bottlenecks: list[Bottleneck]
    transfers: list[TransferRow]
    hosts: list[HostRow]
    workers: list[WorkerRow]
    tasks: list[TaskRow]
    gaps: IdleGaps
    happenings: list[Happening]
    kernels: list[KernelRow]
    notes: list[str]
    findings: Findings

    @property
    def waiting(self) -> list[TaskRow]:
        """Return prefixes whose tasks waited for data, the longest wait first."""
        rows = [row for row in self.tasks if row.data_wait_s > 0]
        return sorted(rows, key=lambda row: -row.data_wait_s)

    @property
    def about(self) -> dict[str, Any]:
        """Return versions, settings and the program."""
        about = self.findings.columns.trace.about
        return {name: value for name, value in about.items() if name != "kernels"}

    def rules_about(self, section: str) -> list[str]:
        """Return the rules that found something in a section of the report."""
        rules = SECTIONS[section]
        return [one.rule for one in self.bottlenecks if one.rule in rules]

    @property
    def headline(self) -> str:
        """Return one sentence on the critical path."""
        return self.path.text

    @property
    def closing(self) -> str:
        """Return the sentence that stands where no rule found anything."""
        if not self.tasks:
            return "No task ran, so there is nothing to judge."
        said = "Nothing stands out: threads ran tasks in "
        said += f"{share_text(self.findings.busy_share)} of the time."
        if self.path.crowded_s >= self.wall_s / 2:
            said += (
                f" During {seconds_text(self.path.crowded_s)} of the critical path, tasks waited "
                "for a free thread: more workers or threads would help."
            )
        return said

    def to_dict(self) -> dict[str, Any]:
        """Return the report as values that JSON can hold."""
        trace = self.findings.columns.trace
        return {
            "wall_s": self.wall_s,
            "began_utc_s": trace.began_utc_s,
            "summary": self.headline,
            "bottlenecks": [asdict(one) for one in self.bottlenecks],
            "critical_path": [part._asdict() for part in self.path.parts],
            "transfers": [
                {**row._asdict(), "link": row.link, "mean_nbytes": row.mean_nbytes}
                | {"share": row.share}
                for row in self.transfers
            ],
            "hosts": [row._asdict() for row in self.hosts],
            "workers": [row._asdict() for row in self.workers],
            "tasks": [row._asdict() for row in self.tasks],
            "idle_gaps": [row._asdict() for row in self.gaps.rows],
            "idle_s": self.gaps.total_s,
            "happenings": [row._asdict() for row in self.happenings],
            "kernels": [row._asdict() for row in self.kernels],
            "notes": self.notes,
            "about": self.about,
        }


def report_of(trace: Trace) -> TraceReport:
    """Return the report of a trace. It is deterministic, and reads nothing else."""
    columns = Columns(trace)
    stories = TaskStories(columns)
    findings = Findings(
        columns,
        critical_path(columns, stories),
        transfer_rows(columns),
        host_rows(columns),
        worker_rows(columns),
        task_rows(columns),
        idle_gaps(columns, stories),
    )
    rules = (*TRANSFER_RULES, *TASK_RULES, processors)
    found = [one for rule in rules if (one := rule(findings)) is not None]
    # Threads are idle for a reason. If another rule knows it, that one says more.
    found = [one for one in found if one.rule != "idle-threads" or len(found) == 1]
    found.sort(key=lambda one: -1.0 if one.saves_s is None else one.saves_s, reverse=True)
    return TraceReport(
        columns.wall_s,
        findings.path,
        found,
        findings.transfers,
        findings.hosts,
        findings.workers,
        findings.tasks,
        findings.gaps,
        happenings(trace.instants),
        kernel_rows(trace.about),
        _notes(columns),
        findings,
    )


def _notes(columns: Columns) -> list[str]:
    notes = []
    for i, one in enumerate(columns.trace.processes):
        name = columns.places.names[i]
        if one.ended:
            notes.append(f"The recording of {name} ended early: {one.ended}.")
        if one.n_dropped:
            notes.append(f"{name} dropped {count_text(one.n_dropped, 'event')}.")
        if one.clock_error_s > _SMALL_ERROR_S:
            error = seconds_text(one.clock_error_s)
            notes.append(f"Times of {name} may be wrong by {error}.")
    if n := columns.hops.n_unreceived:
        notes.append(f"{count_text(n, 'message')} left a worker, and no worker recorded arrivals.")
    if not columns.trace.tasks:
        notes.append("The trace has no task.")
    return notes
