"""Patches, selectors and conditions of Kubernetes, on plain values. No objects are stored here.

`objects.py` and `api.py` call this module.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

Object = dict[str, Any]
Selector = Callable[[Object], bool]

#: One requirement of a label selector: `key in (a, b)`, or `key notin (a, b)`.
_SET = re.compile(r"([^\s!=]+)\s+(in|notin)\s+\(([^)]*)\)")
#: A comma that is not inside parentheses.
_BETWEEN = re.compile(r",(?![^()]*\))")


def merged(target: Any, patch: Any) -> Any:
    """Return a value after a JSON merge patch (RFC 7386)."""
    if not isinstance(patch, Mapping):
        return patch
    result = dict(target) if isinstance(target, Mapping) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merged(result.get(name), value)
    return result


def json_patched(target: Any, operations: list[Object]) -> Any:
    """Change a value by a JSON patch (RFC 6902), and return it.

    Raises
    ------
    ValueError
        A `test` of the patch failed.
    """
    for operation in operations:
        *parents, last = (
            part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]
        )
        place = target
        for part in parents:
            place = place[int(part)] if isinstance(place, list) else place[part]
        what, value = operation["op"], operation.get("value")
        if isinstance(place, list):
            _change_list(place, len(place) if last == "-" else int(last), what, value)
        elif what == "test":
            _require(place.get(last) == value, operation["path"])
        elif what == "remove":
            place.pop(last, None)
        else:
            place[last] = value
    return target


def _change_list(place: list[Any], index: int, what: str, value: Any) -> None:
    if what == "test":
        _require(place[index] == value, str(index))
    elif what == "remove":
        del place[index]
    elif what == "add":
        place.insert(index, value)
    else:
        place[index] = value


def _require(holds: bool, where: str) -> None:
    if not holds:
        raise ValueError(f"the test of the patch failed at {where}")


def selector(labels: str = "", fields: str = "") -> Selector:
    """Return whether an object is selected, by Kubernetes' texts for labels and fields."""
    requirements = [_of_label(part.strip()) for part in _BETWEEN.split(labels) if part.strip()]
    requirements += [_of_field(part) for part in fields.split(",") if part]
    return lambda one: all(holds(one) for holds in requirements)


def _of_label(text: str) -> Selector:
    if found := _SET.fullmatch(text):
        name, values = found[1], {value.strip() for value in found[3].split(",")}
        return lambda one: (labels_of(one).get(name) in values) == (found[2] == "in")
    if "=" in text:
        name, value, is_equal = _equation(text)
        return lambda one: (labels_of(one).get(name) == value) == is_equal
    if text.startswith("!"):
        return lambda one: text[1:] not in labels_of(one)
    return lambda one: text in labels_of(one)


def _of_field(text: str) -> Selector:
    path, value, is_equal = _equation(text)
    return lambda one: (str(value_at(one, path) or "") == value) == is_equal


def _equation(text: str) -> tuple[str, str, bool]:
    name, sign, value = re.split(r"\s*(!=|==?)\s*", text, maxsplit=1)
    return name, value, sign != "!="


def labels_of(one: Object) -> Object:
    return one["metadata"].get("labels") or {}


def is_ready(pod: Object) -> bool:
    return {"type": "Ready", "status": "True"} in pod.get("status", {}).get("conditions", ())


def value_at(value: Any, path: str) -> Any:
    """Return what is at a path such as `spec.replicas`, or None."""
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
