"""Workloads of Dask graphs: the real tasks, with sizes and durations by rule.

A graph says what needs what; a `Cost` for each prefix of keys says how large results are and how
long tasks take. Tasks come out sorted by Dask's own order on keys whose hashes are stable, and the
tokens in their names are numbers that follow from the graph, so the same graph gives the same
workload in every process and environment.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dask.core import flatten, get_dependencies
from dask.order import order
from dask.typing import Key
from dask.utils import key_split

from dask_gpurt.simulate.workload import StableStr, TaskModel, Workload, inputs_first

_TOKEN = re.compile(r"-[0-9a-f]{32}")


@dataclass(frozen=True)
class Cost:
    """What a task of some prefix makes of its inputs, and how fast.

    Attributes
    ----------
    of
        What the size of the result follows from: the largest input, the sum of all, an equal
        share of each input for everybody who needs it (a split), or nothing.
    ratio
        Of that which becomes the result.
    nbytes
        Added to it: the size of what comes out of nothing.
    rate
        Bytes per second, of inputs and result together.
    seconds
        Added to what follows from the rate.
    """

    of: Literal["nothing", "largest", "sum", "share"] = "largest"
    ratio: float = 1.0
    nbytes: int = 0
    rate: float = float("inf")
    seconds: float = 0.0


def workload_of(
    name: str,
    collection: Any,
    costs: Mapping[str, Cost],
    *,
    sizes: Mapping[Hashable, int] | None = None,
) -> Workload:
    """The workload that computing a collection would be.

    Parameters
    ----------
    collection
        Any Dask collection. Its graph is taken as it is: optimize it first, as `compute` would.
    costs
        By prefix of keys, as `dask.utils.key_split` gives it; `""` is for prefixes not named.
    sizes
        Bytes of results that are known, by key, such as `chunk_nbytes` gives them.

    Raises
    ------
    KeyError
        If a prefix has no cost and there is no default.
    """
    graph = dict(collection.__dask_graph__())
    needs = {key: get_dependencies(graph, key) for key in graph}
    names = _names(needs)
    known = {names[key]: nbytes for key, nbytes in (sizes or {}).items() if key in names}
    producers = {names[key] for key in graph if getattr(graph[key], "data_producer", False)}
    # Sorted, since graphs come in the order of sets that somebody iterated over.
    dependencies = {
        names[key]: sorted(names[dependency] for dependency in needs[key])
        for key in sorted(graph, key=names.__getitem__)
    }
    ranks = order({key: (len, *needed) for key, needed in dependencies.items()})
    ordered = sorted(dependencies, key=ranks.__getitem__)
    position = {key: rank for rank, key in enumerate(ordered)}
    dependents = dict.fromkeys(ordered, 0)
    for needed in dependencies.values():
        for key in needed:
            dependents[key] += 1

    models: dict[str, TaskModel] = {}
    for rank in inputs_first([[position[one] for one in dependencies[key]] for key in ordered]):
        key = ordered[rank]
        prefix = key_split(str(key))
        cost = costs[prefix] if prefix in costs else costs[""]
        inputs = [models[needed].nbytes for needed in dependencies[key]]
        shares = [models[needed].nbytes // dependents[needed] for needed in dependencies[key]]
        base = {
            "nothing": 0,
            "largest": max(inputs, default=0),
            "sum": sum(inputs),
            "share": sum(shares),
        }[cost.of]
        nbytes = known.get(key, int(base * cost.ratio) + cost.nbytes)
        # Of an input that is split, only the own share is read.
        read = sum(shares) if cost.of == "share" else sum(inputs)
        models[key] = TaskModel(
            key,
            tuple(position[needed] for needed in dependencies[key]),
            cost.seconds + (read + nbytes) / cost.rate,
            nbytes,
            key in producers,
        )
    wanted = sorted({position[names[key]] for key in flatten(collection.__dask_keys__())})
    return Workload(name, tuple(models[key] for key in ordered), tuple(wanted))


def _names(needs: Mapping[Key, Collection[Key]]) -> dict[Key, StableStr]:
    """Keys as text, with numbers for tokens; prefixes and groups stay what they are.

    Numbers are in the order of what tells groups apart besides tokens: what they are made of, and
    what is made of them. Some tokens have the path of a module in them, and so are others in
    another environment.
    """
    shapes = _shapes(needs)
    groups: dict[str, dict[str, str]] = {}
    for key, shape in shapes.items():
        name = _name(key)
        like = groups.setdefault(_stem(key), {})
        like[name] = min(shape, like.get(name, shape))
    numbered = {
        name: f"{stem}-{number}"
        for stem, like in groups.items()
        for number, name in enumerate(sorted(like, key=lambda one: (like[one], one)))
    }
    return {
        key: StableStr(
            str((numbered[_name(key)], *key[1:]))
            if isinstance(key, tuple)
            else numbered[_name(key)]
        )
        for key in needs
    }


def _shapes(needs: Mapping[Key, Collection[Key]]) -> dict[Key, str]:
    """A digest for each key of all that it follows from and all that follows from it."""
    keys = list(needs)
    position = {key: i for i, key in enumerate(keys)}
    dependents: dict[Key, list[Key]] = {key: [] for key in keys}
    for key, needed in needs.items():
        for other in needed:
            dependents[other].append(key)
    downwards = [
        keys[i] for i in inputs_first([[position[one] for one in needs[key]] for key in keys])
    ]
    above: dict[Key, str] = {}
    for key in downwards:
        index = key[1:] if isinstance(key, tuple) else ()
        above[key] = _digest(_stem(key), index, sorted(above[one] for one in needs[key]))
    around: dict[Key, str] = {}
    for key in reversed(downwards):
        around[key] = _digest(above[key], sorted(around[one] for one in dependents[key]))
    return around


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _stem(key: Key) -> str:
    return _TOKEN.sub("", _name(key))


def _name(key: Key) -> str:
    return str(key[0] if isinstance(key, tuple) else key)


def chunk_nbytes(*arrays: Any) -> dict[Hashable, int]:
    """Bytes of each chunk of Dask arrays, by key; chunks of unknown length are left out."""
    found: dict[Hashable, int] = {}
    for array in arrays:
        shapes = itertools.product(*array.chunks)
        for key, shape in zip(flatten(array.__dask_keys__()), shapes, strict=True):
            elements = math.prod(shape)
            if not math.isnan(elements):
                found[key] = int(elements) * array.dtype.itemsize
    return found
