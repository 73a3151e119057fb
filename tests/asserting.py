"""A check, by reading source code, that every test asserts something.

A test asserts something if it has an `assert`, expects an error or a warning, or runs a program
that must succeed. A call of a function of the test suite that does one of these counts, too.
"""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterator

Function = ast.FunctionDef | ast.AsyncFunctionDef
#: Module and name of a function.
Name = tuple[str, str]

#: Functions of libraries that raise by themselves if something is wrong.
CHECKS = {"fail", "raises", "run_state_machine_as_test", "warns"}


class Suite:
    """The functions of all test modules below a folder, which is the root of their imports."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.tests: list[tuple[str, Function]] = []
        self._functions: dict[Name, list[tuple[Function, dict[str, Name]]]] = {}
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder.parent).with_suffix("").parts
            module = ".".join(parts).removesuffix(".__init__")
            self._read(module, ast.parse(path.read_text()))
        self._checking = {
            name
            for name, found in self._functions.items()
            if any(_checks(function) for function, _ in found)
        }
        n_before = -1
        while n_before < len(self._checking):
            n_before = len(self._checking)
            for name, found in self._functions.items():
                if any(self._calls_one(function, known) for function, known in found):
                    self._checking.add(name)

    def _read(self, module: str, tree: ast.Module) -> None:
        known: dict[str, Name] = {}
        functions = [node for node in ast.walk(tree) if isinstance(node, Function)]
        for function in functions:
            known[function.name] = (module, function.name)
            self._functions.setdefault((module, function.name), []).append((function, known))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests"):
                for alias in node.names:
                    known[alias.asname or alias.name] = (str(node.module), alias.name)
        for scope in (tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))):
            for node in scope.body:
                if isinstance(node, Function) and node.name.startswith("test"):
                    self.tests.append((module, node))

    def _calls_one(self, function: Function, known: dict[str, Name]) -> bool:
        return any(name in self._checking for name in _called(function, known))

    def without_assertion(self) -> Iterator[str]:
        """Names of the tests that assert nothing, such as `tests.test_x.test_y`."""
        for module, function in self.tests:
            if (module, function.name) not in self._checking:
                yield f"{module}.{function.name}"


def _checks(function: Function) -> bool:
    for node in ast.walk(function):
        if isinstance(node, ast.Assert):
            return True
        if isinstance(node, ast.Call):
            called = node.func
            name = getattr(called, "attr", getattr(called, "id", ""))
            if name in CHECKS or (isinstance(called, ast.Attribute) and name.startswith("assert")):
                return True
            if any(
                one.arg == "check" and ast.unparse(one.value) == "True" for one in node.keywords
            ):
                return True
    return False


def _called(function: Function, known: dict[str, Name]) -> Iterator[Name]:
    """Functions of the suite that a function calls: by name, of a module, or of its own class."""
    for node in ast.walk(function):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        if isinstance(called, ast.Name) and called.id in known:
            yield known[called.id]
        elif isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
            owner = called.value.id
            if owner == "self" and called.attr in known:
                yield known[called.attr]
            elif owner in known:
                module, name = known[owner]
                yield f"{module}.{name}", called.attr
