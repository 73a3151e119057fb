"""``dask gpurt predict``: what a traced program would take and cost on other machines."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from dask_gpurt.command.json_text import to_json
from dask_gpurt.command.layout import is_terminal, terminal_width
from dask_gpurt.command.traces.prediction_text import as_dict, as_text
from dask_gpurt.errors import PredictionError
from dask_gpurt.plugins.simulation.placed_run import simulate_placed
from dask_gpurt.predict.catalogue import Catalogue
from dask_gpurt.predict.prediction import predict
from dask_gpurt.predict.recorded_program import recorded_program
from dask_gpurt.tracing import files

#: Machines to predict if the user names none: those of the trace, and more of them.
BY_DEFAULT = ("1xrecorded", "2xrecorded", "4xrecorded")
#: Longest file of machines that is read.
_MOST_NBYTES = 1 << 20


def show(
    path: Path, wanted: Sequence[str], machines: Path | None, speed: float, as_json: bool
) -> None:
    """Predict the program in a trace, and print a table or JSON.

    Raises
    ------
    TraceFileError
        The trace cannot be read.
    PredictionError
        The trace has no task, a machine is unknown, or the file of machines cannot be used.
    SimulationError
        The program cannot be simulated on the machines of the trace.
    """
    recorded = recorded_program(files.read(path), path.name)
    text = "" if machines is None else _read(machines)
    catalogue = Catalogue(recorded.cluster, text, "" if machines is None else machines.name)
    line = SimulationLine()
    try:
        found = predict(
            recorded,
            wanted or BY_DEFAULT,
            catalogue,
            partial(simulate_placed, recorded.policy),
            speed=speed,
            on_simulated=line.show,
        )
    finally:
        line.clear()
    if as_json:
        print(to_json(as_dict(found)))
    else:
        print(as_text(found, recorded, terminal_width()))


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > _MOST_NBYTES:
            raise PredictionError(f"{path} is longer than {_MOST_NBYTES:,} bytes")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise PredictionError(f"cannot read {path}: {why}") from error


class SimulationLine:
    """The line on a terminal that counts simulations."""

    def __init__(self) -> None:
        self._count = 0

    def show(self, name: str) -> None:
        """Say that a simulation begins."""
        self._count += 1
        self._write(f"simulation {self._count}: {name}")

    def clear(self) -> None:
        """Leave an empty line for what comes next."""
        self._write("")

    def _write(self, text: str) -> None:
        if is_terminal(sys.stderr):
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
