"""The worker plugin that the scheduler sends to every worker to attach the runtime.

The plugin reports a problem if the runtime cannot be attached. It is sent as the source text of
this module: compiled code would kill a worker of another Python version. A pickle that refers to
this module would keep a worker without this package from starting. The module therefore imports
nothing of this package before the plugin runs.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import socket
import sys
from collections.abc import Mapping
from typing import Any

import dask
import distributed
from distributed.diagnostics.plugin import WorkerPlugin
from distributed.protocol.pickle import dumps
from packaging.version import InvalidVersion, Version

#: Name of the plugins of the runtime, and of the runtime among a worker's extensions.
NAME = "gpurt"
PACKAGE = "dask-gpurt"
#: Packages that the scheduler, its workers and its clients must have in the same version.
SHARED = (PACKAGE, "dask", "distributed")
#: Topic of the events that tell clients whether a scheduler has our handlers.
EVENTS = "dask-gpurt"


def installed() -> dict[str, str | None]:
    """Return the versions of Python and of the shared packages in this process."""
    ours: str | None = None
    try:
        import dask_gpurt

        ours = dask_gpurt.__version__
    except ImportError:
        pass
    return {
        "python": ".".join(map(str, sys.version_info[:3])),
        PACKAGE: ours,
        "dask": dask.__version__,
        "distributed": distributed.__version__,
    }


def untested(version: str, tested: tuple[str, str]) -> str | None:
    """Return why this version of distributed is not supported, or None if it is.

    Parameters
    ----------
    tested
        The first tested version, and the first later version that is not tested.
    """
    # A development build of a tested release counts as that release.
    if Version(tested[0]) <= _release(version) < Version(tested[1]):
        return None
    return (
        f"distributed {version} is not one this dask_gpurt was tested with "
        f"({tested[0]} or later, before {tested[1]})"
    )


def system_problem(system: str = sys.platform) -> str | None:
    """Return why a worker cannot have the runtime on this system, or None if it can."""
    if system != "win32":
        return None
    return f"{PACKAGE} moves data on Linux and macOS, not on Windows; run workers in WSL or Docker"


def difference(found: Mapping[str, Any], wanted: Mapping[str, str | None]) -> str | None:
    """Return how another process's versions differ and the remedy, or None if they match.

    Parameters
    ----------
    found
        Versions by name, as the other process reports them.
    wanted
        The result of `installed`.
    """
    problems, remedies = [], []
    python, wanted_python = _minor(found.get("python")), _minor(wanted["python"])
    if python != wanted_python:
        problems.append(f"Python {python} runs there, not {wanted_python}")
        remedies.append(f"use Python {wanted_python} there")
    others = [name for name in SHARED if not _same(found.get(name), wanted[name])]
    for name in others:
        if found.get(name) is None:
            problems.append(f"{name} is not installed there")
        else:
            problems.append(f"{name} {found[name]} is installed there, not {wanted[name]}")
    if others:
        packages = " ".join(f"{name}=={wanted[name]}" for name in others)
        remedies.append(f"run `pip install {packages}` there")
    return f"{', '.join(problems)}; {' and '.join(remedies)}" if problems else None


def _minor(python: Any) -> str:
    return ".".join(str(python).split(".")[:2])


def _same(found: Any, wanted: Any) -> bool:
    if found == wanted or found is None:
        return bool(found == wanted)
    return _release(found) == _release(wanted)


def _release(version: Any) -> Version:
    try:
        return Version(Version(str(version)).base_version)
    except InvalidVersion:
        # Lower than any real version.
        return Version("0")


def _place() -> str:
    """Return where this process runs, in words: a job's log and environment are found by its id."""
    job = os.environ.get("SLURM_JOB_ID")
    return f"on host {socket.gethostname()}" + (f" in SLURM job {job}" if job else "")


class GpurtWorker(WorkerPlugin):
    """A worker plugin that attaches the runtime if versions match those of the scheduler.

    Parameters
    ----------
    wanted
        Versions on the scheduler: the result of `installed` there.
    tested
        As for `untested`.
    settings
        Plain values of `Settings`.
    """

    name = NAME

    def __init__(
        self, wanted: dict[str, str | None], tested: tuple[str, str], settings: dict[str, Any]
    ) -> None:
        self._wanted, self._tested, self._settings = wanted, tested, settings
        self._attachment: Any = None

    async def setup(self, worker: Any) -> None:
        # A joining worker sets up its plugins concurrently. Ours may come before the shuffle's.
        for _ in range(1000):
            if "shuffle" in worker.plugins:
                break
            await asyncio.sleep(0)
        problem = await self._attach(worker)
        if problem is not None:
            problem = f"worker {worker.address} {_place()}: {problem}"
            logging.getLogger("dask_gpurt").error("%s", problem)
        await worker.scheduler.gpurt_worker_ready(worker=worker.address, problem=problem)

    async def _attach(self, worker: Any) -> str | None:
        """Attach the runtime, or return the problem and its remedy."""
        if (problem := system_problem()) is not None:
            return problem
        found, version = installed(), self._wanted[PACKAGE]
        reason = untested(str(found["distributed"]), self._tested)
        differs = difference(found, self._wanted)
        if reason is not None or differs is not None:
            return "; ".join(one for one in (reason, differs) if one is not None)
        try:
            from dask_gpurt.config import Settings
            from dask_gpurt.plugins.worker.attachment import Attachment

            self._attachment = await Attachment.to(worker, Settings.from_plain(self._settings))
        except ImportError as error:
            return (
                f"{PACKAGE} cannot be imported there ({error}); "
                f"run `pip install {PACKAGE}=={version}` there"
            )
        except Exception as error:
            logging.getLogger("dask_gpurt").exception(
                "the runtime cannot be attached to this worker; stock Dask runs the shuffles"
            )
            # Reinstalling would not help.
            return (
                f"{PACKAGE} {version} failed there ({repr(error)[:1000]}); "
                "please report it with the traceback in that worker's log"
            )
        return None

    def transition(self, key: Any, start: str, finish: str, **kwargs: Any) -> None:
        left = finish in (
            "memory",
            "error",
            "released",
            "rescheduled",
            "forgotten",
            "long-running",
        )
        if left and self._attachment is not None:
            self._attachment.task_left(key, finish)

    async def teardown(self, worker: Any) -> None:
        if self._attachment is not None:
            await self._attachment.detach()


#: Expression that makes the plugin without this package. `_Text.__reduce__` binds its names.
_MAKE = "[made := {'__name__': name}, exec(text, made), made[kind](*arguments)][-1]"


class _Text:
    """An object that unpickles as a plugin, built from the source text of its module."""

    def __init__(self, kind: type[WorkerPlugin], arguments: tuple[Any, ...]) -> None:
        self._kind, self._arguments = kind, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        name = self._kind.__module__
        bound = {
            "name": name,
            "text": inspect.getsource(sys.modules[name]),
            "kind": self._kind.__name__,
            "arguments": self._arguments,
        }
        # The pickle refers to the builtin `eval`, which every Python version has.
        return eval, (_MAKE, bound)


def as_text(kind: type[WorkerPlugin], *arguments: Any) -> bytes:
    """Return a pickle that any worker can load as a plugin of this kind with these arguments.

    The module of the plugin may import nothing of this package before the plugin runs.
    """
    found: bytes = dumps(_Text(kind, arguments))
    return found


def pickled(tested: tuple[str, str], settings: dict[str, Any]) -> bytes:
    """Return the plugin for this scheduler's workers, as a pickle that any worker can load."""
    return as_text(GpurtWorker, installed(), tested, settings)
