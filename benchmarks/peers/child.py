"""The process of one engine: it starts the engine once, and works when it is told to.

Commands are lines on standard input, answers are lines of JSON on standard output. What the engine
prints goes to standard error.

    python -m benchmarks.peers.child MODULE OPTION FOLDER N_PARTITIONS
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from typing import Any, Protocol


class AbsentError(Exception):
    """The engine cannot run on this machine. The message says why."""


class Session(Protocol):
    """A warm engine. Each work reads the files anew."""

    def about(self) -> dict[str, Any]:
        """Return `versions` and `settings`."""

    def shuffle(self) -> dict[str, Any]:
        """Return `answers.of_shuffle` of the files, repartitioned by `key`."""

    def aggregation(self) -> dict[str, Any]:
        """Return `answers.of_aggregation` of the sum of x, the mean of y and the rows by n."""

    def close(self) -> None: ...


def opened(module: str, option: str, folder: str, n_partitions: int) -> Session:
    """Start an engine.

    Raises
    ------
    AbsentError
        It is not installed, or misses something.
    """
    try:
        adapter = importlib.import_module(f"benchmarks.peers.{module}")
    except ImportError as error:
        raise AbsentError(f"not installed here: {error}") from error
    session: Session = adapter.open_session(option, folder, n_partitions)
    return session


def main(module: str, option: str, folder: str, n_partitions: str) -> None:
    with os.fdopen(os.dup(1), "w") as out:
        # Engines print to standard output, some of them from C++ or Java.
        os.dup2(2, 1)

        def say(**values: Any) -> None:
            print(json.dumps(values), file=out, flush=True)

        try:
            session = opened(module, option, folder, int(n_partitions))
        except AbsentError as error:
            say(absent=str(error))
            return
        say(**session.about())
        for line in sys.stdin:
            try:
                began = time.perf_counter()
                answer = getattr(session, line.strip())()
                say(seconds=time.perf_counter() - began, answer=answer)
            except Exception as error:  # the others go on
                say(error=f"{type(error).__name__}: {error}"[:500])
        session.close()


if __name__ == "__main__":
    # Imported again under its own name: adapters raise the error of that module.
    from benchmarks.peers import child

    child.main(*sys.argv[1:])
