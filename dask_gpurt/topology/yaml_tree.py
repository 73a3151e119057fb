"""YAML loader that records the line of each key. Nesting is bounded, since users write the text.

It uses libyaml if PyYAML was built with it: in pure Python, a description of 200 hosts takes
several seconds. `dask_gpurt.topology.description` validates the content.
"""

from __future__ import annotations

from typing import Any

import yaml

#: Deepest nesting. Descriptions have six levels. libyaml's composer recurses for each level without
#: checking the stack.
MAX_DEPTH = 64

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
#: Errors of PyYAML's constructors for values that do not match their tag.
_BAD_VALUE = (ValueError, KeyError, TypeError, OverflowError, AttributeError)


class YamlSection(dict[str, Any]):
    """A mapping that knows the line of each key."""

    line = 0
    lines: dict[str, int]


class SectionLoader(_Loader):  # type: ignore[misc]
    """A safe loader that rejects duplicate keys."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except _BAD_VALUE:
            value = f"{node.value!r:.100}" if isinstance(node, yaml.ScalarNode) else "this"
            problem = f"{value} is not a valid {node.tag.rpartition(':')[2]}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None

    def section(self, node: yaml.MappingNode) -> YamlSection:
        own = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.value in own:
                problem = f"the key {key.value!r} occurs twice, or is not a word"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            own.add(key.value)
        self.flatten_mapping(node)
        found = YamlSection()
        found.line = node.start_mark.line + 1
        found.lines = {key.value: key.start_mark.line + 1 for key, _ in node.value}
        for key, value in node.value:
            found[str(key.value)] = self.construct_object(value, deep=True)
        return found


SectionLoader.add_constructor("tag:yaml.org,2002:map", SectionLoader.section)


def problem_text(error: yaml.YAMLError) -> str:
    """Return the problem and its place in one line. PyYAML's own text has pieces of the file."""
    what = getattr(error, "problem", None) or " ".join(str(error).split())
    mark = getattr(error, "problem_mark", None)
    where = f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
    return f"{what:.200}{where}"


def load(text: str) -> Any:
    """Parse a text, with a `YamlSection` for each mapping.

    Raises
    ------
    yaml.YAMLError
        The text is not YAML, or is nested deeper than `MAX_DEPTH`.
    """
    depth = 0
    for event in yaml.parse(text, _Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                mark: Any = event.start_mark
                raise yaml.YAMLError(f"line {mark.line + 1}: nested too deeply")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
    return yaml.load(text, SectionLoader)
