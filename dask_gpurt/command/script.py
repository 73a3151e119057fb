"""Run a Python script or module as `__main__`, as the interpreter would.

This module repeats what `python SCRIPT ARGS` and `python -m MODULE ARGS` do before the first line,
and with an uncaught exception after the last. It knows nothing of Dask. `dask_gpurt.command.run`
uses it.
"""

from __future__ import annotations

import builtins
import importlib.util
import io
import os
import sys
from dataclasses import dataclass
from importlib.abc import InspectLoader
from importlib.machinery import ExtensionFileLoader, ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

from dask_gpurt.errors import GpurtError

#: Exit status that a shell reports for a program ended by Ctrl-C.
INTERRUPTED = 130


class ScriptError(GpurtError, ValueError):
    """There is no such script, or it cannot be run. The message is one line."""


@dataclass(frozen=True)
class Script:
    """A script that was found, but not compiled yet."""

    path: str
    argv: list[str]
    directory: str
    spec: ModuleSpec | None = None

    def _code(self) -> CodeType:
        if self.spec is None:
            with io.open_code(self.path) as file:
                return compile(file.read(), self.path, "exec", dont_inherit=True)
        assert isinstance(self.spec.loader, InspectLoader)
        code = self.spec.loader.get_code(self.spec.name)
        assert code is not None
        return code

    def _module(self) -> ModuleType:
        module = ModuleType("__main__")
        module.__file__ = self.path
        module.__spec__ = self.spec
        if self.spec is None:
            module.__loader__ = SourceFileLoader("__main__", self.path)
        else:
            module.__loader__ = self.spec.loader
            module.__package__ = self.spec.parent
        values: dict[str, Any] = vars(module)
        values["__cached__"] = self.spec.cached if self.spec else None
        values["__builtins__"] = builtins
        values["__annotations__"] = {}
        return module

    def enter(self) -> ModuleType:
        """Set sys.argv, sys.path and `__main__` as the interpreter does for this script."""
        sys.argv[:] = self.argv
        if not sys.flags.safe_path:
            sys.path[0] = self.directory
        module = self._module()
        # Permanent: threads, exit handlers and child processes of the script look it up too.
        sys.modules["__main__"] = module
        return module

    def run(self, module: ModuleType) -> int | str | None:
        """Run the script and return its exit status, in the form that `sys.exit` accepts."""
        try:
            exec(self._code(), vars(module))
        except SystemExit as stop:
            return stop.code
        except KeyboardInterrupt as error:
            _show(error)
            return INTERRUPTED
        except BaseException as error:
            _show(error)
            return 1
        return None


def find_script(name: str, args: list[str]) -> Script:
    """Return the script in a file.

    Raises
    ------
    ScriptError
        There is no such file.
    """
    path = Path(name)
    if not path.is_file():
        why = "is a directory" if path.is_dir() else "there is no such file"
        raise ScriptError(f"cannot run {name}: {why}")
    if not os.access(path, os.R_OK):
        raise ScriptError(f"cannot run {name}: it cannot be read")
    # Like the interpreter: the script's path is absolute and keeps links, but imports use the
    # directory that a link points to.
    return Script(os.path.abspath(name), [name, *args], os.path.dirname(os.path.realpath(name)))


def find_module(name: str, args: list[str]) -> Script:
    """Return the script of a module, or of a package's `__main__`.

    Raises
    ------
    ScriptError
        There is no such module, it is not Python code, or its package cannot be imported.
    """
    directory = os.getcwd()
    if not sys.flags.safe_path:
        # As with `python -m`, find modules in the current directory.
        sys.path[0] = directory
    spec = _spec(name)
    if spec is None:
        raise ScriptError(f"cannot run {name}: there is no such module")
    if spec.submodule_search_locations is not None:
        spec = _spec(f"{name}.__main__")
        if spec is None:
            raise ScriptError(f"cannot run {name}: it is a package, and has no __main__ to run")
    # Loaders of extension modules claim to support inspection.
    is_code = isinstance(spec.loader, InspectLoader)
    if not is_code or isinstance(spec.loader, ExtensionFileLoader) or spec.origin is None:
        raise ScriptError(f"cannot run {name}: it is not a module of Python code")
    return Script(spec.origin, [spec.origin, *args], directory, spec)


def _spec(name: str) -> ModuleSpec | None:
    """Return the spec of a module, or None if there is none. Imports its parent packages."""
    try:
        return importlib.util.find_spec(name)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        # Not the module itself may be missing, but something that its packages import.
        if missing and f"{name}.".startswith(f"{missing}."):
            return None
        said = f"{type(error).__name__}: {error}"
        raise ScriptError(f"cannot run {name.removesuffix('.__main__')}: {said}") from error


def exit_code(asked: int | str | None) -> int:
    """Return the exit status of a value passed to `sys.exit`."""
    if asked is None:
        return 0
    return asked if isinstance(asked, int) else 1


def _show(error: BaseException) -> None:
    """Print an uncaught exception like the interpreter, without frames of this module."""
    traceback: TracebackType | None = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_code.co_filename == __file__:
        traceback = traceback.tb_next
    error.__traceback__ = traceback
    # The script may have installed its own hook.
    sys.excepthook(type(error), error, traceback)
