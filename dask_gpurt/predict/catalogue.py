"""Machines that a prediction can ask for: those of `machines.yaml`, the user's, and the recorded.

A machine has threads, memory, a network, a disk and a price. `machine_network.cluster_of` puts
workers on a number of equal machines, as large as the workers of the trace.
"""

from __future__ import annotations

import datetime
import difflib
import importlib.resources
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from dask_gpurt.errors import PredictionError
from dask_gpurt.predict.recorded_cluster import DISK_NBYTES_PER_S, RecordedCluster
from dask_gpurt.topology.quantities import RATES, SIZES, amount
from dask_gpurt.topology.yaml_tree import YamlSection, load, problem_text

#: The name of the machines of the trace.
RECORDED = "recorded"
#: Most machines of one cluster.
MAX_COUNT = 10_000

_WANTED = re.compile(r"(?:(\d{1,9})\s*[*x]\s*)?(\S+)")
_NEEDED = {"threads": "16", "memory": "64 GiB", "network": "10 Gb/s"}
_OPTIONAL = {"disk": "500 MB/s", "usd_per_hour": "0.8", "priced": "2026-07-20"}


@dataclass(frozen=True)
class MachineType:
    """One machine.

    Attributes
    ----------
    memory_nbytes
        Memory of the machine; 0 if it is unknown, and then nothing is spilled.
    network_nbytes_per_s
        To other machines, in each direction.
    usd_per_hour
        None if it is unknown.
    priced
        The day of the price; None if it is unknown.
    """

    name: str
    threads: int
    memory_nbytes: int
    network_nbytes_per_s: float
    disk_nbytes_per_s: float = DISK_NBYTES_PER_S
    usd_per_hour: float | None = None
    priced: datetime.date | None = None


@dataclass(frozen=True)
class MachineGroup:
    """A number of equal machines."""

    count: int
    machine: MachineType

    @property
    def name(self) -> str:
        """The group as the user writes it, such as "4xm7i.4xlarge"."""
        return f"{self.count}x{self.machine.name}"


class Catalogue:
    """Machines by name.

    Parameters
    ----------
    cluster
        The cluster of the trace, whose machines are called "recorded".
    text
        The user's machines, in the form of `machines.yaml`.
    source
        Name of the user's file, for errors.

    Raises
    ------
    PredictionError
        The text is no such file.
    """

    def __init__(self, cluster: RecordedCluster, text: str = "", source: str = "") -> None:
        ours = importlib.resources.files("dask_gpurt.predict") / "machines.yaml"
        self._machines = _machines(ours.read_text(encoding="utf-8"), "machines.yaml")
        self._machines |= _machines(text, source) if source else {}
        self._machines[RECORDED] = _recorded(cluster)

    @property
    def names(self) -> list[str]:
        """Names of all machines, sorted."""
        return sorted(self._machines)

    def group(self, wanted: str) -> MachineGroup:
        """Return the machines that a text asks for, such as "4xm7i.4xlarge" or "m7i.4xlarge".

        Raises
        ------
        PredictionError
            No machine has that name, or the number is not from 1 to `MAX_COUNT`.
        """
        found = _WANTED.fullmatch(wanted.strip())
        if found is None:
            raise PredictionError(f"{wanted!r:.80} is no machine; write such as '4xm7i.4xlarge'")
        count, name = int(found[1] or 1), found[2]
        if not 1 <= count <= MAX_COUNT:
            raise PredictionError(f"{wanted!r:.80}: the number may be from 1 to {MAX_COUNT:,}")
        if name not in self._machines:
            near = difflib.get_close_matches(name, self.names, 3, 0.5)
            hint = f"; did you mean {' or '.join(near)}?" if near else "."
            raise PredictionError(
                f"no machine is called {name!r:.80}{hint} There are {', '.join(self.names)}."
                " Describe others with --machines."
            )
        return MachineGroup(count, self._machines[name])


def _recorded(cluster: RecordedCluster) -> MachineType:
    """Return the first machine of a trace."""
    threads = next(iter(cluster.workers.values()))
    return MachineType(
        RECORDED,
        sum(threads),
        cluster.memory_nbytes * len(threads),
        cluster.network_nbytes_per_s,
        cluster.disk_nbytes_per_s,
    )


def _machines(text: str, source: str) -> dict[str, MachineType]:
    try:
        tree = load(text)
    except yaml.YAMLError as error:
        raise PredictionError(f"{source} is not YAML: {problem_text(error)}") from None
    if not isinstance(tree, YamlSection):
        raise PredictionError(f"{source} has no machines: it may be a section for each of them")
    return {name: _machine(name, section, source) for name, section in tree.items()}


def _machine(name: str, section: Any, source: str) -> MachineType:
    where = f"{source}: {name:.80}"
    if name == RECORDED:
        raise PredictionError(f"{where} is the name of the machines in the trace; use another")
    if not isinstance(section, YamlSection):
        raise PredictionError(f"{where} may be a section of {', '.join(_NEEDED | _OPTIONAL)}")
    for key in section:
        if key not in _NEEDED | _OPTIONAL:
            allowed = ", ".join(_NEEDED | _OPTIONAL)
            raise PredictionError(f"{where} has no key {key!r:.80}; it may have {allowed}")
    for key in _NEEDED:
        if key not in section:
            raise PredictionError(f"{where} lacks {key}, such as '{_NEEDED[key]}'")
    threads, usd, priced = (section.get(key) for key in ("threads", "usd_per_hour", "priced"))
    if type(threads) is not int or not 1 <= threads <= 4096:
        raise PredictionError(f"{where}: threads may be a number from 1 to 4096")
    if usd is not None and not (type(usd) in (int, float) and 0 <= usd < float("inf")):
        raise PredictionError(f"{where}: usd_per_hour may be a number, such as 0.8")
    if priced is not None and type(priced) is not datetime.date:
        raise PredictionError(f"{where}: priced may be a day, such as 2026-07-20")
    return MachineType(
        name,
        threads,
        int(_positive(section, "memory", SIZES, where)),
        _positive(section, "network", RATES, where),
        _positive(section, "disk", RATES, where) if "disk" in section else DISK_NBYTES_PER_S,
        usd_per_hour=usd,
        priced=priced,
    )


def _positive(section: YamlSection, key: str, units: Mapping[str, float], where: str) -> float:
    found = amount(section[key], units)
    if not found:
        example = (_NEEDED | _OPTIONAL)[key]
        raise PredictionError(f"{where}: {key} is {section[key]!r:.80}; write such as '{example}'")
    return found
