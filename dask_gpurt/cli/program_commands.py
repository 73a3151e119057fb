"""Commands that run a program: `run`, `compare`, `profile`, `demo`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from dask_gpurt.cli.group import (
    CONTEXT,
    WITH_SCRIPT,
    Positive,
    gpurt,
    json_flag,
    nsys_folder,
    one_line,
    trace_file,
    with_script,
)


@gpurt.command(context_settings=WITH_SCRIPT)
@with_script
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
@nsys_folder
def run(
    n_workers: int | None,
    threads: int | None,
    memory_limit: int | None,
    progress: bool | None,
    report: Path | None,
    strict: bool,
    stock: bool,
    nsys: Path | None,
    is_module: bool,
    script: str,
    args: tuple[str, ...],
) -> None:
    """Run SCRIPT unchanged, with the runtime on. Options after SCRIPT belong to the script.

    A script that starts its own Dask client keeps it. For any other script, the first computation
    starts a cluster on this machine. --n-workers, --threads, --memory-limit and --nsys are for that
    cluster.
    """
    from dask_gpurt.command.run import Options, run_script
    from dask_gpurt.command.script import ScriptError

    options = Options(
        n_workers=n_workers,
        threads_per_worker=threads,
        memory_limit_nbytes=memory_limit,
        progress=progress,
        report_path=report,
        strict=strict,
        stock=stock,
        nsys_directory=nsys,
    )
    with one_line(ScriptError):
        sys.exit(run_script(script, list(args), is_module=is_module, options=options))


@gpurt.command(context_settings=WITH_SCRIPT)
@with_script
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
    type=Positive(),
    default=30.0,
    show_default=True,
    help="Most minutes for all turns.",
)
@json_flag
def compare(
    repeats: int,
    minutes: float,
    n_workers: int | None,
    threads: int | None,
    memory_limit: int | None,
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

    sizes = {"--n-workers": n_workers, "--threads": threads, "--memory-limit": memory_limit}
    with one_line(ScriptError):
        sys.exit(
            compare_sides(
                script,
                args,
                [text for name, n in sizes.items() if n for text in (name, str(n))],
                is_module=is_module,
                repeats=repeats,
                limit_s=60 * minutes,
                as_json=as_json,
            )
        )


@gpurt.command(context_settings=WITH_SCRIPT)
@with_script
@trace_file
@nsys_folder
def profile(
    n_workers: int | None,
    threads: int | None,
    memory_limit: int | None,
    out: Path,
    keys: Any,
    nsys: Path | None,
    is_module: bool,
    script: str,
    args: tuple[str, ...],
) -> None:
    """Run SCRIPT as `run` does, trace its cluster, and show where the time went.

    Open the file at ui.perfetto.dev; `dask gpurt report FILE` shows the report again. If the script
    uses several clusters, the first one is traced.
    """
    from dask_gpurt.command.run import Options, run_script
    from dask_gpurt.command.script import ScriptError

    options = Options(
        n_workers, threads, memory_limit, trace_path=out, trace_keys=keys, nsys_directory=nsys
    )
    with one_line(ScriptError):
        sys.exit(run_script(script, list(args), is_module=is_module, options=options))


@gpurt.command(context_settings=CONTEXT)
@click.option(
    "--scale",
    type=Positive(),
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
@json_flag
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
