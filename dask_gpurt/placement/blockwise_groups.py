"""Layers of a DataFrame program that one task for each partition can do. Pure.

Every operation of a program on frames is a layer, with a task for each partition. Many work on each
partition alone: a filter, a product of two columns, the reading of a file. Every task costs the
scheduler and its worker about a millisecond, however little it does. So layers go together whose
results only the next layer needs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
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
    """

    name: str
    inputs: frozenset[str]
    n_partitions: int
    may_go_together: bool


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
    #: By layer, the last layer of its group.
    last: dict[str, str] = {}
    lasts_of_dependents: dict[str, set[str]] = defaultdict(set)
    for name in reversed(order):
        layer = by_name[name]
        found = lasts_of_dependents[name]
        (one,) = found if len(found) == 1 else (name,)
        last[name] = one if _fits(layer, by_name[one]) else name
        for needed in layer.inputs:
            lasts_of_dependents[needed].add(last[name])
    groups: dict[str, list[str]] = {}
    for name in order:
        groups.setdefault(last[name], []).append(name)
    # By their last layers: a group that needs another group's result has a later one.
    return [groups[name] for name in order if len(groups.get(name, ())) > 1]


def _fits(layer: Layer, last: Layer) -> bool:
    # A small table that all partitions need would be made for each of them.
    together = layer.may_go_together and last.may_go_together
    return together and layer.n_partitions == last.n_partitions
