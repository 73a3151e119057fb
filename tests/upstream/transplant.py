"""A function that rebuilds subclasses of Dask's run, from distributed's tests, on our run.

Some tests patch `DataFrameShuffleRun` with a subclass that waits for an event in `inputs_done` or
fails in `close`. Our run has methods with the same names and meanings. So the function derives the
same subclass from our run.
"""

from __future__ import annotations

import functools
import types
from typing import Any

from distributed.shuffle._shuffle import DataFrameShuffleRun

from dask_gpurt.plugins.shuffle.frame_run import FrameRun


@functools.cache
def onto_ours(patched: type[Any]) -> type[FrameRun]:
    """Return a class like `patched`, a direct subclass of Dask's run, but derived from ours."""
    if patched is DataFrameShuffleRun:
        return FrameRun
    assert patched.__bases__ == (DataFrameShuffleRun,), patched
    ours = types.CellType()

    def moved(function: types.FunctionType) -> types.FunctionType:
        # `super()` without arguments looks its class up in this cell.
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        closure = tuple(ours if name == "__class__" else cell for name, cell in cells)
        copy = types.FunctionType(
            function.__code__,
            function.__globals__,
            function.__name__,
            function.__defaults__,
            closure,
        )
        copy.__kwdefaults__ = function.__kwdefaults__
        return copy

    methods = {
        name: moved(value)
        for name, value in vars(patched).items()
        if isinstance(value, types.FunctionType)
    }
    ours.cell_contents = made = type(patched.__name__, (FrameRun,), methods)
    return made
