"""Workloads made of Dask's graphs have the same tasks, dependencies and order."""

from __future__ import annotations

import dask.array as da
import pytest
from dask import delayed
from dask.utils import key_split

from dask_gpurt.simulate.examples import EXAMPLES, Scale, add, joins, stencil, transpose_add
from dask_gpurt.simulate.graphs import TaskCost, chunk_nbytes, workload_of

SCALE = Scale(side=4, block_nbytes=8_000_000, load_rate=1e9, rate=1e10)


def by_prefix(workload, prefix):
    return [one for one in workload.tasks if key_split(str(one.key)) == prefix]


def test_dependencies_equal_those_of_the_graph():
    model = add(SCALE)
    assert len(model.tasks) == 3 * 16
    assert len(model.wanted) == 16
    for position in model.wanted:
        task = model.tasks[position]
        needed = [model.tasks[one].key for one in task.dependencies]
        indices = task.key.partition(",")[2]
        assert {key_split(str(key)) for key in needed} == {"ones_like", "zeros_like"}
        assert all(key.endswith(indices) for key in needed)


def test_tasks_follow_the_order_of_dask():
    model = add(SCALE)
    # A sum directly follows its inputs, so that their memory is freed soon.
    for position in model.wanted:
        assert position - max(model.tasks[position].dependencies) == 1


def test_costs_set_size_and_duration():
    inputs = [delayed(int, pure=False)(n, dask_key_name=f"input-{n}") for n in range(3)]
    total = delayed(sum)(inputs, dask_key_name="total")
    costs = {
        "input": TaskCost(of="nothing", nbytes=100, rate=50.0),
        "total": TaskCost(of="sum", ratio=0.5, nbytes=1, rate=100.0, seconds=3.0),
        "": TaskCost(),
    }
    model = workload_of("x", total, costs)
    (one,) = by_prefix(model, "total")
    assert (one.nbytes, one.duration_s) == (151, 3.0 + (300 + 151) / 100.0)
    assert {(t.nbytes, t.duration_s) for t in by_prefix(model, "input")} == {(100, 2.0)}


def test_a_prefix_without_cost_is_an_error():
    with pytest.raises(KeyError):
        workload_of("x", da.ones(4, chunks=2) + 1, {"add": TaskCost()})


def test_split_outputs_share_the_bytes_of_their_group():
    model = joins(SCALE)
    groups = by_prefix(model, "group-taskshuffle")
    splits = by_prefix(model, "split-taskshuffle")
    assert groups and splits
    assert sum(one.nbytes for one in splits) == pytest.approx(
        sum(one.nbytes for one in groups), rel=1e-6
    )


def test_known_sizes_override_costs():
    x = da.ones((6, 5), chunks=((1, 5), (2, 3)))
    sizes = chunk_nbytes(x)
    assert sorted(sizes.values()) == [16, 24, 80, 120]
    model = workload_of("x", x, {"": TaskCost(of="nothing", nbytes=7)}, sizes=sizes)
    assert sorted(one.nbytes for one in model.tasks) == [16, 24, 80, 120]


def test_chunks_of_unknown_length_have_no_size():
    x = da.ones(4, chunks=2)
    assert chunk_nbytes(x[x > 0]) == {}


def test_task_numbers_do_not_depend_on_tokens():
    def used_once_and_twice(*tokens):
        once, twice = (delayed(int)(dask_key_name=f"load-{token}") for token in tokens)
        made = delayed(abs)(twice, dask_key_name="abs-0")
        return delayed(sum)([once, twice, made], dask_key_name="sum-0")

    tokens = "0" * 32, "f" * 32
    one, other = (
        workload_of("loads", used_once_and_twice(*order), {"": TaskCost(rate=1.0, nbytes=1)})
        for order in (tokens, tokens[::-1])
    )
    assert one == other


def test_names_replace_tokens_and_keep_prefix_and_group():
    x = da.ones((4, 4), chunks=2)
    model = workload_of("x", x.T + x, {"": TaskCost()})
    assert {str(one.key).partition(",")[0] for one in model.tasks} == {
        "('add-0'",
        "('ones_like-0'",
        "('transpose-0'",
    }


def test_groups_of_the_same_name_stay_separate():
    x = da.ones((4, 4), chunks=2)
    model = workload_of("x", (x + 1) + (x + 2), {"": TaskCost()})
    groups = {str(one.key).partition(",")[0] for one in by_prefix(model, "add")}
    assert len(groups) == 3


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_move_data_and_take_time(example):
    model = example(SCALE)
    assert model == example(SCALE)
    assert sum(bool(one.dependencies) for one in model.tasks) >= 8
    assert max(one.nbytes for one in model.tasks) >= 7_900_000
    assert any(one.duration_s > 0 for one in model.tasks)
    assert sum(one.nbytes for one in model.tasks) < 10_000 * SCALE.block_nbytes


def test_stencil_has_whole_blocks_and_thin_edges():
    sizes = {one.nbytes for one in by_prefix(stencil(SCALE), "getitem")}
    assert sizes == {8_000_000, 8_000_000 // SCALE.edge}


def test_a_transposed_block_is_as_large_as_the_block():
    assert {one.nbytes for one in transpose_add(SCALE).tasks} == {8_000_000}
