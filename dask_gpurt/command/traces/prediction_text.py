"""Predictions as text for people, and as values for JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from dask_gpurt.command.layout import table, wrapped
from dask_gpurt.predict.catalogue import RECORDED
from dask_gpurt.predict.prediction import MAX_ERROR, Prediction, Predictions
from dask_gpurt.predict.recorded_program import RecordedProgram
from dask_gpurt.tracing.amounts import count_text, nbytes_text, seconds_text, share_text

#: Above this share of the time, the scheduler's own work deserves a note.
_BUSY_SCHEDULER = 0.5
_HEAD = (
    "machines",
    "workers",
    "time",
    "range",
    "cost",
    "busy",
    "between machines",
    "spilled",
    "would help",
)


def as_text(found: Predictions, recorded: RecordedProgram, width: int | None) -> str:
    """Return the check, the table, and what to keep in mind."""
    cluster, program = recorded.cluster, recorded.program
    lines = [
        f"{found.name}: {count_text(len(program.workload.tasks), 'task')},"
        f" {count_text(len(program.exchanges), 'shuffle')},"
        f" on {count_text(len(cluster.workers), 'machine')} with"
        f" {count_text(cluster.n_workers, 'worker')}",
        f"check: measured {seconds_text(found.measured_s)}, simulated on the same machines"
        f" {seconds_text(found.simulated_s)} ({found.error:+.0%})",
        "",
        *table(_HEAD, [_cells(row) for row in found.rows], width),
        "",
    ]
    for note in _notes(found):
        lines += wrapped(note, width, "- ", "  ")
    return "\n".join(lines)


def _cells(row: Prediction) -> tuple[str, ...]:
    size = f"{row.n_workers}x{row.nthreads}"
    if row.problem:
        return (row.group.name, size, *["-"] * (len(_HEAD) - 3), f"does not fit: {row.problem}")
    helps = ", ".join(f"2x {one.name} {one.ratio:.2f}x" for one in row.changes) or "-"
    if not row.fits:
        helps = f"does not fit: a worker lacks {nbytes_text(row.short_nbytes)}"
    return (
        row.group.name,
        size,
        seconds_text(row.time_s),
        f"{seconds_text(row.low_s)} - {seconds_text(row.high_s)}",
        "price unknown" if row.usd is None else _usd_text(row.usd),
        share_text(row.busy_share),
        nbytes_text(row.moved_nbytes),
        nbytes_text(row.spilled_nbytes),
        helps,
    )


def _usd_text(usd: float) -> str:
    return f"{usd:,.2f} USD" if usd >= 1 else f"{usd:.2g} USD"


def _notes(found: Predictions) -> list[str]:
    notes = []
    if abs(found.error) > MAX_ERROR:
        notes.append(
            f"The model is {abs(found.error):.0%} off on the recorded machines. Take these times as"
            " guesses. A longer program, on a machine that does nothing else, is predicted better."
        )
    if any(row.group.machine.name != RECORDED for row in found.rows):
        times = "" if found.speed == 1 else f"{found.speed:g} times "
        notes.append(
            f"Threads of other machines are taken to be {times}as fast as the recorded ones."
            " Change this with --speed."
        )
    slow = [row.group.name for row in found.rows if row.scheduler_share > _BUSY_SCHEDULER]
    if slow:
        notes.append(
            f"On {', '.join(slow)}, the scheduler needs more than half of this time for its own"
            " work. The prediction leaves that out. Use larger partitions."
        )
    priced = [row.group.machine.priced for row in found.rows if row.usd is not None]
    if priced:
        oldest = min(filter(None, priced), default=None)
        prices = f"prices of {oldest}" if oldest else "the prices in that file"
        notes.append(f"Costs are for the predicted time alone, at {prices}.")
    if any(row.changes for row in found.rows):
        notes.append(
            'The last column says which resource would help. "2x network 0.7x": with twice the'
            " bandwidth, the program would take 0.7 of the time."
        )
    return notes


def as_dict(found: Predictions) -> dict[str, Any]:
    """Return predictions as values that JSON can hold."""
    return {
        "name": found.name,
        "measured_s": found.measured_s,
        "simulated_s": found.simulated_s,
        "error": found.error,
        "client_s": found.client_s,
        "speed": found.speed,
        "machines": [
            {"machines": row.group.name, "fits": row.fits, **_without_group(row)}
            for row in found.rows
        ],
    }


def _without_group(row: Prediction) -> dict[str, Any]:
    return {name: value for name, value in asdict(row).items() if name != "group"}
