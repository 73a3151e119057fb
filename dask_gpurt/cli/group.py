"""The group of the ``dask gpurt`` commands, and what several of them have in common."""

from __future__ import annotations

import contextlib
import errno
import functools
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from dask_gpurt import __version__

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 88}
#: For commands with a script, whose options come after its name.
WITH_SCRIPT = {**CONTEXT, "allow_interspersed_args": False}

#: Exit status for an unusable address, a missing file or a wrong option.
_BAD_USAGE = 2
#: Error codes of an output on a full or broken disk.
_UNWRITABLE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})


@contextlib.contextmanager
def one_line(*errors: type[Exception]) -> Iterator[None]:
    """Print one of these errors of a command as one line, and exit."""
    try:
        yield
    except BrokenPipeError:
        raise  # click ends quietly if the reader of the output has gone
    except errors as error:
        click.echo(f"dask gpurt {click.get_current_context().info_name}: {error}", err=True)
        sys.exit(_BAD_USAGE)


class Positive(click.FloatRange):
    """A number above zero. The range of click takes NaN, too."""

    def __init__(self) -> None:
        super().__init__(0, min_open=True)

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value} is not a number", param, ctx)
        return number


def _parse_size(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    from dask_gpurt.setting_values import parsed_nbytes

    if value is None:
        return None
    if (nbytes := parsed_nbytes(value)) <= 0:
        raise click.BadParameter(f"{value!r} is not a size such as '2 GiB'")
    return nbytes


class _Commands(click.Group):
    """Commands that print one line where their output cannot be written."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command."""
        try:
            try:
                return super().invoke(ctx)
            finally:
                # Short output fails here, not as the interpreter ends.
                if sys.stdout is not None:
                    sys.stdout.flush()
        except UnicodeEncodeError as error:
            missing = error.object[error.start : error.end]
            _end_without_output(
                f"the output has {missing!a}, which {error.encoding} cannot express; "
                "set PYTHONIOENCODING=utf-8"
            )
        except OSError as error:
            if error.errno not in _UNWRITABLE or error.filename is not None:
                raise
            _end_without_output(f"the output cannot be written: {error.strerror}")


def _end_without_output(why: str) -> None:
    click.echo(f"dask gpurt: {why}", err=True)
    # Otherwise, the interpreter tries to write the rest as it ends.
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(_BAD_USAGE)


@click.group(cls=_Commands, context_settings=CONTEXT)
@click.version_option(__version__, prog_name="dask-gpurt")
def gpurt() -> None:
    """Move the data of Dask programs faster, without changing the programs."""


def of_cluster(command: Callable[..., None]) -> Callable[..., None]:
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


def trace_file(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options about the file of a trace."""
    keys = click.option(
        "--keys",
        type=click.Choice(["prefix", "full"]),
        default="prefix",
        show_default=True,
        help="Whether the file has whole keys of tasks, which may hold user data.",
    )
    out = click.option(
        "-o",
        "--out",
        type=click.Path(dir_okay=False, path_type=Path),
        default=Path("gpurt-trace.json.gz"),
        show_default=True,
        metavar="FILE",
        help="File of the trace; its ending says the format.",
    )
    return out(keys(command))


def with_script(command: Callable[..., None]) -> Callable[..., None]:
    """Add the script and its arguments, and the size of the cluster for a script without one."""
    for option in (
        click.argument("args", nargs=-1, type=click.UNPROCESSED),
        click.argument("script"),
        click.option(
            "-m", "--module", "is_module", is_flag=True, help="SCRIPT is the name of a module."
        ),
        click.option(
            "--memory-limit", callback=_parse_size, metavar="SIZE", help="Memory of each worker."
        ),
        click.option(
            "--threads", type=click.IntRange(1), metavar="N", help="Threads of each worker."
        ),
        click.option("--n-workers", type=click.IntRange(1), metavar="N", help="Worker processes."),
    ):
        command = option(command)
    return command


nsys_folder = click.option(
    "--nsys",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Run workers under Nsight Systems, and write its reports to DIR.",
)
json_flag = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
