"""Leaves of reductions are found in a graph; blocks that several tasks share are no leaves."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace

import pytest

from dask_gpurt.plugins.placement.roots.tree_leaves import combines_held, leaf_of, leaves_near


class Group(list):
    """A group of tasks, as far as these functions read it."""

    __hash__ = object.__hash__


class Task(SimpleNamespace):
    """A task of a scheduler, as far as these functions read it."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__
    __repr__ = object.__repr__


class Graph:
    """A graph under construction."""

    def __init__(self):
        self._groups = {}
        self._numbers = count()

    def task(self, name, *dependencies, held=False):
        group = self._groups.setdefault(name, Group())
        group.name = name
        made = Task(
            group=group,
            dependencies=set(dependencies),
            dependents=set(),
            priority=(next(self._numbers),),
            who_wants={"client"} if held else set(),
        )
        group.append(made)
        for one in dependencies:
            one.dependents.add(made)
        return made

    def tree(self, leaves, fan_in=4):
        """Add the combining tasks of a reduction, and return them level by level."""
        levels = []
        while len(leaves) > 1:
            name = f"combine-{len(levels)}"
            parts = (leaves[i : i + fan_in] for i in range(0, len(leaves), fan_in))
            leaves = [self.task(name, *part) for part in parts]
            levels.append(leaves)
        return levels


@pytest.fixture
def graph():
    return Graph()


def test_fused_sources_are_leaves(graph):
    roots = [graph.task("load") for _ in range(16)]
    graph.tree(roots)
    assert [leaf_of(root) for root in roots] == roots


def test_blocks_of_which_a_mean_is_subtracted_lead_to_leaves(graph):
    roots = [graph.task("load") for _ in range(16)]
    chunks = [graph.task("chunk", root) for root in roots]
    mean = graph.tree(chunks)[-1][0]
    for root in roots:
        graph.task("sub", root, mean)
    assert [leaf_of(root) for root in roots] == chunks


def test_blocks_of_two_arrays_lead_to_the_same_leaf(graph):
    pairs = [(graph.task("a"), graph.task("b")) for _ in range(8)]
    added = [graph.task("add", *pair) for pair in pairs]
    graph.tree(added)
    assert [leaf_of(one) for pair in pairs for one in pair] == [x for x in added for _ in "ab"]


def with_own_edge(graph, block):
    """Add a block with its own edge, as `pad` and `rechunk` make it."""
    name = block.group.name
    edge = graph.task(f"{name}-edge", block)
    parts = [graph.task(f"{name}-part", one) for one in (block, edge)]
    return graph.task(f"{name}-merge", *parts)


def test_padded_blocks_are_in_no_tree_by_themselves(graph):
    pairs = [(graph.task("u"), graph.task("v")) for _ in range(8)]
    for pair in pairs:
        graph.task("multiply", *(with_own_edge(graph, block) for block in pair))
    assert {leaf_of(block) for pair in pairs for block in pair} == {None}


def test_padded_blocks_lead_to_leaves(graph):
    roots = [graph.task("load") for _ in range(16)]
    merged = [with_own_edge(graph, root) for root in roots]
    graph.tree(merged)
    assert [leaf_of(root) for root in roots] == merged


def test_blocks_of_a_stencil_are_in_no_tree(graph):
    roots = [graph.task("load") for _ in range(16)]
    edges = [[graph.task("edge", root) for _ in range(2)] for root in roots]
    for i in range(16):
        graph.task("join", edges[i][0], edges[(i + 1) % 16][1])
    assert {leaf_of(root) for root in roots} == {None}


def test_operands_of_a_product_are_in_no_tree(graph):
    a = [graph.task("a") for _ in range(4)]
    b = [graph.task("b") for _ in range(4)]
    graph.tree([graph.task("product", one, other) for one in a for other in b])
    assert {leaf_of(root) for root in a + b} == {None}


def test_a_task_that_needs_very_many_is_not_read(graph):
    """Each leaf is asked for, and each would read all inputs of the task."""
    roots = [graph.task("load") for _ in range(1_000)]
    graph.tree(roots)

    class Unread(set):
        def __iter__(self):
            pytest.fail("all inputs were read")

    report = graph.task("report", *roots)
    report.dependencies = Unread(report.dependencies)
    assert {leaf_of(root) for root in roots} == {None}


def test_layers_of_equally_many_tasks_are_no_tree(graph):
    roots = [graph.task("load") for _ in range(16)]
    for i in range(0, 16, 2):
        graph.task("next", roots[i], roots[i + 1])
        graph.task("next", graph.task("other"))
    assert {leaf_of(root) for root in roots} == {None}


def test_nearest_leaves_are_those_combined_first(graph):
    roots = [graph.task("load") for _ in range(64)]
    graph.tree(roots)
    near = list(leaves_near(roots[21]))
    assert near[0] is roots[21]
    assert set(near[:4]) == set(roots[20:24])
    assert set(near[:16]) == set(roots[16:32])
    assert sorted(near, key=roots.index) == roots


@pytest.mark.parametrize("held", [True, False])
def test_only_trees_over_held_blocks_are_told(graph, held):
    blocks = [graph.task("load", held=held) for _ in range(16)]
    levels = graph.tree([graph.task("chunk", block) for block in blocks])
    assert {combines_held(node) for level in levels for node in level} == {held}
    assert not combines_held(graph.task("user", levels[0][0], blocks[0]))
