"""What a definition of a custom resource lets through, as the API server of Kubernetes decides it.

Like that server, it drops fields that the schema does not name, fills in defaults, and refuses
values of a wrong type. `objects.py` and `api.py` call this module.
"""

from __future__ import annotations

import copy
from typing import Any

import jsonschema

from tests.deploy.kubernetes.patching import Object

#: Parts of each object that no schema describes.
_OWN = ("apiVersion", "kind", "metadata")


class SchemaError(ValueError):
    """An object does not fit its definition."""


class Definition:
    """The schema of a custom resource."""

    def __init__(self, schema: Object) -> None:
        self._schema = schema
        self._validator = jsonschema.Draft202012Validator(_as_json_schema(schema))

    def checked(self, one: Object) -> Object:
        """Return an object as the server stores it.

        Raises
        ------
        SchemaError
            A value does not fit the schema.
        """
        own = {name: one[name] for name in _OWN if name in one}
        rest = {name: value for name, value in one.items() if name not in _OWN}
        body = _pruned(rest, self._schema)
        problems = self._validator.iter_errors(body)
        if found := [f"{problem.json_path}: {problem.message}" for problem in problems]:
            name = own["metadata"].get("name")
            raise SchemaError(f'{own["kind"]} "{name}" is invalid: {"; ".join(found)[:2000]}')
        return {**body, **own}


def _takes_anything(schema: Object) -> bool:
    if schema.get("type") != "object" or schema.get("x-kubernetes-preserve-unknown-fields"):
        return True
    return "properties" not in schema and not isinstance(schema.get("additionalProperties"), dict)


def _schema_of(name: str, schema: Object) -> Object | None:
    properties, others = schema.get("properties", {}), schema.get("additionalProperties")
    return properties.get(name, others if isinstance(others, dict) else None)


def _pruned(value: Any, schema: Object) -> Any:
    if isinstance(value, list):
        return [_pruned(one, schema["items"]) for one in value] if "items" in schema else value
    if not isinstance(value, dict) or _takes_anything(schema):
        return value
    kept = {}
    for name, inner in value.items():
        within = _schema_of(name, schema)
        # The server drops null, unless the schema allows it.
        if within is not None and (inner is not None or within.get("nullable")):
            kept[name] = _pruned(inner, within)
    for name, within in schema.get("properties", {}).items():
        if name not in kept and "default" in within:
            kept[name] = copy.deepcopy(within["default"])
    return kept


def _as_json_schema(schema: Any) -> Any:
    """Return a schema without the words that only Kubernetes has."""
    if isinstance(schema, list):
        return [_as_json_schema(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string") is True:
        return {"type": ["integer", "string"]}
    made = {name: _as_json_schema(value) for name, value in schema.items()}
    if schema.get("nullable") is True and isinstance(schema.get("type"), str):
        made["type"] = [schema["type"], "null"]
    return made
