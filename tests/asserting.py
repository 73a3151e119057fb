"""A check, by reading source code, that every test asserts something.

A test asserts something if it has an `assert`, expects an error or a warning, or runs a program
that must succeed. A call of a function of the test suite that does one of these counts, too.
"""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterable, Iterator

Function = ast.FunctionDef | ast.AsyncFunctionDef
#: Module and name of a function.
Name = tuple[str, str]

#: Functions of libraries that raise by themselves if something is wrong.
CHECKS = {"fail", "raises", "run_state_machine_as_test", "warns"}


class Suite:
    """The functions of all test modules below a folder, which is the root of their imports.

    Attributes
    ----------
    tests
        Module and function of each test that pytest finds.
    hidden
        Names of tests that pytest does not find, because they are nested in a function.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self.tests: list[tuple[str, Function]] = []
        self.hidden: list[str] = []
        #: By name of a function: whether it checks by itself, and the functions that it calls.
        self._functions: dict[Name, tuple[bool, set[Name]]] = {}
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder.parent).with_suffix("").parts
            module = ".".join(parts).removesuffix(".__init__")
            self._read(module, ast.parse(path.read_text()))

    def _read(self, module: str, tree: ast.Module) -> None:
        nodes = list(ast.walk(tree))
        functions = [node for node in nodes if isinstance(node, Function)]
        known: dict[str, Name] = {one.name: (module, one.name) for one in functions}
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests"):
                for alias in node.names:
                    known[alias.asname or alias.name] = (str(node.module), alias.name)
        nested: set[Function] = set()
        for function in functions:
            inside = list(ast.walk(function))
            nested.update(one for one in inside[1:] if isinstance(one, Function))
            checks, called = self._functions.get((module, function.name), (False, set()))
            called |= set(_called(inside, known))
            self._functions[module, function.name] = checks or _checks(inside), called
        if module.rpartition(".")[2].startswith("test_"):
            self.hidden += [
                f"{module}.{one.name}" for one in nested if one.name.startswith("test_")
            ]
        for scope in (tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))):
            for node in scope.body:
                if isinstance(node, Function) and node.name.startswith("test"):
                    self.tests.append((module, node))

    def without_assertion(self) -> Iterator[str]:
        """Names of the tests that assert nothing, such as `tests.test_x.test_y`."""
        checking = {name for name, (checks, _) in self._functions.items() if checks}
        n_before = -1
        while n_before < len(checking):
            n_before = len(checking)
            checking |= {name for name, (_, called) in self._functions.items() if called & checking}
        for module, function in self.tests:
            if (module, function.name) not in checking:
                yield f"{module}.{function.name}"


def _checks(nodes: Iterable[ast.AST]) -> bool:
    """Return whether one of a function's nodes asserts something."""
    for node in nodes:
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


def _called(nodes: Iterable[ast.AST], known: dict[str, Name]) -> Iterator[Name]:
    """Functions of the suite that a function calls: by name, of a module, or of its own class."""
    for node in nodes:
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
