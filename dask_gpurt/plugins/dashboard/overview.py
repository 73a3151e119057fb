"""The data of the dashboard's page: one plain value, which is also the answer to `/gpurt.json`.

`gathering` collects the parts; `drawing` draws them, and `dask_gpurt.progress` shows some of them.
Pure: values in, values out, of bounded size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Any

from dask_gpurt.shuffle.traffic import OTHERS, WINDOW_S, LinkPath, Moved, summed

#: Paths of bytes, in the words shown to users.
PATHS = {
    "shared": "shared memory",
    "ucx": "UCX",
    "comm": "Dask's connections",
    "inputs": "inputs of tasks, over Dask's connections",
}
#: Tiers of a worker's memory, in the words shown to users, and in the order of a bar.
TIERS = {
    "memory": "values",
    "pinned": "values in pinned memory",
    "compressed": "compressed values",
    "shards": "shards of shuffles",
    "other": "other memory of the process",
    "disk": "values on disk",
    "shards_on_disk": "shards on disk",
    "device": "values on the GPU",
}
#: Most links, shuffles and decisions on codecs that are listed.
MAX_LINKS = 1_000
MAX_SHUFFLES = 12
MAX_DECISIONS = 8

_ON_DISK = {"disk", "inherited"}


def overview(
    status: Mapping[str, Any],
    workers: Iterable[Mapping[str, Any]],
    glances: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """Return everything that the page shows.

    Parameters
    ----------
    status
        What the scheduler reports without asking workers, with the numbers of done and of all
        `tasks`, and the `progress` of each shuffle: see `p2p.how_far`. `shuffles` has the runs of
        the glances.
    workers
        For each worker, what the scheduler knows from heartbeats: `address`, `name`, and its
        `process_nbytes`, `managed_nbytes`, `spilled_nbytes` and `limit_nbytes`.
    glances
        Summaries of `glance`, by address. A worker may be missing.
    """
    open_runs = {(run["id"], run["run"]) for one in glances.values() for run in one["open_runs"]}
    shuffles = []
    for one in status["shuffles"]:
        is_open = (one["id"], one["run"]) in open_runs
        progress = status["progress"].get(one["id"]) if is_open else None
        shuffles.append({**one, "is_open": is_open, "progress": progress})
    shuffles = labelled(_listed(shuffles))
    return {
        "active": status["active"],
        "activation": status["activation"],
        "reason": status["reason"],
        "not_ready": status["not_ready"],
        "tasks": status["tasks"],
        "runs": status["runs"],
        "fallbacks": status["fallbacks"],
        "totals": status["totals"],
        "window_s": WINDOW_S,
        **_links(glances),
        "workers": [
            _worker(one, glances.get(one["address"])) for one in sorted(workers, key=_by_name)
        ],
        "shuffles": shuffles,
        "placement": _placement(status["placement"]),
        "codecs": _codecs(glances, shuffles),
    }


def _listed(shuffles: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the runs to list, in order: the newest open ones, then the newest of the others."""
    by_age = sorted(enumerate(shuffles), key=lambda one: (one[1]["is_open"], one[0]))
    return [one for _, one in sorted(by_age[-MAX_SHUFFLES:], key=lambda one: one[0])]


def labelled(shuffles: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the runs with short labels. A second run of the same shuffle says so."""
    n_runs: Counter[str] = Counter()
    found = []
    for one in shuffles:
        n_runs[one["id"]] += 1
        nth = n_runs[one["id"]]
        label = one["id"][:8] + (f", run {nth}" if nth > 1 else "")
        found.append({**one, "label": label})
    return found


def _links(glances: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    found = summed(
        (LinkPath(*link), Moved(nbytes, n))
        for one in glances.values()
        for *link, nbytes, n in one["links"]
    )
    paths = Counter(dict.fromkeys(PATHS, 0))
    for link, moved in found.items():
        paths[link.path] += moved.nbytes
    ordered = [*found.items()]
    rest = summed((LinkPath(OTHERS, OTHERS, link.path), one) for link, one in ordered[MAX_LINKS:])
    listed = [
        {"from": link.sender, "to": link.receiver, "path": link.path, **moved._asdict()}
        for link, moved in [*ordered[:MAX_LINKS], *rest.items()]
    ]
    return {"paths": dict(paths), "links": listed}


def _worker(known: Mapping[str, Any], glance: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a worker with the bytes of each of its tiers."""
    tiers = dict.fromkeys(TIERS, 0)
    shards = shards_on_disk = 0
    if glance is not None:
        shards, shards_on_disk = glance["shards_nbytes"], glance["shards_on_disk_nbytes"]
    if glance is not None and glance["levels"]:
        for level in glance["levels"]:
            if level["name"] in tiers and level["name"] not in _ON_DISK:
                tiers[level["name"]] += level["used_nbytes"]
        tiers["disk"] = glance["spilled_nbytes"]
    else:
        # Dask's own store. The scheduler counts our shards as managed, and as spilled.
        tiers["memory"] = max(0, known["managed_nbytes"] - shards)
        tiers["disk"] = max(0, known["spilled_nbytes"] - shards_on_disk)
    tiers["shards"], tiers["shards_on_disk"] = shards, shards_on_disk
    in_process = sum(tiers[name] for name in ("memory", "pinned", "compressed", "shards"))
    tiers["other"] = max(0, known["process_nbytes"] - in_process)
    return {
        "address": known["address"],
        "name": known["name"],
        "process_nbytes": known["process_nbytes"],
        "limit_nbytes": known["limit_nbytes"],
        "has_answered": glance is not None,
        "why_stocks_store": glance["unmanaged"] if glance is not None else None,
        "tiers": tiers,
    }


def _by_name(worker: Mapping[str, Any]) -> tuple[int, str]:
    """Sort `2` before `10`, as most names of workers are numbers."""
    return (len(worker["name"]) if worker["name"].isdigit() else 1_000, worker["name"])


def _placement(summary: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the summary of placement, without the candidates of each decision."""
    if summary is None:
        return None
    last = [
        {name: value for name, value in one.items() if name != "candidates"}
        for one in summary["last_differing"]
    ]
    saved_s = summary["saved_s"]
    return {**summary, "saved_s": saved_s if isfinite(saved_s) else 0.0, "last_differing": last}


def _codecs(
    glances: Mapping[str, Mapping[str, Any]], shuffles: Iterable[Mapping[str, Any]]
) -> dict[str, Any]:
    choices: Counter[str] = Counter()
    for one in glances.values():
        choices.update(one["codecs"]["choices"])
    largest = [
        {"from": worker, **decision}
        for worker, one in glances.items()
        for decision in one["codecs"]["largest"]
    ]
    largest.sort(key=lambda one: (-one["nbytes"], one["from"], one["section"], one["link"]))
    return {
        "choices": dict(choices.most_common()),
        "largest": largest[:MAX_DECISIONS],
        "raw_nbytes": sum(one["raw_nbytes"] for one in shuffles),
        "wire_nbytes": sum(one["wire_nbytes"] for one in shuffles),
    }


# ---------------------------------------------------------------------- the matrix of links

#: Most workers in the matrix; the others are one row and one column.
MAX_IN_MATRIX = 16
#: Name of the workers that moved bytes lately and have left.
GONE = "gone"


def matrix(seen: Mapping[str, Any], most: int = MAX_IN_MATRIX) -> tuple[list[str], list[Any]]:
    """Return the names of the busiest workers, and a cell for each pair that moved bytes.

    A cell has `from`, `to`, `nbytes`, `messages`, and `paths`: the bytes by path, the largest
    first. The workers beyond `most` are summed under one name, with all links that are not listed.
    Workers that left are summed under `GONE`.
    """
    name_of: dict[str, str] = {one["address"]: one["name"] for one in seen["workers"]}
    load: Counter[str] = Counter(dict.fromkeys(name_of, 0))
    ends = [(link[end], link["nbytes"]) for link in seen["links"] for end in ("from", "to")]
    for address, nbytes in ends:
        if address in name_of:
            load[address] += nbytes
    shown = {address for address, _ in load.most_common(most if len(load) <= most else most - 1)}
    n_others = len(load) - len(shown)
    rest = f"{n_others} others" if n_others else "others"

    def label(address: str) -> str:
        if address in shown:
            return name_of[address]
        return rest if address in name_of or address == OTHERS else GONE

    labels = {label(address) for address, _ in ends}
    names = [name_of[one] for one in load if one in shown]
    names += [one for one in (rest, GONE) if one in labels or (one is rest and n_others)]

    cells: dict[tuple[str, str], dict[str, Moved]] = {}
    for link in seen["links"]:
        cell = cells.setdefault((label(link["from"]), label(link["to"])), {})
        before = cell.get(link["path"], Moved(0, 0))
        cell[link["path"]] = Moved(
            before.nbytes + link["nbytes"], before.messages + link["messages"]
        )
    return names, [_cell(*pair, by_path) for pair, by_path in cells.items()]


def _cell(sender: str, receiver: str, by_path: Mapping[str, Moved]) -> dict[str, Any]:
    order = sorted(by_path, key=lambda path: -by_path[path].nbytes)
    return {
        "from": sender,
        "to": receiver,
        "nbytes": sum(moved.nbytes for moved in by_path.values()),
        "messages": sum(moved.messages for moved in by_path.values()),
        "paths": {path: by_path[path].nbytes for path in order},
    }
