"""Commands that need no cluster: `report`, `predict` and `convert` for traces, `occupancy`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from dask_gpurt.cli.group import CONTEXT, Positive, gpurt, json_flag, one_line


@gpurt.command(context_settings=CONTEXT)
@json_flag
@click.option(
    "--html",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="OUT",
    help="Write the report to OUT, as one HTML page.",
)
@click.argument("file", type=click.Path(path_type=Path))
def report(file: Path, as_json: bool, html: Path | None) -> None:
    """Show where the time of a traced program went, and which changes help.

    FILE is a trace. No cluster is needed.
    """
    from dask_gpurt.command.traces.show_report import show
    from dask_gpurt.errors import TraceFileError

    with one_line(TraceFileError):
        sys.exit(show(file, as_json, html))


@gpurt.command(context_settings=CONTEXT)
@click.option(
    "--on",
    "wanted",
    multiple=True,
    metavar="MACHINES",
    help="Machines, such as 4xm7i.4xlarge. May be repeated. Default: 1, 2 and 4 recorded ones.",
)
@click.option(
    "--machines",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="YAML",
    help="File that describes machines of your own.",
)
@click.option(
    "--speed",
    type=Positive(),
    default=1.0,
    show_default=True,
    metavar="X",
    help="Speed of a thread of other machines, as a multiple of a recorded one.",
)
@json_flag
@click.argument("file", type=click.Path(path_type=Path))
def predict(
    file: Path, wanted: tuple[str, ...], machines: Path | None, speed: float, as_json: bool
) -> None:
    """Predict what a traced program would take and cost on other machines.

    FILE is a trace of `dask gpurt profile` or `dask gpurt trace`. The program is simulated first on
    the machines of the trace: the error there says how far to trust the rest.
    """
    from dask_gpurt.command.traces.predict_machines import show
    from dask_gpurt.errors import PredictionError, SimulationError, TraceFileError

    with one_line(PredictionError, SimulationError, TraceFileError):
        show(file, wanted, machines, speed, as_json)


@gpurt.command(context_settings=CONTEXT)
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--join",
    "ours",
    type=click.Path(path_type=Path),
    metavar="TRACE",
    help="Trace of a cluster. The new file has it too, on its clock.",
)
@click.option("-o", "--out", required=True, type=click.Path(path_type=Path), help="File to write.")
def convert(files: tuple[Path, ...], ours: Path | None, out: Path) -> None:
    """Turn FILES, exports of Nsight Systems, into one trace, or join them to a trace of a cluster.

    FILES are .sqlite files that `nsys export` wrote. A single trace can be named as well, to change
    its format. The ending of the output decides: .json.gz, .json, .perfetto-trace or .pftrace.
    """
    from dask_gpurt.command.traces.convert import convert as convert_files
    from dask_gpurt.errors import TraceFileError

    with one_line(TraceFileError):
        click.echo(convert_files(files, out, ours))


@gpurt.command(context_settings=CONTEXT)
@click.option("--gpu", required=True, metavar="NAME", help="Name of the GPU, such as H200.")
@click.option("--threads", required=True, type=click.IntRange(1), help="Threads per block.")
@click.option("--registers", required=True, type=click.IntRange(0), help="Registers per thread.")
@click.option("--static", type=click.IntRange(0), default=0, help="Static shared memory per block.")
@click.option(
    "--dynamic", type=click.IntRange(0), default=0, help="Dynamic shared memory per block."
)
@click.option("--leave", type=click.IntRange(1), metavar="K", help="Plan for K resident blocks.")
@json_flag
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

    with one_line(UnknownGpuError):
        sys.exit(show(gpu, threads, registers, static, dynamic, leave, as_json))
