"""The ``dask gpurt`` command line: options, arguments and help texts.

This package parses command lines and nothing else; `dask_gpurt.command` and `dask_gpurt.demo` do
the work. Dask imports this package for every ``dask --help``, so each command imports everything
but click in its own function.
"""

# Each module adds its commands to the group.
from dask_gpurt.cli import cluster_commands, file_commands, program_commands
from dask_gpurt.cli.group import gpurt

__all__ = ["cluster_commands", "file_commands", "gpurt", "program_commands"]
