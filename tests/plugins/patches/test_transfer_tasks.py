"""Contract tests of the tasks that hand inputs to a shuffle, and tests of those written here."""

from __future__ import annotations

import inspect
import operator

import dask
import dask.array as da
import dask.dataframe as dd
import pandas as pd
import pytest
from dask._task_spec import (
    Alias,
    GraphNode,
    Task,
    TaskRef,
    convert_legacy_graph,
    execute_graph,
)
from dask.base import collections_to_expr
from dask.utils import key_split
from distributed import Scheduler, get_worker
from distributed.shuffle._core import P2PBarrierTask, p2p_barrier
from distributed.utils_test import gen_cluster

from dask_gpurt.plugins.patches.graphs.graph_swap import culled
from dask_gpurt.plugins.patches.graphs.transfer_tasks import (
    ChainFinder,
    barriers,
    execution_in_this_thread,
    keep_known,
    n_inputs,
    write,
)


def frame(n: int = 4) -> dd.DataFrame:
    return dd.from_pandas(pd.DataFrame({"key": range(24), "x": 1.0}), npartitions=n)


def tasks_of(collection) -> dict:
    """Return the tasks that a scheduler makes of a collection."""
    expr = collections_to_expr([collection]).optimize()
    return convert_legacy_graph(expr.__dask_graph__())


@pytest.fixture
def p2p():
    methods = {"dataframe.shuffle.method": "p2p", "array.rechunk.method": "p2p"}
    with dask.config.set({**methods, "array.chunk-size": 1000}):
        yield


def programs() -> dict:
    array = da.ones((400, 400), chunks=(100, 400)).rechunk((400, 100))
    return {
        "shuffle": (frame().shuffle("key"), 1),
        "merge": (frame().merge(frame(5), on="key", npartitions=3), 2),
        "rechunk": (array, 1),
    }


@pytest.mark.parametrize("name", ["shuffle", "merge", "rechunk"])
def test_a_barrier_names_the_tasks_that_hand_over(p2p, name):
    collection, n = programs()[name]
    graph = tasks_of(collection)
    found = barriers(graph)
    assert len(found) == n
    for barrier in found:
        assert barrier.func is p2p_barrier
        assert not isinstance(barrier.args[0], GraphNode), "the id of the shuffle"
        rest = barrier.args[1:]
        assert all(isinstance(one, (Alias, TaskRef)) for one in rest)
        assert {getattr(one, "target", None) or one.key for one in rest} == barrier.dependencies
        assert barrier.spec.id == barrier.args[0] and not barrier.kwargs
        assert barrier.block_fusion


@pytest.mark.parametrize("name", ["shuffle", "merge", "rechunk"])
@pytest.mark.parametrize("size", [1, 3])
def test_every_input_is_handed_over_by_one_task(p2p, name, size):
    graph = tasks_of(programs()[name][0])
    new = dict(graph)
    for barrier in barriers(graph):
        chains = ChainFinder(graph, (), (), {}).chains(barrier)
        assert len(chains) == len(barrier.dependencies)
        groups = [chains[i : i + size] for i in range(0, len(chains), size)]
        write(new, [(barrier, groups)])
        written = new[barrier.key]
        assert isinstance(written, P2PBarrierTask) and written.spec is barrier.spec
        assert len(written.dependencies) == len(groups)
        sizes = [n_inputs(new[key]) for key in written.dependencies]
        assert sorted(sizes) == sorted(map(len, groups))
    assert len(new) < len(graph)
    assert {key for task in new.values() for key in task.dependencies} <= new.keys()


def chain_graph(**more) -> dict:
    """Return a graph: made -> changed -> handed over -> barrier."""
    graph = {
        "made": Task("made", operator.add, 1, 2),
        "changed": Task("changed", operator.neg, TaskRef("made")),
        "handed": Task("handed", operator.abs, TaskRef("changed")),
        "shuffle-barrier-a": P2PBarrierTask(
            "shuffle-barrier-a", p2p_barrier, "a", TaskRef("handed"), spec=None
        ),
    }
    return {**graph, **more}


def chain(graph: dict, wanted=(), known=(), annotations=None) -> list[str] | None:
    finder = ChainFinder(graph, wanted, known, annotations or {})
    chains = finder.chains(graph["shuffle-barrier-a"])
    return None if chains is None else [task.key for task in chains[0].tasks]


def test_tasks_that_serve_nothing_else_are_one_chain():
    assert chain(chain_graph()) == ["made", "changed", "handed"]
    (found,) = ChainFinder(chain_graph(), (), (), {}).chains(chain_graph()["shuffle-barrier-a"])
    assert found.inputs == set()
    assert (found.key, found.key_with("abc")) == ("handed", "made-handed-abc")


def test_what_others_need_is_not_in_a_chain():
    other = Task("other", operator.neg, TaskRef("made"))
    assert chain(chain_graph(other=other)) == ["changed", "handed"]
    assert chain(chain_graph(), wanted={"changed"}) == ["handed"]
    assert chain(chain_graph(), wanted={"handed"}) is None
    assert chain(chain_graph(other=Task("other", abs, TaskRef("handed")))) is None


def test_tasks_that_a_scheduler_has_are_not_in_a_chain():
    assert chain(chain_graph(), known={"changed"}) == ["handed"]


def test_coroutines_are_not_in_a_chain():
    async def made():
        return 1

    assert chain(chain_graph(made=Task("made", made))) == ["changed", "handed"]


def test_keys_tell_which_inputs_go_together():
    """Else a scheduler could take a task of one program for that of another one."""
    keys = []
    for sizes in ((2, 2), (1, 3), (2, 2)):
        with dask.config.set({"dataframe.shuffle.method": "p2p"}):
            graph = tasks_of(frame().shuffle("key"))
        (barrier,) = barriers(graph)
        chains = iter(ChainFinder(graph, (), (), {}).chains(barrier))
        write(graph, [(barrier, [[next(chains) for _ in range(size)] for size in sizes])])
        keys.append(graph[barrier.key].dependencies)
    assert not keys[0] & keys[1]
    assert keys[0] == keys[2]
    assert {key_split(key) for one in keys for key in one} == {"frompandas-shuffle-transfer"}


def test_all_parts_of_a_rechunk_share_a_name():
    """Else a scheduler has a group of tasks for each of them."""
    with dask.config.set({"array.rechunk.method": "p2p"}):
        array = da.random.default_rng(1).random((10, 10), chunks=(1, 2)).rechunk((2, 1))
        graph = tasks_of(array)
    found = barriers(graph)
    finder = ChainFinder(graph, (), (), {})
    write(graph, [(barrier, [finder.chains(barrier)]) for barrier in found])
    keys = {key for barrier in found for key in graph[barrier.key].dependencies}
    assert len(found) == len(keys) > 10
    assert len({key[0] for key in keys}) == 1


def test_tasks_that_nothing_needs_are_culled():
    graph = chain_graph(other=Task("other", abs, TaskRef("made")))
    assert culled(graph, {"shuffle-barrier-a"}).keys() == chain_graph().keys()
    assert culled(graph, {"other", "absent"}).keys() == {"other", "made"}


def test_outputs_of_a_shuffle_are_not_in_a_chain():
    first = P2PBarrierTask("shuffle-barrier-b", p2p_barrier, "b", TaskRef("x"), spec=None)
    made = Task("made", operator.neg, TaskRef("shuffle-barrier-b"))
    graph = chain_graph(made=made, **{"shuffle-barrier-b": first})
    assert chain(graph) == ["changed", "handed"]


def test_annotated_tasks_are_left_alone():
    assert chain(chain_graph(), annotations={"retries": {"made": 3}}) == ["changed", "handed"]
    (found,) = ChainFinder(
        chain_graph(), (), (), {"workers": {"handed": "a"}, "retries": {}}
    ).chains(chain_graph()["shuffle-barrier-a"])
    assert found.is_annotated and [task.key for task in found.tasks] == ["handed"]


def test_a_missing_task_leaves_the_shuffle_as_it_is():
    graph = chain_graph()
    del graph["handed"]
    assert chain(graph) is None


def barrier_of(graph: dict) -> P2PBarrierTask:
    return graph["shuffle-barrier-a"]


class Known:
    def __init__(self, run_spec):
        self.run_spec = run_spec


def test_tasks_that_a_scheduler_has_are_kept():
    first, second = chain_graph(), chain_graph()
    barrier = first["shuffle-barrier-a"]
    write(first, [(barrier, [ChainFinder(first, (), (), {}).chains(barrier)])])
    known = {key: Known(task) for key, task in first.items()}
    assert keep_known(second, second["shuffle-barrier-a"], known)
    (key,) = barrier_of(first).dependencies
    assert key.startswith("made-handed-")
    assert second[key] is first[key]
    assert second["shuffle-barrier-a"] is first["shuffle-barrier-a"]
    for missing in ({}, {**known, key: Known(None)}, {"shuffle-barrier-a": Known(None)}):
        untouched = chain_graph()
        assert not keep_known(untouched, untouched["shuffle-barrier-a"], missing)
        assert isinstance(untouched["changed"], Task)


def test_known_tasks_come_with_all_that_they_need():
    """The scheduler may forget them before it gets the graph."""
    first, second = chain_graph(), chain_graph()
    barrier = barrier_of(first)
    write(first, [(barrier, [ChainFinder(first, (), (), {}).chains(barrier)])])
    (key,) = barrier_of(first).dependencies
    first[key] = Task(key, sum, TaskRef("in a group"))
    first["in a group"] = Task("in a group", sum, TaskRef("first"))
    first["first"] = Task("first", int)
    known = {one: Known(task) for one, task in first.items()}
    assert keep_known(second, barrier_of(second), known)
    assert all(second[one] is first[one] for one in (key, "in a group", "first"))
    del known["first"]
    assert not keep_known(chain_graph(), barrier_of(chain_graph()), known)


def test_inputs_of_a_task_run_one_after_the_other():
    """Each input is released before another one is made."""
    events: list[str] = []

    class Part:
        def __init__(self, number):
            self.number = number
            events.append(f"made {number}")

        def __del__(self):
            events.append(f"freed {self.number}")

    def hand_over(part):
        events.append(f"sent {part.number}")
        return 7

    graph = {}
    for number in range(3):
        graph["in", number] = Task(("in", number), Part, number)
        graph["out", number] = Task(("out", number), hand_over, TaskRef(("in", number)))
    refs = [TaskRef(("out", number)) for number in range(3)]
    barrier = P2PBarrierTask("shuffle-barrier-a", p2p_barrier, "a", *refs, spec=None)
    graph[barrier.key] = barrier
    write(graph, [(barrier, [ChainFinder(graph, (), (), {}).chains(barrier)])])
    (key,) = graph[barrier.key].dependencies
    task = graph[key]
    assert execute_graph({task.key: task})[task.key] == 7
    order = [int(event.split()[1]) for event in events[::3]]
    assert sorted(order) == [0, 1, 2]
    assert events == [f"{what} {n}" for n in order for what in ("made", "sent", "freed")]


def told(number):
    execution = execution_in_this_thread(get_worker())
    return execution.key, execution.n_inputs, execution.start_s


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_a_task_knows_how_many_inputs_it_hands_over(c, s, a):
    key, n_inputs, start_s = await c.submit(told, 0, key="alone")
    assert (key, n_inputs) == ("alone", 1)
    assert execution_in_this_thread(a) == (None, 0.0, 1), "no task runs in this thread"
    several = [Task(("out", number), told, number) for number in range(3)]
    last = Task("last", min, *(TaskRef(task.key) for task in several))
    graph = {"group": Task.fuse(*several, last, key="group")}
    key, n_inputs, later_s = await c.get(graph, "group", sync=False)
    assert (key, n_inputs) == ("group", 3)
    assert later_s > start_s > 0


def test_results_of_earlier_attempts_are_ignored():
    """So no result ever stands for inputs of two runs."""
    assert "ts.run_id != run_id" in inspect.getsource(Scheduler.stimulus_task_finished)


def test_the_order_of_arguments_is_that_of_inputs(p2p):
    graph = tasks_of(frame(12).shuffle("key"))
    (barrier,) = barriers(graph)
    numbers = [one.key[1] for one in ChainFinder(graph, (), (), {}).chains(barrier)]
    assert numbers == [*range(12)]
    assert list(inspect.signature(P2PBarrierTask).parameters)[:3] == ["key", "func", "args"]
