"""A fake of the module `os`, whose calls fail, do less than asked, or wait."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

PATIENCE_S = 60.0

#: Calls that may fail. `unlink` is counted, but does not fail by itself.
CALLS = ("makedirs", "mkdir", "open", "ftruncate", "pwrite", "preadv", "close")


class System:
    """The module `os` with hooks and call counts.

    Attributes
    ----------
    hooks
        Replacements by name, called with the real function and its arguments.
    counts
        Calls of each name.
    """

    def __init__(self, **hooks: Callable[..., Any]) -> None:
        self.hooks = hooks
        self.counts: Counter[str] = Counter()
        self.log: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in (*CALLS, "unlink"):
            return real

        def call(*args: Any, **kwargs: Any) -> Any:
            self.counts[name] += 1
            self.log.append((name, *args))
            hook = self.hooks.get(name)
            return real(*args, **kwargs) if hook is None else hook(real, *args, **kwargs)

        return call


class FailingSystem(System):
    """A system whose n-th call fails; later calls succeed."""

    def __init__(self, n: int, code: int) -> None:
        super().__init__(**{name: self._hook(name) for name in CALLS})
        self._left = n
        self._code = code
        self.failed: str | None = None

    def _hook(self, name: str) -> Callable[..., Any]:
        def call(real: Any, *args: Any, **kwargs: Any) -> Any:
            self._left -= 1
            if self._left:
                return real(*args, **kwargs)
            self.failed = name
            if name == "close":
                real(*args)  # Linux frees the descriptor all the same
            raise OSError(self._code, os.strerror(self._code))

        return call


class Gate:
    """A point where one thread waits until another one opens it."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._opened = threading.Event()

    def wait(self) -> None:
        self.reached.set()
        assert self._opened.wait(PATIENCE_S), "the gate was not opened"

    def open(self) -> None:
        self._opened.set()


def without_direct(real: Any, path: str, flags: int, *args: Any) -> int:
    """Open a file, as on a file system without direct I/O."""
    if flags & os.O_DIRECT:
        raise OSError(22, "Invalid argument")
    opened: int = real(path, flags, *args)
    return opened
