"""The ``dask gpurt`` command line: options, arguments and help texts.

This module parses command lines and nothing else; `dask_gpurt.command` and `dask_gpurt.demo` do the
work. Dask imports this module for every ``dask --help``, so each command imports everything but
click in its own function.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from dask_gpurt import __version__

_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 88}

#: Exit status for an unusable address, a missing file or a wrong option.
_BAD_USAGE = 2


def _fail(command: str, error: Exception) -> int:
    click.echo(f"dask gpurt {command}: {error}", err=True)
    return _BAD_USAGE


@click.group(context_settings=_CONTEXT)
@click.version_option(__version__, prog_name="dask-gpurt")
def gpurt() -> None:
    """Speed up Dask's shuffles without changing the program."""


@gpurt.command(context_settings={**_CONTEXT, "allow_interspersed_args": False})
@click.option("--n-workers", type=click.IntRange(1), metavar="N", help="Worker processes.")
@click.option("--threads", type=click.IntRange(1), metavar="N", help="Threads of each worker.")
@click.option(
    "--progress/--no-progress",
    "progress",
    default=None,
    help="Show progress on stderr. Default: only on a terminal.",
)
@click.option(
    "--report",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Also write the closing report to FILE as JSON.",
)
@click.option("--strict", is_flag=True, help="Raise an error instead of a fallback to stock Dask.")
@click.option("--stock", is_flag=True, hidden=True, help="Leave the runtime off.")
@click.option("-m", "--module", "is_module", is_flag=True, help="SCRIPT is the name of a module.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run(
    n_workers: int | None,
    threads: int | None,
    progress: bool | None,
    report: Path | None,
    strict: bool,
    stock: bool,
    is_module: bool,
    script: str,
    args: tuple[str, ...],
) -> None:
    """Run SCRIPT unchanged, with the runtime on. Options after SCRIPT belong to the script.

    A script that starts its own Dask client keeps it. For any other script, the first computation
    starts a cluster on this machine. --n-workers and --threads set the size of that cluster.
    """
    from dask_gpurt.command.run import Options, run_script
    from dask_gpurt.command.script import ScriptError

    options = Options(
        n_workers=n_workers,
        threads_per_worker=threads,
        progress=progress,
        report_path=report,
        strict=strict,
        stock=stock,
    )
    try:
        code = run_script(script, list(args), is_module=is_module, options=options)
    except ScriptError as error:
        code = _fail("run", error)
    sys.exit(code)


def _of_cluster(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that name a cluster, and the keys to one that speaks TLS."""

    @functools.wraps(command)
    def with_keys(
        tls_ca_file: Path | None, tls_cert: Path | None, tls_key: Path | None, **options: Any
    ) -> None:
        from dask_gpurt.command.connect import tls_keys

        with tls_keys(tls_ca_file, tls_cert, tls_key):
            command(**options)

    key = click.Path(exists=True, dir_okay=False, path_type=Path)
    for option in (
        click.option("--tls-key", type=key, metavar="FILE", help="Private key, in PEM format."),
        click.option("--tls-cert", type=key, metavar="FILE", help="Certificate, in PEM format."),
        click.option(
            "--tls-ca-file",
            type=key,
            metavar="FILE",
            help="Certificates of authorities, in PEM format. Needed for tls:// addresses.",
        ),
        click.option(
            "--scheduler-file",
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="Scheduler file.",
        ),
        click.option(
            "--scheduler",
            metavar="ADDR",
            help="Address of the scheduler, such as tcp://10.0.0.1:8786.",
        ),
    ):
        with_keys = option(with_keys)
    return with_keys


_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@gpurt.command(context_settings=_CONTEXT)
@_of_cluster
@_json
def doctor(scheduler: str | None, scheduler_file: Path | None, as_json: bool) -> None:
    """Check the installation and a cluster: versions, settings, problems, and remedies.

    Exits with 0 if there is no problem, 1 if there is one, and 2 if the scheduler does not answer.
    """
    from dask_gpurt.command.doctor import examine

    sys.exit(examine(scheduler, scheduler_file, as_json))


@gpurt.command(context_settings=_CONTEXT)
@_of_cluster
@_json
@click.option("--placement", is_flag=True, help="Show only where tasks were placed, and why.")
def status(
    scheduler: str | None, scheduler_file: Path | None, as_json: bool, placement: bool
) -> None:
    """Show what the runtime does on a running cluster."""
    from dask_gpurt.command.connect import ConnectError
    from dask_gpurt.command.status import show

    try:
        code = show(scheduler, scheduler_file, as_json, placement=placement)
    except ConnectError as error:
        code = _fail("status", error)
    sys.exit(code)


@gpurt.command(context_settings=_CONTEXT)
@_of_cluster
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

    try:
        code = check_file(check) if check else write(scheduler, scheduler_file, probe=probe)
    except TopologyError as error:
        code = _fail("topology", error)
    sys.exit(code)


@gpurt.command("support-bundle", context_settings=_CONTEXT)
@_of_cluster
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

    try:
        click.echo(write(scheduler, scheduler_file, out))
    except (ConnectError, OSError) as error:
        sys.exit(_fail("support-bundle", error))


@gpurt.command(context_settings=_CONTEXT)
@click.option("--gpu", required=True, metavar="NAME", help="Name of the GPU, such as H200.")
@click.option("--threads", required=True, type=click.IntRange(1), help="Threads per block.")
@click.option("--registers", required=True, type=click.IntRange(0), help="Registers per thread.")
@click.option("--static", type=click.IntRange(0), default=0, help="Static shared memory per block.")
@click.option(
    "--dynamic", type=click.IntRange(0), default=0, help="Dynamic shared memory per block."
)
@click.option("--leave", type=click.IntRange(1), metavar="K", help="Plan for K resident blocks.")
@_json
def occupancy(
    gpu: str,
    threads: int,
    registers: int,
    static: int,
    dynamic: int,
    leave: int | None,
    as_json: bool,
) -> None:
    """Compute how many blocks of a kernel fit on a multiprocessor of a GPU, and what limits them.

    With --leave, also compute the dynamic shared memory at which only K blocks fit. The figures
    come from a table; no GPU is needed.
    """
    from dask_gpurt.command.occupancy import UnknownGpuError, show

    try:
        code = show(gpu, threads, registers, static, dynamic, leave, as_json)
    except UnknownGpuError as error:
        code = _fail("occupancy", error)
    sys.exit(code)


@gpurt.command(context_settings=_CONTEXT)
@click.option(
    "--scale",
    type=click.FloatRange(0, min_open=True),
    default=1.0,
    show_default=True,
    help="TPC-H scale factor; 1 is about a gigabyte of text.",
)
@click.option("--quick", is_flag=True, help="Less data, one run per query: about a minute.")
@click.option(
    "--cache-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory for the data. Default: the user's cache directory.",
)
@click.option(
    "--out-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(),
    help="Directory for report.json and report.html. Default: the current directory.",
)
@click.option(
    "--queries", metavar="LIST", help="Queries, such as 1,3,9 or q3,weather. Default: all."
)
@_json
def demo(
    scale: float,
    quick: bool,
    cache_dir: Path | None,
    out_dir: Path,
    queries: str | None,
    as_json: bool,
) -> None:
    """Compare stock Dask with Dask and this runtime, on real data."""
    from dask_gpurt.demo.command import main

    names = None
    if queries is not None:
        names = [name.strip() for name in queries.split(",") if name.strip()]
        if not names:
            raise click.BadParameter("names no query", param_hint="--queries")
    sys.exit(
        main(
            scale=scale,
            quick=quick,
            cache_dir=cache_dir,
            out_dir=out_dir,
            json_output=as_json,
            queries=names,
        )
    )


@gpurt.command(context_settings={**_CONTEXT, "allow_interspersed_args": False})
@click.option(
    "--repeats",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    metavar="N",
    help="Pairs of turns.",
)
@click.option(
    "--minutes",
    type=click.FloatRange(0, min_open=True),
    default=30.0,
    show_default=True,
    help="Most minutes for all turns.",
)
@click.option("--n-workers", type=click.IntRange(1), metavar="N", help="Worker processes.")
@click.option("--threads", type=click.IntRange(1), metavar="N", help="Threads of each worker.")
@_json
@click.option("-m", "--module", "is_module", is_flag=True, help="SCRIPT is the name of a module.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def compare(
    repeats: int,
    minutes: float,
    n_workers: int | None,
    threads: int | None,
    as_json: bool,
    is_module: bool,
    script: str,
    args: tuple[str, ...],
) -> None:
    """Run SCRIPT unchanged on stock Dask and with the runtime, in turns, and compare.

    Compares times, bytes and what the script prints, and says what limits it. Clusters are those of
    `dask gpurt run`. Exits with 1 if the runtime changes what the script does, and with 2 if the
    script fails on stock Dask.
    """
    from dask_gpurt.command.judge.compare import compare as compare_sides
    from dask_gpurt.command.script import ScriptError

    sizes = {"--n-workers": n_workers, "--threads": threads}
    try:
        code = compare_sides(
            script,
            args,
            [text for name, n in sizes.items() if n for text in (name, str(n))],
            is_module=is_module,
            repeats=repeats,
            limit_s=60 * minutes,
            as_json=as_json,
        )
    except ScriptError as error:
        code = _fail("compare", error)
    sys.exit(code)


@gpurt.command(context_settings=_CONTEXT)
@_of_cluster
@_json
@click.option("--worker", metavar="W", help="Address or name of one worker. Default: all.")
def memory(
    scheduler: str | None, scheduler_file: Path | None, as_json: bool, worker: str | None
) -> None:
    """Show what takes the memory of each worker's process, and what would free it."""
    from dask_gpurt.command.connect import ConnectError
    from dask_gpurt.command.judge.memory import show

    try:
        code = show(scheduler, scheduler_file, worker, as_json)
    except ConnectError as error:
        code = _fail("memory", error)
    sys.exit(code)


if __name__ == "__main__":
    gpurt(prog_name="dask gpurt")
