"""Discovery of a topology from workers' reports on their machines and from measurements. Pure.

`host_draft` derives each host from a report; this module names hosts and connects them. Where no
network speed is reported or measured, hosts are described without a network. Each assumption is a
note in the description.

Only interfaces that workers listen on connect hosts. A machine may have faster cards, but Dask's
traffic does not use them.

If a person describes a part of the machines, `completion` adds what is discovered to that. A
machine is the host on which that description puts any of its workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median_high

from dask_gpurt.topology.completion import completed, networks_of, origins
from dask_gpurt.topology.description import dump
from dask_gpurt.topology.host_draft import HostDraft, WorkerReport, unique, word
from dask_gpurt.topology.model import Topology
from dask_gpurt.topology.probing import Measured


@dataclass(frozen=True)
class Discovery:
    """A topology, and notes for its reader, each a sentence."""

    topology: Topology
    notes: tuple[str, ...]

    def as_text(self) -> str:
        """Return the notes and the description as a file that `description.parse` reads."""
        return "".join(f"# {note}\n" for note in self.notes) + dump(self.topology)


def discover(
    workers: Iterable[WorkerReport],
    measured: Mapping[tuple[str, str], Measured] | None = None,
    given: Topology | None = None,
) -> Discovery:
    """Return the topology of the machines that workers are on.

    Parameters
    ----------
    measured
        Measurements from the first to the second of two hosts, named as in workers' addresses.
    given
        What a person wrote of the machines. It wins over reports and measurements.
    """
    written = Topology((), ()) if given is None else given
    parts = _parts(workers, written)
    networks = networks_of(written)
    switches: set[str] = set()
    if len(parts) > 1:
        between = _between_machines(parts, measured or {})
        usual = median_high(between.values()) if between else None
        for part in parts:
            if part.name not in networks:
                switches |= part.join_network(between, usual)
    taken = _words(written) | {part.name for part in parts}
    users = {user for host in written.hosts for one in host.devices for user in one.workers}
    found = Topology(
        tuple(part.host(taken, users) for part in parts),
        tuple(link for part in parts for link in part.links.values()),
        tuple(sorted(switches)),
    ).as_reported()
    notes = [note for part in parts for note in part.notes]
    if given is None:
        return Discovery(found, tuple(notes))
    joined = {
        (own, other)
        for part in parts
        for own in networks.get(part.name, ())
        for other in switches & part.networks()
        # The file may connect the two itself.
        if other not in given.switches or given.path(own, other) is None
    }
    whole = completed(given, found, joined)
    return Discovery(whole, (*origins(given, whole), *notes))


def _parts(workers: Iterable[WorkerReport], given: Topology) -> list[HostDraft]:
    """Return each machine, with the links within it, under the name that a person gave it."""
    by_machine: dict[tuple[str, str], list[WorkerReport]] = {}
    for seen in sorted(workers, key=lambda one: one.address):
        by_machine.setdefault((seen.report.machine.name, seen.report.machine.boot), []).append(seen)
    hosts = {host.name: host for host in given.hosts}
    taken = _words(given)
    parts: dict[str, HostDraft] = {}
    for key in sorted(by_machine):
        seen_on = by_machine[key]
        nodes = {one.address: one.node_in(given) for one in seen_on}
        name = next((node.partition("/")[0] for node in nodes.values() if node is not None), None)
        if name is None:
            name = unique(word(key[0]), taken)
        if name in parts:
            # Containers of one machine may share an address, and a pattern may fit any worker.
            parts[name].addresses.update(one.host for one in seen_on)
            continue
        part = parts[name] = HostDraft(name, seen_on, hosts.get(name), nodes)
        part.read()
        if (other := hosts.get(word(key[0]))) is not None and name not in hosts:
            part.note_stranger(other.name)
    return list(parts.values())


def _words(given: Topology) -> set[str]:
    """Return the names and addresses of hosts."""
    return {called for host in given.hosts for called in (host.name, *host.addresses)}


def _between_machines(
    parts: Iterable[HostDraft], measured: Mapping[tuple[str, str], Measured]
) -> dict[tuple[str, str], Measured]:
    """Return the measurements that crossed a network: workers of one machine do without."""
    machine_of = {address: part for part in parts for address in part.addresses}
    return {
        pair: found
        for pair, found in measured.items()
        if machine_of.get(pair[0]) is not machine_of.get(pair[1])
    }
