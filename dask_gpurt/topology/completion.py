"""Completion of a file on machines by workers' reports: the file wins where it speaks. Pure.

Hosts, devices and links of the file stay as a person wrote them. Reports add the hosts that the
file lacks, and to its hosts:

- GPUs, if the file lists no device of the host; cards and PCIe switches that it does not name;
- links of a part that has no link in the file, as a person leaves out wrong links on purpose;
- links to the network, if the file does not connect the host to one.

`discovery` names reported parts as the file does, and calls this module. `model` prefers written
links between hosts to reported ones, so that added links do not lead round them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from dask_gpurt.topology.model import Host, Link, Topology

#: Most names in one note.
_MAX_NAMES = 32


def networks_of(given: Topology) -> dict[str, set[str]]:
    """Return the switches between hosts to which a file connects each host."""
    found: dict[str, set[str]] = {}
    for link in given.links:
        for end, other in (link.ends, link.ends[::-1]):
            if "/" in end and "/" not in other:
                found.setdefault(end.partition("/")[0], set()).add(other)
    return found


def completed(
    given: Topology, reported: Topology, joined: Iterable[tuple[str, str]] = ()
) -> Topology:
    """Return the hosts and links of a file, with those that reports add.

    Parameters
    ----------
    given
        What a person wrote.
    reported
        What workers report. It calls hosts and parts of the file as the file does.
    joined
        Networks that exchange data, each of the file and of reports.
    """
    seen = {host.name: host for host in reported.hosts}
    hosts = [_completed_host(one, seen.pop(one.name, None)) for one in given.hosts]
    hosts += seen.values()
    switches = (*given.switches, *(one for one in reported.switches if one not in given.switches))
    links = [*given.links, *_added(given, reported, Topology(tuple(hosts), (), switches))]
    links += _joints(links, joined)
    return Topology(tuple(hosts), tuple(links), switches)


def _completed_host(given: Host, reported: Host | None) -> Host:
    if reported is None:
        return given
    memory = _memory(given, reported)
    taken = {name.partition("/")[2] for name in Topology((given,), ()).nodes}
    devices = given.devices or tuple(
        replace(one, numa=memory.get(one.numa or "", one.numa))
        for one in reported.devices
        if one.name not in taken
    )
    taken.update(one.name for one in devices)
    nics = (
        replace(one, numa=memory.get(one.numa or "", one.numa))
        for one in reported.nics
        if one.name not in taken
    )
    return replace(
        given,
        devices=devices,
        nics=(*given.nics, *nics),
        switches=(*given.switches, *(one for one in reported.switches if one not in taken)),
        addresses=(*given.addresses, *reported.addresses),
    )


def _memory(given: Host, reported: Host) -> dict[str, str]:
    """Return the file's name of each reported NUMA node: its own name, or else the first one."""
    known = [one.name for one in given.numa]
    return {one.name: one.name if one.name in known else known[0] for one in reported.numa}


def _added(given: Topology, reported: Topology, whole: Topology) -> Iterator[Link]:
    """Yield the reported links between nodes of the whole topology on which the file is silent."""
    hosts = {host.name: host for host in given.hosts}
    memory = {
        host.node(before): host.node(after)
        for host in reported.hosts
        if host.name in hosts
        for before, after in _memory(hosts[host.name], host).items()
    }
    numa = {host.node(one.name) for host in given.hosts for one in host.numa}
    linked = {end for link in given.links if link.host is not None for end in link.ends} - numa
    nodes, known = set(whole.nodes), set(given.nodes)
    names = {link.name for link in given.links}
    for link in reported.links:
        one, other = (memory.get(end, end) for end in link.ends)
        if one == other or not nodes.issuperset((one, other)):
            continue
        if link.host is not None and (
            not linked.isdisjoint((one, other))
            or (known.issuperset((one, other)) and given.path(one, other) is not None)
        ):
            continue
        name = link.name if link.ends == (one, other) else f"{one} - {other}"
        if name not in names:
            names.add(name)
            yield replace(link, name=name, ends=(one, other))


def _joints(links: Sequence[Link], joined: Iterable[tuple[str, str]]) -> Iterator[Link]:
    """Yield links between networks, so wide that they are nowhere the narrowest."""
    for pair in sorted(set(joined)):
        rates = [one.bandwidth_nbytes_per_s for one in links if not set(pair).isdisjoint(one.ends)]
        name = " - ".join(pair)
        if all(link.name != name for link in links):
            yield Link(name, pair, "network", max(rates), is_reported=True)


# ---------------------------------------------------------------------- origins


def origins(given: Topology, whole: Topology) -> Iterator[str]:
    """Yield sentences that say what of a whole topology is from the file, and what is not."""
    hosts = {host.name: host for host in given.hosts}
    links: dict[str, list[str]] = {host.name: [] for host in whole.hosts}
    for link in whole.links:
        if link.is_reported:
            for name in {end.partition("/")[0] for end in link.ends if "/" in end}:
                ends = (end.removeprefix(f"{name}/") for end in link.ends)
                links[name].append(" - ".join(ends))
    for host in whole.hosts:
        yield f"{host.name}: {_origin(hosts, host, links[host.name])}"
    between = [link for link in whole.links if link.host is None]
    if written := [link.name for link in between if not link.is_reported]:
        yield f"links between hosts as the file says: {_listed(written)}"
    joints = [link.name for link in between if "/" not in "".join(link.ends)]
    if assumed := [name for name in joints if name not in written]:
        yield f"networks that are assumed to be one: {_listed(assumed)}"


def _origin(given: Mapping[str, Host], host: Host, links: Sequence[str]) -> str:
    if host.is_reported:
        return "as its workers report"
    before = set(Topology((given[host.name],), ()).nodes)
    parts = [one.partition("/")[2] for one in Topology((host,), ()).nodes if one not in before]
    added = [_listed(parts)] if parts else []
    added += [f"the links {_listed(links)}"] if links else []
    return "as the file says" + (f"; its workers report also {', and '.join(added)}" * bool(added))


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MAX_NAMES
    return ", ".join(names[:_MAX_NAMES]) + (f" and {more} more" if more > 0 else "")
