"""Functions of `collectives.slicing` in tasks, for workers with and without this package.

A worker may join while tasks with such functions wait, and lack this package. So a task carries the
module's text, as the bootstrap does. Compiled code would kill a worker of another Python version.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable
from typing import Any

from dask_gpurt.collectives import slicing
from dask_gpurt.collectives.slicing import Cut, Piecewise

#: Expression that makes the function. `Shipped.__reduce__` binds its names.
_MAKE = "[made := {'__name__': module}, exec(text, made), made[name](*arguments)][-1]"


@functools.cache
def _text() -> str:
    """Return the text of the module without docstrings. Every task carries it, so it is short."""
    tree = ast.parse(inspect.getsource(slicing))
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(
            node
        ):
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


class Shipped:
    """A function of `collectives.slicing` that any worker with NumPy can unpickle.

    Parameters
    ----------
    kind
        A class of that module, whose instances are functions of one value.
    arguments
        Arguments of the class.
    """

    def __init__(self, kind: type[Cut | Piecewise], *arguments: Any) -> None:
        self.kind, self.arguments = kind, arguments
        self._function: Callable[[Any], Any] = kind(*arguments)

    def __call__(self, value: Any) -> Any:
        return self._function(value)

    def __reduce__(self) -> tuple[Any, ...]:
        names = {"module": slicing.__name__, "text": _text(), "name": self.kind.__name__}
        return eval, (_MAKE, {**names, "arguments": self.arguments})
