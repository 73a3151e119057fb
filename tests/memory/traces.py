"""Traces: the events of each worker's values while a program ran.

`tests/memory/record_trace.py` makes these from real clusters; `tests/memory/belady.py` replays
them. A node is a task and the value that it makes. Events of a worker, in order:

- `submit`: the scheduler received a graph, whose tasks are the given nodes
- `hold`: a task could run, but the scheduler queues it until a worker is idle
- `queue`: the scheduler assigned a task to this worker
- `give`: the scheduler assigned a task to the other worker
- `run`: a task began on this worker; its inputs are used together
- `put`: a value arrived in this worker's memory, made here or fetched
- `send`: a peer fetched a copy of a value
- `drop`: the other worker freed its value or copy
- `over`: a task ended, on any worker
- `release`: a value is no longer needed
"""

from __future__ import annotations

import gzip
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parents[1] / "data" / "traces"


class Node(NamedTuple):
    nbytes: int
    priority: tuple[float, ...]
    inputs: tuple[int, ...]


class Event(NamedTuple):
    kind: str
    nodes: tuple[int, ...]


@dataclass(frozen=True)
class Trace:
    """The events of one worker in one run."""

    nodes: list[Node]
    events: list[Event]

    def peak_nbytes(self) -> int:
        """Return the most bytes held at a time, in unlimited memory."""
        held: set[int] = set()
        used = peak = 0
        for kind, nodes in self.events:
            for node in nodes:
                if kind == "put" and node not in held:
                    held.add(node)
                    used += self.nodes[node].nbytes
                elif kind == "release" and node in held:
                    held.remove(node)
                    used -= self.nodes[node].nbytes
            peak = max(peak, used)
        return peak


def save(name: str, traces: list[Trace]) -> None:
    """Write the traces of all workers of a run, which share their nodes."""
    content = {"nodes": traces[0].nodes, "workers": [asdict(trace)["events"] for trace in traces]}
    packed = json.dumps(content, separators=(",", ":")).encode()
    (FOLDER / f"{name}.json.gz").write_bytes(gzip.compress(packed, 9, mtime=0))


def load(name: str) -> list[Trace]:
    content = json.loads(gzip.decompress((FOLDER / f"{name}.json.gz").read_bytes()))
    nodes = [Node(nbytes, tuple(p), tuple(inputs)) for nbytes, p, inputs in content["nodes"]]
    return [
        Trace(nodes, [Event(kind, tuple(touched)) for kind, touched in events])
        for events in content["workers"]
    ]


def names() -> list[str]:
    return sorted(path.name.removesuffix(".json.gz") for path in FOLDER.glob("*.json.gz"))
