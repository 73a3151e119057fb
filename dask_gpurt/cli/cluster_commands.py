"""Commands that ask a running cluster, such as `status`, `doctor`, `memory` and `trace`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from dask_gpurt.cli.group import (
    CONTEXT,
    Positive,
    gpurt,
    json_flag,
    of_cluster,
    one_line,
    trace_file,
)


@gpurt.command(context_settings=CONTEXT)
@of_cluster
@json_flag
def doctor(scheduler: str | None, scheduler_file: Path | None, as_json: bool) -> None:
    """Check the installation and a cluster: versions, settings, problems, and remedies.

    Exits with 0 if there is no problem, 1 if there is one, and 2 if the scheduler does not answer.
    """
    from dask_gpurt.command.doctor import examine

    sys.exit(examine(scheduler, scheduler_file, as_json))


@gpurt.command(context_settings=CONTEXT)
@of_cluster
@json_flag
@click.option("--placement", is_flag=True, help="Show only where tasks were placed, and why.")
def status(
    scheduler: str | None, scheduler_file: Path | None, as_json: bool, placement: bool
) -> None:
    """Show what the runtime does on a running cluster."""
    from dask_gpurt.command.connect import ConnectError
    from dask_gpurt.command.status import show

    with one_line(ConnectError):
        sys.exit(show(scheduler, scheduler_file, as_json, placement=placement))


@gpurt.command(context_settings=CONTEXT)
@of_cluster
@json_flag
@click.option("--worker", metavar="W", help="Address or name of one worker. Default: all.")
def memory(
    scheduler: str | None, scheduler_file: Path | None, as_json: bool, worker: str | None
) -> None:
    """Show what takes the memory of each worker's process, and what would free it."""
    from dask_gpurt.command.connect import ConnectError
    from dask_gpurt.command.judge.memory import show

    with one_line(ConnectError):
        sys.exit(show(scheduler, scheduler_file, worker, as_json))


@gpurt.command(context_settings=CONTEXT)
@of_cluster
@click.option("--probe", is_flag=True, help="Measure the links between hosts first.")
@click.option(
    "--check",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Only check a description file, and print a summary of it.",
)
def topology(
    scheduler: str | None, scheduler_file: Path | None, probe: bool, check: Path | None
) -> None:
    """Write a description of the machines of a running cluster, as YAML, to standard output.

    Workers report the GPUs, NUMA nodes and network cards of their hosts, and the links between
    them. A file in use wins over reports. Check the description, correct it, and name the file in
    `gpurt.topology.file`.
    """
    from dask_gpurt.command.topology import TopologyError, check_file, write

    with one_line(TopologyError):
        sys.exit(check_file(check) if check else write(scheduler, scheduler_file, probe=probe))


@gpurt.command("support-bundle", context_settings=CONTEXT)
@of_cluster
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("gpurt-support.zip"),
    show_default=True,
    metavar="FILE",
    help="File to write.",
)
def support_bundle(scheduler: str | None, scheduler_file: Path | None, out: Path) -> None:
    """Collect versions, settings, status, machines and logs in a zip file, without secrets."""
    from dask_gpurt.command.connect import ConnectError
    from dask_gpurt.command.support_bundle import write

    with one_line(ConnectError, OSError):
        click.echo(write(scheduler, scheduler_file, out))


@gpurt.command(context_settings=CONTEXT)
@of_cluster
@click.option(
    "--seconds",
    type=Positive(),
    default=30.0,
    show_default=True,
    help="Length of the trace.",
)
@trace_file
def trace(
    scheduler: str | None, scheduler_file: Path | None, seconds: float, out: Path, keys: Any
) -> None:
    """Trace a running cluster: tasks, messages, reads and writes of all workers on one clock.

    Open the file at ui.perfetto.dev. Ctrl-C ends the trace early and still writes the file. Exits
    with 1 if events of some worker are missing.
    """
    from dask_gpurt.command.traces.trace_command import record
    from dask_gpurt.errors import GpurtError

    with one_line(GpurtError, OSError):
        sys.exit(record(scheduler, scheduler_file, seconds, out, keys))
