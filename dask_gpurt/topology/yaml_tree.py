"""YAML as sections that know the line of each key. Text comes from users: depth is bounded.

libyaml does the parsing where PyYAML was built with it; in plain Python a description of 200 hosts
takes several seconds. What a section may hold is the business of
`dask_gpurt.topology.description`.
"""

from __future__ import annotations

from typing import Any

import yaml

#: Sections and lists in one another. Descriptions have six; libyaml's composer calls itself for
#: each, without looking whether there is stack left.
MAX_DEPTH = 64

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
#: What PyYAML's constructors raise for values that are not of the kind they look like, or claim.
_NOT_OF_ITS_KIND = (ValueError, KeyError, TypeError, OverflowError, AttributeError)


class Section(dict[str, Any]):
    """A mapping that knows the line of each key."""

    line = 0
    lines: dict[str, int]


class SectionLoader(_Loader):  # type: ignore[misc]
    """Safe, and refuses keys that are given twice."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except _NOT_OF_ITS_KIND:
            value = f"{node.value!r:.100}" if isinstance(node, yaml.ScalarNode) else "this"
            problem = f"{value} is no {node.tag.rpartition(':')[2]}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None

    def section(self, node: yaml.MappingNode) -> Section:
        own = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.value in own:
                problem = f"the key {key.value!r} is given twice, or is no word"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            own.add(key.value)
        self.flatten_mapping(node)
        found = Section()
        found.line = node.start_mark.line + 1
        found.lines = {key.value: key.start_mark.line + 1 for key, _ in node.value}
        for key, value in node.value:
            found[str(key.value)] = self.construct_object(value, deep=True)
        return found


SectionLoader.add_constructor("tag:yaml.org,2002:map", SectionLoader.section)


def load(text: str) -> Any:
    """What a text says, with a `Section` for each mapping.

    Raises
    ------
    yaml.YAMLError
        It is not YAML, or nested deeper than `MAX_DEPTH`.
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
