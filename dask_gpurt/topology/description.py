"""The description file of machines: YAML to `Topology`, and back.

::

    hosts:
      - name: box
        addresses: [10.0.0.1]
        numa: [{name: numa0, memory: 512 GiB}]
        devices: [{name: gpu0, kind: gpu, numa: numa0, memory: 80 GiB, workers: ["box-0"]}]
        nics: [{name: mlx0, numa: numa0}]
        switches: [pcie0]
        links:
          - {between: [gpu*, pcie0], kind: pcie, bandwidth: 55 GB/s, latency: 2 us}
          - {between: [mlx0, pcie0], kind: pcie, bandwidth: 25 GB/s, latency: 2 us}
    switches: [fabric]
    links:
      - {between: [box/mlx0, fabric], kind: ethernet, bandwidth: 100 Gb/s, latency: 5 us}

Ends of links may be patterns: each node that matches the first is linked to each that matches the
second. `GB/s` are bytes, `Gb/s` bits, both powers of ten. Everything is validated; errors name the
line and the key. This module reads text, not files.
"""

from __future__ import annotations

import re
import reprlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, NoReturn

import yaml

from dask_gpurt.errors import ConfigError
from dask_gpurt.topology import yaml_tree
from dask_gpurt.topology.model import (
    DEVICE_KINDS,
    DeviceNode,
    Host,
    Link,
    Nic,
    Numa,
    Topology,
    is_pattern,
)
from dask_gpurt.topology.quantities import RATES, SIZES, TIMES, amount
from dask_gpurt.topology.yaml_tree import YamlSection

#: Most characters in a description: as many as `gpurt.topology.file` may have, which is enough for
#: 6,000 hosts of eight GPUs.
MAX_NCHARS = 2**24
#: Most links that patterns may expand to.
MAX_LINKS = 100_000

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60

_WILD = re.compile(r"[*?\[]")
#: Units that `dump` writes; the first exact one is used.
_BINARY_SIZES = {unit: SIZES[unit] for unit in ("TiB", "GiB", "MiB", "KiB")}
_SHORT_RATES = {unit: RATES[unit] for unit in ("GB/s", "MB/s")}
_SHORT_TIMES = {unit: TIMES[unit] for unit in ("ms", "us", "ns")}


def parse(text: str, source: str = "topology") -> Topology:
    """Return the topology that a text describes.

    Parameters
    ----------
    source
        Name of the file, for errors.

    Raises
    ------
    ConfigError
        The text is not YAML, or does not describe a topology. The message names the line and the
        key.
    """
    if len(text) > MAX_NCHARS:
        raise ConfigError(f"{source} has more than {MAX_NCHARS:,} characters")
    try:
        tree = yaml_tree.load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is not YAML: {yaml_tree.problem_text(error)}") from None
    return _Reader(source).topology(tree)


def _shown(value: object) -> str:
    """Return a short form of a value for an error: the value may be a whole long file."""
    return _SHORT.repr(value)


def dump(topology: Topology) -> str:
    """Return the YAML of a topology. `parse` turns it into an equal topology."""
    hosts = []
    outer: list[Link] = []
    inner: dict[str, list[Link]] = {host.name: [] for host in topology.hosts}
    for link in topology.links:
        owners = {end.partition("/")[0] if "/" in end else None for end in link.ends}
        owner = owners.pop() if len(owners) == 1 else None
        (inner[owner] if owner is not None else outer).append(link)
    for host in topology.hosts:
        hosts.append(
            _filled(
                name=host.name,
                addresses=list(host.addresses),
                numa=[_line(name=one.name, memory=_size(one.memory_nbytes)) for one in host.numa],
                devices=[
                    _line(
                        name=one.name,
                        kind=one.kind,
                        numa=one.numa,
                        memory=_size(one.memory_nbytes),
                        workers=list(one.workers),
                    )
                    for one in host.devices
                ],
                nics=[_line(name=one.name, numa=one.numa) for one in host.nics],
                switches=list(host.switches),
                links=[_plain_link(link, host.name + "/") for link in inner[host.name]],
            )
        )
    plain = _filled(
        hosts=hosts,
        switches=list(topology.switches),
        links=[_plain_link(link, "") for link in outer],
    )
    plain.setdefault("hosts", [])
    text = yaml.dump(plain, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=100)
    return str(text)


class _Line(dict[str, Any]):
    """A mapping that is written on one line."""


class _Dumper(yaml.SafeDumper):
    """A safe dumper that writes each part or link on one line."""

    def one_line(self, data: _Line) -> yaml.Node:
        return self.represent_mapping("tag:yaml.org,2002:map", data.items(), flow_style=True)


_Dumper.add_representer(_Line, _Dumper.one_line)


def _filled(**values: Any) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value}


def _line(**values: Any) -> _Line:
    return _Line(_filled(**values))


def _size(nbytes: int) -> str | None:
    return _short(nbytes, _BINARY_SIZES, "B") if nbytes else None


def _plain_link(link: Link, prefix: str) -> _Line:
    return _line(
        name="" if link.name == _default_name(*link.ends) else link.name,
        between=[end.removeprefix(prefix) for end in link.ends],
        kind=link.kind,
        bandwidth=_short(link.bandwidth_nbytes_per_s, _SHORT_RATES, "B/s"),
        latency=_short(link.latency_s, _SHORT_TIMES, "s"),
    )


def _default_name(one: str, other: str) -> str:
    return f"{one} - {other}"


def _short(amount: float, units: Mapping[str, float], plain: str) -> str:
    """Return an amount in the first unit that is exact, or else in the plain unit."""
    for unit, size in units.items():
        text = f"{amount / size:.6g}"
        if amount >= size / 2 and "e" not in text and float(text) * size == amount:
            return f"{text} {unit}"
    return f"{amount!r} {plain}"


class _Named:
    """Nodes of a topology, found by pattern.

    Each of a thousand hosts has its own link to a switch. Comparing all nodes with each end of each
    link took most of the parsing time.
    """

    def __init__(self, nodes: Iterable[str]) -> None:
        self._nodes = list(nodes)
        self._of_host: dict[str, list[str]] = {}
        for node in self._nodes:
            self._of_host.setdefault(node.partition("/")[0], []).append(node)

    def fitting(self, pattern: str) -> list[str]:
        """Return the nodes that match, in their order."""
        host = pattern.partition("/")[0]
        nodes = self._nodes if _WILD.search(host) else self._of_host.get(host, [])
        return [node for node in nodes if fnmatchcase(node, pattern)]


class _Reader:
    """Converts the tree of a file to a topology, and reports errors with their lines."""

    def __init__(self, source: str) -> None:
        self._source = source
        #: The host with each name or address, and the device with each worker.
        self._called: dict[str, str] = {}
        self._workers: dict[str, str] = {}

    def topology(self, tree: Any) -> Topology:
        section = self._section(tree, "the file", {"hosts"}, {"switches", "links"})
        hosts: list[Host] = []
        links: list[Link] = []
        for i, one in enumerate(self._sections(section, "hosts")):
            host, inner = self._host(one, f"hosts[{i}]")
            hosts.append(host)
            links += inner
        switches = self._names(section, "switches", "")
        found = Topology(tuple(hosts), (), switches)
        links += self._links(section, "", found.nodes, "")
        self._check_unique(section, "links", [link.name for link in links])
        return Topology(tuple(hosts), tuple(links), switches)

    def _host(self, section: Any, where: str) -> tuple[Host, list[Link]]:
        optional = {"addresses", "devices", "nics", "switches", "links"}
        section = self._section(section, where, {"name", "numa"}, optional)
        numa = tuple(
            Numa(self._name(one, f"{where}.numa[{i}]"), self._memory(one, f"{where}.numa[{i}]"))
            for i, one in enumerate(self._parts(section, "numa", where, set(), {"memory"}))
        )
        if not numa:
            self._fail(section, "numa", f"{where}.numa is empty; a host has at least one NUMA node")
        devices = []
        wanted = {"numa", "memory", "workers"}
        for i, one in enumerate(self._parts(section, "devices", where, {"kind"}, wanted)):
            at = f"{where}.devices[{i}]"
            if one["kind"] not in DEVICE_KINDS:
                allowed = " or ".join(DEVICE_KINDS)
                self._fail(one, "kind", f"{at}.kind is {_shown(one['kind'])}; it may be {allowed}")
            near = self._near(one, numa, at)
            workers = self._names(one, "workers", f"{at}.", patterns=True)
            words = [word for word in workers if not is_pattern(word)]
            self._check_not_taken(one, "workers", at, words, self._workers)
            memory = self._memory(one, at)
            devices.append(DeviceNode(self._name(one, at), one["kind"], near, memory, workers))
        nics = tuple(
            Nic(self._name(one, f"{where}.nics[{i}]"), self._near(one, numa, f"{where}.nics[{i}]"))
            for i, one in enumerate(self._parts(section, "nics", where, set(), {"numa"}))
        )
        host = Host(
            self._name(section, where),
            numa,
            tuple(devices),
            nics,
            self._names(section, "switches", f"{where}."),
            self._names(section, "addresses", f"{where}.", patterns=True),
        )
        self._check_not_taken(section, "name", where, [host.name], self._called)
        self._check_not_taken(section, "addresses", where, host.addresses, self._called)
        nodes = Topology((host,), ()).nodes
        self._check_unique(section, "numa", list(nodes))
        return host, self._links(section, f"{where}.", nodes, host.name + "/")

    def _links(
        self, section: YamlSection, where: str, nodes: Iterable[str], prefix: str
    ) -> list[Link]:
        found: list[Link] = []
        named = _Named(nodes)
        for i, one in enumerate(self._sections(section, "links")):
            at = f"{where}links[{i}]"
            one = self._section(one, at, {"between", "bandwidth"}, {"name", "kind", "latency"})
            ends = one["between"]
            if not isinstance(ends, list) or len(ends) != 2:
                self._fail(one, "between", f"{at}.between is {_shown(ends)}; it may be two nodes")
            matching = []
            for end in ends:
                fitting = named.fitting(f"{prefix}{end}")
                if not fitting:
                    self._fail(
                        one, "between", f"{at}.between names {_shown(end)}, which is no node here"
                    )
                matching.append(fitting)
            bandwidth = self._quantity(one, "bandwidth", at, RATES, "450 GB/s' or '100 Gb/s")
            latency = self._quantity(one, "latency", at, TIMES, "2 us", missing=0.0)
            if bandwidth <= 0:
                self._fail(one, "bandwidth", f"{at}.bandwidth is 0; leave the link out instead")
            pairs = [(a, b) for a in matching[0] for b in matching[1] if a != b]
            if len(found) + len(pairs) > MAX_LINKS:
                self._fail(one, "between", f"{at} makes more than {MAX_LINKS:,} links")
            if "name" in one and len(pairs) > 1:
                self._fail(one, "name", f"{at}.name would name {len(pairs)} links")
            for a, b in pairs:
                name = str(one.get("name", _default_name(a, b)))
                kind = str(one.get("kind", "link"))
                found.append(Link(name, (a, b), kind, bandwidth, latency))
        return found

    # ------------------------------------------------------------------ values

    def _section(self, value: Any, where: str, needed: set[str], optional: set[str]) -> YamlSection:
        if not isinstance(value, YamlSection):
            raise ConfigError(
                f"{self._source}: {where} is {_shown(value)}; it may be a section of keys"
            )
        for key in value:
            if key not in needed | optional:
                allowed = ", ".join(sorted(needed | optional))
                self._fail(value, key, f"{where} has no key {_shown(key)}; it may have {allowed}")
        for key in sorted(needed - set(value)):
            self._fail(value, None, f"{where} lacks the key {_shown(key)}")
        return value

    def _sections(self, section: YamlSection, key: str) -> list[Any]:
        value = section.get(key) or []
        if not isinstance(value, list):
            self._fail(section, key, f"{key} is {_shown(value)}; it may be a list")
        return list(value)

    def _parts(
        self, section: YamlSection, key: str, where: str, needed: set[str], optional: set[str]
    ) -> list[YamlSection]:
        found = self._sections(section, key)
        return [
            self._section(one, f"{where}.{key}[{i}]", {"name"} | needed, optional)
            for i, one in enumerate(found)
        ]

    def _name(self, section: YamlSection, where: str) -> str:
        name = section["name"]
        if not isinstance(name, str) or not name or re.search(r"[/*?\[\]\s]", name):
            self._fail(
                section,
                "name",
                f"{where}.name is {_shown(name)}; it may be a word without slash, star or blank",
            )
        return str(name)

    def _names(
        self, section: YamlSection, key: str, where: str, *, patterns: bool = False
    ) -> tuple[str, ...]:
        value = section.get(key) or []
        fits: Callable[[Any], bool] = (
            (lambda one: isinstance(one, str | int) and not isinstance(one, bool))
            if patterns
            else (lambda one: isinstance(one, str) and not re.search(r"[/*?\[\]\s]", one))
        )
        if not isinstance(value, list) or not all(map(fits, value)):
            self._fail(section, key, f"{where}{key} is {_shown(value)}; it may be a list of names")
        return tuple(map(str, value))

    def _near(self, section: YamlSection, numa: Iterable[Numa], where: str) -> str | None:
        near = section.get("numa")
        known = [one.name for one in numa]
        if near is not None and near not in known:
            allowed = " or ".join(known)
            self._fail(section, "numa", f"{where}.numa is {_shown(near)}; it may be {allowed}")
        return near

    def _memory(self, section: YamlSection, where: str) -> int:
        return int(self._quantity(section, "memory", where, SIZES, "80 GiB", missing=0.0))

    def _quantity(
        self,
        section: YamlSection,
        key: str,
        where: str,
        units: Mapping[str, float],
        example: str,
        missing: float | None = None,
    ) -> float:
        if key not in section and missing is not None:
            return missing
        value = section[key]
        found = amount(value, units)
        if found is None:
            self._fail(
                section, key, f"{where}.{key} is {_shown(value)}; it may be such as '{example}'"
            )
        return found

    def _check_unique(self, section: YamlSection, key: str, names: list[str]) -> None:
        for name, times in Counter(names).items():
            if times > 1:
                self._fail(section, key, f"{_shown(name)} occurs twice")

    def _check_not_taken(
        self,
        section: YamlSection,
        key: str,
        where: str,
        words: Iterable[str],
        taken: dict[str, str],
    ) -> None:
        for word in words:
            if (other := taken.setdefault(word, where)) != where:
                self._fail(section, key, f"{where}.{key} names {_shown(word)}, as {other} does")

    def _fail(self, section: YamlSection, key: str | None, what: str) -> NoReturn:
        line = section.lines.get(key, section.line) if key is not None else section.line
        raise ConfigError(f"{self._source}, line {line}: {what}")
