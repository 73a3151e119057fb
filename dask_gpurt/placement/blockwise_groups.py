"""Layers of a DataFrame program that one task for each partition can do. Pure.

Every operation of a program on frames is a layer, with a task for each partition. Many work on each
partition alone: a filter, a product of two columns, the reading of a file. Every task costs the
scheduler and its worker about a millisecond, however little it does. So a layer joins the layers
that need it, if all of these are in one task already.

Branches that are independent until a later layer joins them stay apart. Two threads may take them
at once, and with few partitions nothing else keeps all threads busy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from graphlib import TopologicalSorter
from typing import NamedTuple


class Layer(NamedTuple):
    """A layer of a program.

    Attributes
    ----------
    name
        Differs from all other layers' names.
    inputs
        Names of layers that it needs.
    n_partitions
        It has a task for each partition.
    may_go_together
        Whether the task of a partition may do other layers as well.
    whole_inputs
        Inputs that each partition needs as a whole, such as a small table.
    runs_user_code
        Whether it may take long: a branch begins there.
    """

    name: str
    inputs: frozenset[str]
    n_partitions: int
    may_go_together: bool
    whole_inputs: frozenset[str] = frozenset()
    runs_user_code: bool = False


def grouped(layers: Iterable[Layer]) -> list[list[str]]:
    """Return the layers, by name, that go together.

    All layers that need a layer's result must be in its group. So a group has one result, that of
    its last layer, and nothing is done twice.

    Returns
    -------
    list of lists of str
        A layer comes after its inputs, and a group after the groups that it needs. Layers that stay
        alone are left out.
    """
    by_name = {layer.name: layer for layer in layers}
    order = [*TopologicalSorter({one.name: one.inputs for one in by_name.values()}).static_order()]
    joins = _joins(by_name, order)
    #: By layer, the last layer of its group.
    last: dict[str, str] = {}
    #: By layer, the groups that it may join. It joins if there is only one.
    places: dict[str, set[str]] = defaultdict(set)
    for name in reversed(order):
        layer, found, last[name] = by_name[name], places[name], name
        if len(found) == 1:
            (one,) = found
            if _fits(layer, by_name[one]):
                last[name] = one
        for needed in layer.inputs:
            places[needed].add(needed if name in joins else last[name])
    groups: dict[str, list[str]] = {}
    for name in order:
        groups.setdefault(last[name], []).append(name)
    # By their last layers: a group that needs another group's result has a later one.
    return [groups[name] for name in order if len(groups.get(name, ())) > 1]


def _joins(by_name: Mapping[str, Layer], order: Sequence[str]) -> set[str]:
    """Return the layers that join independent branches."""
    #: By layer, the layers at which its branches begin.
    begins: dict[str, set[str]] = {}
    found = set()
    for name in order:
        layer = by_name[name]
        branches = [
            begins[needed] if _fits(by_name[needed], layer) else {needed}
            for needed in layer.inputs - layer.whole_inputs
        ]
        begins[name] = set().union(*branches)
        if layer.runs_user_code or not begins[name]:
            begins[name] = {name}
        if not _are_connected(branches):
            found.add(name)
    return found


def _are_connected(branches: list[set[str]]) -> bool:
    """Return whether common beginnings connect all branches."""
    if not branches:
        return True
    connected, rest = branches[0], branches[1:]
    while rest:
        more = [one for one in rest if connected & one]
        if not more:
            return False
        connected = connected.union(*more)
        rest = [one for one in rest if one not in more]
    return True


def _fits(layer: Layer, last: Layer) -> bool:
    # A small table that all partitions need would be made for each of them.
    together = layer.may_go_together and last.may_go_together
    return together and layer.n_partitions == last.n_partitions
