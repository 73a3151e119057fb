"""Conversion of Dask graphs to workloads: real tasks, with modelled sizes and durations.

The graph gives the dependencies. A `TaskCost` for each key prefix gives the sizes of results and
the durations of tasks. Tasks are sorted by Dask's own order, on keys with stable hashes. The tokens
in their names are replaced by numbers that depend only on the graph. So the same graph gives the
same workload in every process and environment.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

from dask.core import flatten, get_dependencies
from dask.order import order
from dask.typing import Key
from dask.utils import key_split

from dask_gpurt.simulate.workload import StableStr, TaskModel, Workload, inputs_first

_TOKEN = re.compile(r"-[0-9a-f]{32}")


@dataclass(frozen=True)
class TaskCost:
    """The rule for result size and duration of tasks with one prefix.

    Attributes
    ----------
    of
        Input size from which the result's size is computed: the largest input, the sum of all
        inputs, an equal share of each input among its dependents (a split), or nothing.
    ratio
        Factor from that size to the result's size.
    nbytes
        Added to the result's size. For tasks without inputs, it is the whole size.
    rate
        Bytes per second, inputs and result together.
    seconds
        Added to the duration that follows from the rate.
    """

    of: Literal["nothing", "largest", "sum", "share"] = "largest"
    ratio: float = 1.0
    nbytes: int = 0
    rate: float = float("inf")
    seconds: float = 0.0

    def apply(
        self, inputs: Sequence[int], shares: Sequence[int], known_nbytes: int | None
    ) -> tuple[int, float]:
        """Return the bytes of a task's result, and its duration in seconds.

        Parameters
        ----------
        inputs
            Bytes of each input.
        shares
            Bytes of each input, divided by the number of its dependents.
        known_nbytes
            Bytes of the result, if they are known.
        """
        base = {
            "nothing": 0,
            "largest": max(inputs, default=0),
            "sum": sum(inputs),
            "share": sum(shares),
        }[self.of]
        nbytes = int(base * self.ratio) + self.nbytes if known_nbytes is None else known_nbytes
        # A task that needs a share of an input reads only that share.
        read = sum(shares) if self.of == "share" else sum(inputs)
        return nbytes, self.seconds + (read + nbytes) / self.rate


def workload_of(
    name: str,
    collection: Any,
    costs: Mapping[str, TaskCost],
    *,
    sizes: Mapping[Hashable, int] | None = None,
) -> Workload:
    """Return the workload of computing a collection.

    Parameters
    ----------
    collection
        Any Dask collection. Its graph is used as it is: optimize it first, as `compute` would.
    costs
        Cost by key prefix, as `dask.utils.key_split` gives it; `""` is the default.
    sizes
        Known bytes of results by key, such as from `chunk_nbytes`.

    Raises
    ------
    KeyError
        A prefix has no cost and there is no default.
    """
    graph = dict(collection.__dask_graph__())
    needs = {key: get_dependencies(graph, key) for key in graph}
    names = _stable_names(needs)
    known = {names[key]: nbytes for key, nbytes in (sizes or {}).items() if key in names}
    producers = {names[key] for key in graph if getattr(graph[key], "data_producer", False)}
    # Sorted, because the order of a graph may come from iteration over a set.
    dependencies = {
        names[key]: sorted(names[dependency] for dependency in needs[key])
        for key in sorted(graph, key=names.__getitem__)
    }
    position = {key: rank for rank, key in enumerate(_ordered(dependencies))}
    models = _models(position, dependencies, costs, known, producers)
    wanted = sorted({position[names[key]] for key in flatten(collection.__dask_keys__())})
    return Workload(name, tuple(models[key] for key in position), tuple(wanted))


def _ordered(dependencies: Mapping[StableStr, Sequence[StableStr]]) -> list[StableStr]:
    """Return the keys in Dask's order of priority."""
    ranks = order({key: (len, *needed) for key, needed in dependencies.items()})
    return sorted(dependencies, key=ranks.__getitem__)


def _models(
    position: Mapping[StableStr, int],
    dependencies: Mapping[StableStr, Sequence[StableStr]],
    costs: Mapping[str, TaskCost],
    known_nbytes: Mapping[StableStr, int],
    producers: Collection[StableStr],
) -> dict[StableStr, TaskModel]:
    """Return the model of each task, computed after those of its inputs.

    Parameters
    ----------
    position
        Positions of tasks in the workload, in that order.
    """
    ordered = list(position)
    n_dependents = Counter(chain.from_iterable(dependencies.values()))
    models: dict[StableStr, TaskModel] = {}
    for rank in inputs_first([[position[one] for one in dependencies[key]] for key in ordered]):
        key = ordered[rank]
        prefix = key_split(str(key))
        cost = costs[prefix] if prefix in costs else costs[""]
        inputs = [models[needed].nbytes for needed in dependencies[key]]
        shares = [models[needed].nbytes // n_dependents[needed] for needed in dependencies[key]]
        nbytes, duration_s = cost.apply(inputs, shares, known_nbytes.get(key))
        needed_at = tuple(position[needed] for needed in dependencies[key])
        models[key] = TaskModel(key, needed_at, duration_s, nbytes, key in producers)
    return models


def _stable_names(needs: Mapping[Key, Collection[Key]]) -> dict[Key, StableStr]:
    """Return the keys as text, with numbers for tokens. Prefixes and groups do not change.

    Numbers follow the order of the groups' digests, which cover their inputs and dependents but not
    their tokens. Some tokens contain the path of a module, and so differ between environments.
    """
    shapes = _digests(needs)
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


def _digests(needs: Mapping[Key, Collection[Key]]) -> dict[Key, str]:
    """Return a digest for each key of all its direct and indirect inputs and dependents."""
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
    """Return the bytes of each chunk of Dask arrays, by key, without chunks of unknown length."""
    found: dict[Hashable, int] = {}
    for array in arrays:
        shapes = itertools.product(*array.chunks)
        for key, shape in zip(flatten(array.__dask_keys__()), shapes, strict=True):
            elements = math.prod(shape)
            if not math.isnan(elements):
                found[key] = int(elements) * array.dtype.itemsize
    return found
