"""Layers of a DataFrame program that go together."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.placement.blockwise_groups import Layer, grouped


@st.composite
def programs(draw: st.DrawFn) -> list[Layer]:
    found: list[Layer] = []
    for number in range(draw(st.integers(0, 12))):
        inputs = draw(st.sets(st.integers(0, number - 1), max_size=3)) if number else set()
        names = frozenset(str(one) for one in inputs)
        found.append(Layer(str(number), names, draw(st.integers(1, 2)), draw(st.booleans())))
    return draw(st.permutations(found))


def layer(name: str, *inputs: str, n: int = 4, together: bool = True, whole: str = "") -> Layer:
    needed = frozenset(inputs) | ({whole} if whole else set())
    return Layer(name, needed, n, together, frozenset({whole} if whole else ()))


def dependents(layers: list[Layer]) -> dict[str, set[str]]:
    return {one.name: {o.name for o in layers if one.name in o.inputs} for one in layers}


@given(programs())
def test_a_group_has_one_result(layers):
    by_name = {one.name: one for one in layers}
    needed_by = dependents(layers)
    for group in grouped(layers):
        assert len(group) > 1
        assert all(needed_by[name] and needed_by[name] <= {*group} for name in group[:-1])
        assert all(by_name[name].may_go_together for name in group)
        assert len({by_name[name].n_partitions for name in group}) == 1


@given(programs())
def test_all_that_may_go_together_do(layers):
    by_name, needed_by = {one.name: one for one in layers}, dependents(layers)
    group_of = {name: number for number, group in enumerate(grouped(layers)) for name in group}
    for one in layers:
        # A layer of one input joins no branches.
        if one.may_go_together and len(needed_by[one.name]) == 1:
            later = by_name[next(iter(needed_by[one.name]))]
            fits = later.may_go_together and later.n_partitions == one.n_partitions
            if fits and len(later.inputs) == 1:
                assert group_of[one.name] == group_of[later.name]


@given(programs())
def test_two_threads_may_take_two_branches(layers):
    """Two layers of a group that have no beginning in common in it: only one goes on in it."""
    by_name = {one.name: one for one in layers}
    for group in grouped(layers):
        begins: dict[str, set[str]] = {}
        for name in group:
            needed = by_name[name].inputs
            inside = [begins[each] for each in needed if each in begins]
            begins[name] = {*needed - begins.keys()}.union(*inside) or {name}
            assert len(inside) < 2 or set.intersection(*inside) or len(inside) > 2


@given(programs())
def test_inputs_come_first(layers):
    by_name = {one.name: one for one in layers}
    groups = grouped(layers)
    names = [*itertools.chain.from_iterable(groups)]
    assert len({*names}) == len(names)
    for group in groups:
        seen: set[str] = set()
        for name in group:
            assert not (by_name[name].inputs & {*group}) - seen
            seen.add(name)
    done: set[str] = set()
    for group in groups:
        needed = frozenset().union(*(by_name[name].inputs for name in group)) - {*group}
        assert needed & {*names} <= done
        done |= {*group}


def test_a_filter_and_its_condition_go_together():
    layers = [
        layer("read"),
        layer("column", "read"),
        layer("condition", "column"),
        layer("filter", "read", "condition"),
    ]
    assert grouped(layers) == [["read", "column", "condition", "filter"]]


def test_a_layer_of_two_others_stays():
    layers = [layer("read"), layer("sum", "read"), layer("mean", "read")]
    assert grouped(layers) == []


def test_a_shuffle_ends_a_group():
    layers = [
        layer("read"),
        layer("column", "read"),
        layer("shuffle", "column", together=False),
        layer("filter", "shuffle"),
        layer("chunk", "filter"),
    ]
    assert grouped(layers) == [["read", "column"], ["filter", "chunk"]]


def test_a_small_table_stays():
    layers = [
        layer("table", n=1),
        layer("named", "table", n=1),
        layer("read"),
        layer("merge", "read", whole="named"),
    ]
    assert grouped(layers) == [["table", "named"], ["read", "merge"]]


def test_branches_stay_apart():
    layers = [
        layer("left"),
        layer("filter", "left"),
        layer("right"),
        layer("merge", "filter", "right"),
        layer("chunk", "merge"),
    ]
    assert grouped(layers) == [["left", "filter"], ["merge", "chunk"]]


def test_functions_of_a_user_are_branches():
    layers = [
        layer("read"),
        layer("one", "read")._replace(runs_user_code=True),
        layer("other", "read")._replace(runs_user_code=True),
        layer("sum", "one", "other"),
    ]
    assert grouped(layers) == []
    chain = [layer("read"), layers[1], layer("sum", "one")]
    assert grouped(chain) == [["read", "one", "sum"]]


def test_columns_of_one_output_are_no_branches():
    layers = [
        layer("shuffle", together=False, n=0),
        layer("a", "shuffle"),
        layer("b", "shuffle"),
        layer("product", "a", "b"),
        layer("assign", "shuffle", "product"),
    ]
    assert [sorted(group) for group in grouped(layers)] == [["a", "assign", "b", "product"]]


def test_outputs_of_two_shuffles_are_branches():
    layers = [
        layer("one", together=False, n=0),
        layer("other", together=False, n=0),
        layer("filter", "one"),
        layer("merge", "filter", "other"),
        layer("chunk", "merge"),
    ]
    assert grouped(layers) == [["merge", "chunk"]]


def test_a_common_beginning_connects_branches_in_turn():
    layers = [
        layer("x", together=False, n=0),
        layer("y", together=False, n=0),
        layer("a", "x"),
        layer("b", "y"),
        layer("both", "x", "y"),
        layer("end", "a", "b", "both"),
    ]
    assert [sorted(group) for group in grouped(layers)] == [["a", "b", "both", "end"]]
    layers[4] = layer("both", "x", "y", together=False)
    assert grouped(layers) == []


def test_nothing_to_put_together():
    assert grouped([]) == grouped([layer("read")]) == []
