"""All objects of the small Kubernetes, with the events of their changes.

A change gets the next number of the whole store, its resource version, and is an event that watches
read. Objects with finalizers stay until these are gone, and an object goes with its owner.
`api.py` turns requests into calls of this module, and `kubelet.py` acts on its events.
"""

from __future__ import annotations

import asyncio
import copy
import datetime
import itertools
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, NamedTuple

from tests.deploy.kubernetes.patching import Object, Selector
from tests.deploy.kubernetes.schemas import Definition, SchemaError

#: For each version of the API: the kind of each resource, and whether it is in a namespace.
BUILT_IN: dict[str, dict[str, tuple[str, bool]]] = {
    "v1": {
        "namespaces": ("Namespace", False),
        "pods": ("Pod", True),
        "services": ("Service", True),
        "events": ("Event", True),
    },
    "apps/v1": {"deployments": ("Deployment", True)},
    "apiextensions.k8s.io/v1": {
        "customresourcedefinitions": ("CustomResourceDefinition", False),
    },
}
#: Fields that no request may change.
_FIXED = ("uid", "creationTimestamp", "generation", "deletionTimestamp", "name", "namespace")


class Refused(Exception):
    """A request that the server refuses.

    Parameters
    ----------
    code
        Status of HTTP.
    reason
        Kubernetes' word for it.
    """

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.body = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "code": code,
            "reason": reason,
            "message": message,
        }


class Resource(NamedTuple):
    """Where objects of a kind are, such as `apps/v1` and `deployments`."""

    version: str
    plural: str


PODS = Resource("v1", "pods")
SERVICES = Resource("v1", "services")
DEPLOYMENTS = Resource("apps/v1", "deployments")
DASK_CLUSTERS = Resource("kubernetes.dask.org/v1", "daskclusters")
#: Finalizer that keeps a pod until its container has ended.
UNTIL_ENDED = "tests/until-ended"
DEFINITIONS = Resource("apiextensions.k8s.io/v1", "customresourcedefinitions")


class Event(NamedTuple):
    """A change of an object, with the object as it was then."""

    number: int
    what: str
    resource: Resource
    one: Object


def now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Objects:
    """The store of all objects.

    Attributes
    ----------
    number
        Number of the last change.
    kinds
        The kind of each resource, and whether it is in a namespace.
    definitions
        Definition of each custom resource.
    """

    def __init__(self) -> None:
        self.number = 0
        self.kinds = {version: dict(plurals) for version, plurals in BUILT_IN.items()}
        self.definitions: dict[Resource, Definition] = {}
        #: Path of the number that `kubectl scale` sets, for each resource that has one.
        self.scales: dict[Resource, str] = {}
        self._without_status: set[Resource] = set()
        self._objects: dict[tuple[Resource, str | None, str], Object] = {}
        self._events: list[Event] = []
        self._changed = asyncio.Condition()
        self._hosts = itertools.count(1)

    def kind(self, resource: Resource) -> tuple[str, bool]:
        try:
            return self.kinds[resource.version][resource.plural]
        except KeyError:
            raise Refused(404, "NotFound", f"no resource {'/'.join(resource)}") from None

    def has_status(self, resource: Resource) -> bool:
        """Return whether requests change an object's status apart from the rest."""
        return resource not in self._without_status

    def get(self, resource: Resource, namespace: str | None, name: str) -> Object:
        try:
            return self._objects[resource, namespace, name]
        except KeyError:
            raise Refused(404, "NotFound", f'{resource.plural} "{name}" not found') from None

    def has(self, resource: Resource, namespace: str | None, name: str) -> bool:
        return (resource, namespace, name) in self._objects

    def select(
        self,
        resource: Resource,
        namespace: str | None = None,
        is_wanted: Selector = lambda one: True,
    ) -> list[Object]:
        return [
            one
            for (where, inside, _), one in self._objects.items()
            if where == resource and namespace in (None, inside) and is_wanted(one)
        ]

    async def events(self, since: int) -> AsyncIterator[Event]:
        """Yield the changes after a number, now and as they come."""
        # Events have the numbers 1, 2, ...
        while True:
            while since < self.number:
                since += 1
                yield self._events[since - 1]
            async with self._changed:
                if since == self.number:
                    await self._changed.wait()

    async def _emit(self, what: str, resource: Resource, one: Object) -> None:
        self.number += 1
        one["metadata"]["resourceVersion"] = str(self.number)
        self._events.append(Event(self.number, what, resource, copy.deepcopy(one)))
        async with self._changed:
            self._changed.notify_all()

    def _checked(self, resource: Resource, one: Object) -> Object:
        """Return an object as its definition lets it through."""
        if (definition := self.definitions.get(resource)) is None:
            return one
        try:
            return definition.checked(one)
        except SchemaError as error:
            raise Refused(422, "Invalid", str(error)) from None

    async def create(self, resource: Resource, namespace: str | None, one: Object) -> Object:
        kind, is_inside = self.kind(resource)
        meta = one.setdefault("metadata", {})
        if not meta.get("name"):
            meta["name"] = meta.get("generateName", "unnamed-") + uuid.uuid4().hex[:5]
        inside = (namespace or meta.get("namespace") or "default") if is_inside else None
        if inside is not None:
            meta["namespace"] = inside
        if self.has(resource, inside, meta["name"]):
            text = f'{resource.plural} "{meta["name"]}" already exists'
            raise Refused(409, "AlreadyExists", text)
        one = self._checked(resource, {"apiVersion": resource.version, "kind": kind, **one})
        if self.has_status(resource):
            one.pop("status", None)
        one["metadata"] |= {"uid": str(uuid.uuid4()), "creationTimestamp": now(), "generation": 1}
        if resource == PODS:
            one["metadata"]["finalizers"] = [UNTIL_ENDED]
        elif resource == DEFINITIONS:
            self._define(one)
        elif resource == SERVICES:
            one["spec"].setdefault("clusterIP", f"10.96.0.{next(self._hosts)}")
        self._objects[resource, inside, meta["name"]] = one
        await self._emit("ADDED", resource, one)
        return one

    def _define(self, definition: Object) -> None:
        spec, names = definition["spec"], definition["spec"]["names"]
        for version in spec["versions"]:
            resource = Resource(f"{spec['group']}/{version['name']}", names["plural"])
            of_version = self.kinds.setdefault(resource.version, {})
            of_version[resource.plural] = (names["kind"], spec["scope"] == "Namespaced")
            self.definitions[resource] = Definition(version["schema"]["openAPIV3Schema"])
            parts = version.get("subresources") or {}
            if "status" not in parts:
                self._without_status.add(resource)
            if "scale" in parts:
                self.scales[resource] = parts["scale"]["specReplicasPath"].removeprefix(".")
        kinds = ("NamesAccepted", "Established")
        definition["status"] = {
            "acceptedNames": names,
            "conditions": [{"type": kind, "status": "True"} for kind in kinds],
        }

    async def update(
        self,
        resource: Resource,
        namespace: str | None,
        name: str,
        change: Callable[[Object], Object],
        only_status: bool = False,
    ) -> Object:
        """Replace an object by `change(copy)`; only the status, or all but that."""
        old = self.get(resource, namespace, name)
        new = change(copy.deepcopy(old))
        wanted = new.get("metadata", {}).get("resourceVersion")
        if wanted not in (None, old["metadata"]["resourceVersion"]):
            raise Refused(409, "Conflict", f"{resource.plural} {name} has been modified")
        if only_status:
            new = {**copy.deepcopy(old), "status": new.get("status")}
        elif self.has_status(resource):
            new.pop("status", None)
            new |= {"status": copy.deepcopy(old["status"])} if "status" in old else {}
        kept = {field: old["metadata"][field] for field in _FIXED if field in old["metadata"]}
        new["metadata"] |= kept
        new = self._checked(resource, new)
        new["metadata"]["resourceVersion"] = old["metadata"]["resourceVersion"]
        if new == old:
            return old
        if new.get("spec") != old.get("spec"):
            new["metadata"]["generation"] += 1
        self._objects[resource, namespace, name] = new
        await self._emit("MODIFIED", resource, new)
        await self._end(resource, namespace, name)
        return new

    async def delete(
        self, resource: Resource, namespace: str | None, name: str, grace_s: int | None = None
    ) -> Object:
        """Delete an object, now or when its finalizers are gone."""
        one = self.get(resource, namespace, name)
        meta = one["metadata"]
        is_first = "deletionTimestamp" not in meta
        meta.setdefault("deletionTimestamp", now())
        if grace_s is not None:
            meta["deletionGracePeriodSeconds"] = grace_s
        if meta.get("finalizers") and (is_first or grace_s is not None):
            await self._emit("MODIFIED", resource, one)
        await self._end(resource, namespace, name)
        return one

    async def _end(self, resource: Resource, namespace: str | None, name: str) -> None:
        one = self._objects.get((resource, namespace, name))
        if one is None or "deletionTimestamp" not in one["metadata"]:
            return
        if one["metadata"].get("finalizers"):
            return
        del self._objects[resource, namespace, name]
        await self._emit("DELETED", resource, one)
        for where, inside, owned in list(self._owned_by(one)):
            if self.has(where, inside, owned):
                await self.delete(where, inside, owned)

    def _owned_by(self, owner: Object) -> Iterator[tuple[Resource, str | None, str]]:
        for key, one in self._objects.items():
            if is_owned(one, owner):
                yield key


def is_owned(one: Object, owner: Object) -> bool:
    """Return whether an object goes with another."""
    references: list[Any] = one["metadata"].get("ownerReferences") or []
    return any(reference["uid"] == owner["metadata"]["uid"] for reference in references)
