"""Contract tests of blockwise layers in Dask's expressions, and tests of tasks put together."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import dask.array as da
import dask.dataframe as dd
import pandas as pd
import pytest
from dask._task_spec import (
    Alias,
    Task,
    TaskRef,
    _execute_subgraph,
    convert_legacy_graph,
    execute_graph,
)
from dask.base import collections_to_expr
from dask.core import flatten
from dask.utils import key_split
from distributed.scheduler import TaskState

from dask_gpurt.placement.blockwise_groups import grouped
from dask_gpurt.plugins.patches.graphs.blockwise_layers import (
    layers,
    put_together,
    with_known_groups,
)

N = 4


def part(number: int) -> pd.DataFrame:
    return pd.DataFrame({"key": range(24), "x": float(number)})


def frame() -> dd.DataFrame:
    return dd.from_map(part, range(N), meta=part(0))


def filtered() -> dd.DataFrame:
    found = frame()
    found = found[found["key"] % 3 == 0]
    return found.assign(y=found["x"] * 2)


def optimized(*collections):
    return collections_to_expr(collections).optimize()


def tasks_of(expr) -> dict:
    return convert_legacy_graph(expr.__dask_graph__())


def together(expr, stays=frozenset()) -> dict:
    wanted = {*flatten(expr.__dask_keys__())}
    groups = grouped(layers(expr, lambda key: key in wanted or key in stays))
    return put_together(tasks_of(expr), groups)[0]


def results(graph: dict, expr) -> list:
    keys = [*flatten(expr.__dask_keys__())]
    found = execute_graph(graph, keys=keys)
    return [found[key] for key in keys]


def test_names_are_as_expected():
    from dask.dataframe.dask_expr._expr import Blockwise, Filter, Fused, is_valid_blockwise_op

    assert list(inspect.signature(is_valid_blockwise_op).parameters) == ["expr"]
    assert issubclass(Filter, Blockwise) and issubclass(Fused, Blockwise)
    key = ("x", 0)
    fused = Task.fuse(Task("a", int), Task(key, int, TaskRef("a")), key="named")
    assert fused.func is _execute_subgraph and fused.args[1] == key
    assert "run_spec" in TaskState.__slots__


def test_layers_are_those_of_the_expression():
    expr = optimized(filtered())
    found = {layer.name: layer for layer in layers(expr, lambda key: False)}
    assert found.keys() == {one._name for one in expr.walk()}
    graph = tasks_of(expr)
    blockwise = [layer for layer in found.values() if layer.may_go_together]
    assert {(layer.name, n) for layer in blockwise for n in range(N)} == graph.keys()
    for layer in blockwise:
        needed = {name for name, _ in graph[(layer.name, 0)].dependencies}
        assert needed == layer.inputs and layer.n_partitions == N


def test_an_operation_on_partitions_is_one_task_each():
    expr = optimized(filtered()["y"].sum())
    graph = together(expr)
    assert sorted(key_split(key) for key in graph).count("part-fused-chunk") == N
    assert len(graph) < N + 4 < len(tasks_of(expr))
    assert results(graph, expr) == results(tasks_of(expr), expr)


def test_tasks_that_stay_keep_their_keys():
    expr = optimized(filtered()["y"].sum())
    kept = next(one for one in expr.walk() if type(one).__name__ == "Assign")
    graph = together(expr, {(kept._name, 2)})
    assert {(kept._name, number) for number in range(N)} <= graph.keys()
    assert results(graph, expr) == results(tasks_of(expr), expr)


def test_wanted_tasks_keep_their_keys():
    expr = optimized(filtered(), filtered()["y"].max())
    graph = together(expr)
    assert {*flatten(expr.__dask_keys__())} <= graph.keys()
    found, stock = results(graph, expr), results(tasks_of(expr), expr)
    assert all(map(pd.Series.equals, found[:N], stock[:N])) and found[N:] == stock[N:]


def test_a_shared_layer_is_done_once():
    made = []

    def counted(one: pd.DataFrame) -> pd.DataFrame:
        made.append(len(one))
        return one + 1

    shared = frame().map_partitions(counted, meta=part(0))
    expr = optimized(shared["x"].sum(), shared["x"].max())
    assert results(together(expr), expr) == [24 * (1 + 2 + 3 + 4), 4]
    assert len(made) == N


def test_a_small_table_is_made_once():
    made = []

    def table(number: int) -> pd.DataFrame:
        made.append(number)
        return pd.DataFrame({"key": range(24), "z": 1.0})

    small = dd.from_map(table, [0], meta=pd.DataFrame({"key": [0], "z": [1.0]}))
    expr = optimized(frame().merge(small, on="key")["z"].sum())
    assert results(together(expr), expr) == [24 * N] and made == [0]


def test_names_tell_of_sources_and_ends():
    expr = optimized(frame()["x"].sum())
    (name,) = {key_split(key) for key in together(expr) if "part" in str(key)}
    assert name == "part-getitem-chunk", "without _to_string_dtype, which Dask could not show"
    expr = optimized(filtered()["y"].sum())
    assert "part-fused-chunk" in {key_split(key) for key in together(expr)}


def test_the_same_program_has_the_same_keys():
    expr = optimized(filtered()["y"].sum())
    assert together(expr).keys() == together(optimized(filtered()["y"].sum())).keys()


def test_a_group_that_needs_other_tasks_has_another_key():
    expr = optimized(filtered()["y"].sum())
    source = next(one for one in expr.walk() if type(one).__name__ == "FromMap")
    keys = [{*together(expr, stays)} for stays in ({}, {(source._name, 0)})]
    shared = [key for key in keys[0] & keys[1] if "part" in str(key)]
    assert shared == []


def test_other_collections_are_left_alone():
    array = da.ones(8, chunks=2).sum()
    assert layers(optimized(array), lambda key: False) == []
    with pytest.warns(UserWarning, match="mixed"):
        mixed = optimized(array, frame()["x"].sum())
    assert layers(mixed, lambda key: False) == []


def test_a_task_needed_by_one_outside_the_layers_stays():
    graph = {
        ("a", 0): Task(("a", 0), int, 3),
        ("b", 0): Task(("b", 0), abs, TaskRef(("a", 0))),
        "other": Task("other", abs, TaskRef(("a", 0))),
    }
    assert put_together(graph, [["a", "b"]]) == (graph, {})
    del graph["other"]
    found, made = put_together(graph, [["a", "b"]])
    assert [*made.values()] == [{"a", "b"}] and made.keys() == found.keys()


def test_aliases_get_the_new_names():
    graph = {
        ("a", 0): Task(("a", 0), int, -3),
        ("b", 0): Task(("b", 0), abs, TaskRef(("a", 0))),
        "end": Alias("end", ("b", 0)),
    }
    found, _ = put_together(graph, [["a", "b"]])
    assert len(found) == 2 and execute_graph(found, keys=["end"])["end"] == 3


# ---------------------------------------------------------------------- tasks of a scheduler


def known(graph: dict) -> dict:
    return {key: SimpleNamespace(run_spec=task) for key, task in graph.items()}


def test_tasks_of_a_scheduler_keep_their_groups():
    expr = optimized(filtered()["y"].sum())
    graph, there = tasks_of(expr), together(expr)
    found = with_known_groups(graph, known(there))
    assert {key: found[key] for key in there} == there
    assert results(found, expr) == results(graph, expr)


def test_a_task_whose_inputs_are_forgotten_is_left_to_dask():
    expr = optimized(filtered()["y"].sum())
    graph, there = tasks_of(expr), known(together(expr))
    group = next(key for key in there if "part" in str(key))
    del there[group]
    assert with_known_groups(graph, there) is graph


def test_an_equal_graph_stays_the_same_object():
    graph = tasks_of(optimized(filtered()["y"].sum()))
    assert with_known_groups(graph, known(graph)) is graph
    assert with_known_groups(graph, {}) is graph
    no_spec = {key: SimpleNamespace(run_spec=None) for key in graph}
    assert with_known_groups(graph, no_spec) is graph


def test_a_key_used_for_something_else_is_left_to_dask():
    mine = {"y": Task("y", abs, TaskRef("x")), "x": Task("x", int, 1)}
    other = {
        "y": Task("y", abs, TaskRef("z")),
        "z": Task.fuse(Task("z", int), Task("q", int, TaskRef("z")), key="z"),
    }
    assert with_known_groups(mine, known(other)) is mine
