"""The API of the small Kubernetes over HTTP: discovery, requests for objects, and watches.

It turns requests into calls of `objects.py`. `kubelet.py` runs what the objects describe.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from aiohttp import ClientConnectionResetError, web

from tests.deploy.kubernetes.objects import PODS, Objects, Refused, Resource
from tests.deploy.kubernetes.patching import Object, json_patched, merged, selector, value_at

_VERSION = {"major": "1", "minor": "33", "gitVersion": "v1.33.0", "platform": "linux/amd64"}
_VERBS = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]
#: Longest watch, for a client that names no time.
_LONGEST_S = 3600.0


class Target(NamedTuple):
    """The subject of a request: a resource, and one object of it or all."""

    resource: Resource
    namespace: str | None
    name: str | None
    part: str | None


class Api:
    """Answers requests.

    Parameters
    ----------
    logs
        Folder with the output of pods.
    """

    def __init__(self, objects: Objects, logs: Path) -> None:
        self._objects = objects
        self._logs = logs

    def application(self) -> web.Application:
        made = web.Application(client_max_size=32 << 20)
        made.router.add_route("*", "/{path:.*}", self._answer)
        return made

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        try:
            parts = [part for part in request.path.split("/") if part]
            target = _target(parts)
            if target is None:
                return web.json_response(self._discovery(parts))
            return await self._answer_about(request, target)
        except Refused as refused:
            return web.json_response(refused.body, status=refused.code)

    def _discovery(self, parts: list[str]) -> Object:
        versions = self._objects.kinds
        groups: dict[str, Object] = {}
        for version in versions:
            if "/" in version:
                name, number = version.split("/")
                one = {"groupVersion": version, "version": number}
                group = groups.setdefault(name, {"name": name, "versions": []})
                group["versions"].append(one)
                group["preferredVersion"] = group["versions"][0]
        wanted = "/".join(parts[1:])
        match parts:
            case ["version"]:
                return _VERSION
            case ["api"]:
                return {"kind": "APIVersions", "versions": ["v1"]}
            case ["apis"]:
                found = list(groups.values())
                return {"kind": "APIGroupList", "apiVersion": "v1", "groups": found}
            case ["api" | "apis", *_] if wanted in groups:
                return {"kind": "APIGroup", "apiVersion": "v1", **groups[wanted]}
            case ["api" | "apis", *_] if wanted in versions:
                return self._resources(wanted)
        raise Refused(404, "NotFound", "/".join(parts))

    def _resources(self, version: str) -> Object:
        found = []
        for plural, (kind, is_inside) in self._objects.kinds[version].items():
            one = {"kind": kind, "namespaced": is_inside, "singularName": kind.lower()}
            found.append({"name": plural, "verbs": _VERBS, **one})
            if self._objects.has_status(Resource(version, plural)):
                verbs = ["get", "patch", "update"]
                found.append({"name": f"{plural}/status", "verbs": verbs, **one})
        return {
            "kind": "APIResourceList",
            "apiVersion": "v1",
            "groupVersion": version,
            "resources": found,
        }

    async def _answer_about(self, request: web.Request, target: Target) -> web.StreamResponse:
        self._objects.kind(target.resource)
        match request.method:
            case "GET":
                return await self._read(request, target)
            case "DELETE":
                return await self._delete(request, target)
            case "POST" | "PUT" | "PATCH":
                return await self._write(request, target)
        raise Refused(405, "MethodNotAllowed", request.method)

    async def _read(self, request: web.Request, target: Target) -> web.StreamResponse:
        resource, namespace, name, part = target
        if name is not None and part == "log" and resource == PODS:
            self._objects.get(resource, namespace, name)
            return web.Response(text=(self._logs / f"{name}.log").read_text(errors="replace"))
        is_watch = request.query.get("watch") in ("1", "true")
        if name is not None and part == "scale":
            return web.json_response(
                self._scale(resource, self._objects.get(resource, namespace, name))
            )
        if name is not None and not is_watch:
            return web.json_response(self._objects.get(resource, namespace, name))
        fields = request.query.get("fieldSelector", "")
        if name is not None:
            fields += f",metadata.name={name}"
        is_wanted = selector(request.query.get("labelSelector", ""), fields)
        if is_watch:
            return await self._watch(request, target, is_wanted)
        kind, _ = self._objects.kind(resource)
        return web.json_response(
            {
                "kind": f"{kind}List",
                "apiVersion": resource.version,
                "metadata": {"resourceVersion": str(self._objects.number)},
                "items": self._objects.select(resource, namespace, is_wanted),
            }
        )

    async def _watch(
        self, request: web.Request, target: Target, is_wanted: Any
    ) -> web.StreamResponse:
        resource, namespace, *_ = target
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)

        async def send(what: str, one: Object) -> None:
            await response.write(json.dumps({"type": what, "object": one}).encode() + b"\n")

        since = int(request.query.get("resourceVersion") or 0)
        limit_s = float(request.query.get("timeoutSeconds") or _LONGEST_S)
        with contextlib.suppress(TimeoutError, ConnectionResetError, ClientConnectionResetError):
            async with asyncio.timeout(limit_s):
                if not since:
                    since = self._objects.number
                    for one in self._objects.select(resource, namespace, is_wanted):
                        await send("ADDED", one)
                async for event in self._objects.events(since):
                    inside = event.one["metadata"].get("namespace")
                    is_there = event.resource == resource and namespace in (None, inside)
                    if is_there and is_wanted(event.one):
                        await send(event.what, event.one)
        return response

    async def _delete(self, request: web.Request, target: Target) -> web.StreamResponse:
        resource, namespace, name, _ = target
        text = await request.text()
        options = json.loads(text) if text else {}
        grace = options.get("gracePeriodSeconds", request.query.get("gracePeriodSeconds"))
        grace_s = None if grace is None else int(grace)
        if name is not None:
            return web.json_response(await self._objects.delete(resource, namespace, name, grace_s))
        is_wanted = selector(request.query.get("labelSelector", ""))
        for one in self._objects.select(resource, namespace, is_wanted):
            meta = one["metadata"]
            await self._objects.delete(resource, meta.get("namespace"), meta["name"], grace_s)
        return web.json_response({"kind": "Status", "status": "Success"})

    async def _write(self, request: web.Request, target: Target) -> web.StreamResponse:
        resource, namespace, name, part = target
        text = await request.text()
        body = yaml.safe_load(text) if "yaml" in request.content_type else json.loads(text)
        if request.method == "POST":
            return web.json_response(
                await self._objects.create(resource, namespace, body), status=201
            )
        assert name is not None
        if part == "scale":
            body = body["spec"]["replicas"]
            for field in reversed(self._objects.scales[resource].split(".")):
                body = {field: body}

        def change(one: Object) -> Object:
            if "json-patch" in request.content_type:
                try:
                    return json_patched(one, body)
                except ValueError as error:
                    raise Refused(422, "Invalid", str(error)) from None
            is_patch = part == "scale" or request.method == "PATCH"
            return merged(one, body) if is_patch else body

        changed = await self._objects.update(resource, namespace, name, change, part == "status")
        return web.json_response(self._scale(resource, changed) if part == "scale" else changed)

    def _scale(self, resource: Resource, one: Object) -> Object:
        return {
            "kind": "Scale",
            "apiVersion": "autoscaling/v1",
            "metadata": one["metadata"],
            "spec": {"replicas": value_at(one, self._objects.scales[resource])},
        }


def _target(parts: list[str]) -> Target | None:
    """Return what a path names, or None for a question about the API itself."""
    match parts:
        case ["api", version, *rest] if rest:
            pass
        case ["apis", group, number, *rest] if rest:
            version = f"{group}/{number}"
        case _:
            return None
    namespace = None
    if rest[0] == "namespaces" and len(rest) > 2:
        _, namespace, *rest = rest
    plural, name, part, *_ = [*rest, None, None]
    assert plural is not None
    return Target(Resource(version, plural), namespace, name, part)
