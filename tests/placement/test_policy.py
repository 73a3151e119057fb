"""The policy chooses the right worker in cases computed by hand, and keeps general properties."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dask_gpurt.placement import policy
from dask_gpurt.placement.cost import Input, Task, WorkerSnapshot
from dask_gpurt.placement.policy import (
    MAX_CANDIDATES,
    MAX_RESTRICTED,
    DataAware,
)
from dask_gpurt.topology.model import LOCAL, Path
from tests.placement import reference
from tests.placement.machines import (
    NAMES,
    by_pair,
    deterministic,
    even,
    inputs,
    sizes,
    snapshot,
    snapshots,
    subsets,
)
from tests.placement.stock_policy import Stock
from tests.test_architecture import ROOT as PACKAGE
from tests.topology.test_model import load

ROOT = PACKAGE.parent
POLICIES = [DataAware(), Stock()]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
@deterministic
@given(found=snapshots())
def test_chosen_worker_is_valid(policy, found):
    decision = policy.decide(found)
    if found.valid is None:
        assert decision.worker in NAMES or not (found.idle or found.task.inputs)
    elif found.valid:
        assert decision.worker in found.valid
        assert decision.stock in found.valid
    else:
        assert decision.worker is None


@deterministic
@given(
    snapshots(),
    st.none() | subsets,
    st.integers(0, 7),
    st.sampled_from([1.0, 1.0, 3.0, 1e3]),
    st.sampled_from([None, *NAMES]),
)
def test_policy_agrees_with_the_plain_reference(found, running, most, uncertainty, stock):
    takes_tasks = None if running is None else running.__contains__
    found = found._replace(takes_tasks=takes_tasks, uncertainty=uncertainty, stock=stock)
    with pytest.MonkeyPatch.context() as patch:
        # The limits are so low that some examples exceed them.
        for module in (policy, reference):
            patch.setattr(module, "MAX_CANDIDATES", most)
            patch.setattr(module, "MAX_RESTRICTED", most)
            patch.setattr(module, "MAX_FETCHING", most)
        assert DataAware().decide(found) == reference.decide(found)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
@deterministic
@given(found=snapshots(), order=st.randoms())
def test_decision_does_not_depend_on_the_order_of_workers(policy, found, order):
    shuffled = list(found.idle)
    order.shuffle(shuffled)
    again = [one._replace(holders=sorted(one.holders)) for one in found.task.inputs]
    same = found._replace(idle=tuple(shuffled), task=found.task._replace(inputs=again))
    assert policy.decide(same).worker == policy.decide(found).worker


@deterministic
@given(
    st.lists(inputs(arriving=False), min_size=1, max_size=5),
    st.lists(sizes, min_size=6, max_size=6),
    st.none() | subsets.filter(bool),
    subsets,
)
def test_policy_agrees_with_dask_on_an_idle_uniform_cluster(needed, held, valid, idle):
    workers = [WorkerSnapshot(name, 1, 0.0, n) for name, n in zip(NAMES, held, strict=True)]
    needed = [one._replace(outlet_s=0.0) for one in needed]
    # Rates are powers of two, so that sums of seconds and ties are exact.
    found = snapshot(
        Task("t", needed),
        workers,
        even(2.0**27),
        valid=valid,
        idle=tuple(idle),
        bandwidth_nbytes_per_s=2.0**27,
    )
    stock = Stock().decide(found).worker
    decision = DataAware().decide(found)
    holders = set.union(*(set(one.holders) for one in needed))
    assert decision.stock == stock
    assume(valid is None or valid & holders)
    assert decision.worker == stock


@deterministic
@given(snapshots(), st.data())
def test_additional_holder_never_raises_the_cost(found, data):
    # The new holder might have the device, and then no worker without one may be chosen.
    found = found._replace(task=found.task._replace(device=None))
    decision = DataAware().decide(found)
    assume(found.task.inputs and decision.worker is not None)
    i = data.draw(st.integers(0, len(found.task.inputs) - 1))
    more = list(found.task.inputs)
    more[i] = more[i]._replace(holders=more[i].holders | {data.draw(st.sampled_from(NAMES))})
    better = DataAware().decide(found._replace(task=found.task._replace(inputs=more)))
    before, after = decision.costs[decision.worker], better.costs[better.worker]
    assert after.total_s <= before.total_s * (1 + 1e-12)


def test_faster_link_is_chosen_where_dask_sees_a_tie():
    """`a` and `b` have half of the data each, and only `b` can be reached quickly."""

    def path(source, target):
        return LOCAL if source == target else Path(0.0, 1e9 if target == "b" else 1e7, "k")

    task = Task("t", [Input("x", 10**7, {"a"}), Input("y", 10**7, {"b"})])
    workers = [WorkerSnapshot("a", 1), WorkerSnapshot("b", 1, nbytes=1)]
    decision = DataAware().decide(snapshot(task, workers, by_pair(path)))
    assert (decision.worker, decision.stock) == ("b", "a")


def test_worker_that_is_fetching_the_input_is_considered():
    """A second task that needs `x` goes to the worker that fetches `x` for a first one."""
    task = Task("t", [Input("x", 10**9, {"a"}, {"b": 0.5})])
    workers = [
        WorkerSnapshot("a", 1, occupancy_s=9.0),
        WorkerSnapshot("b", 1),
        WorkerSnapshot("c", 1),
    ]
    found = snapshot(task, workers, even(1e8), idle=("c",))
    decision = DataAware().decide(found)
    assert (decision.worker, decision.stock) == ("b", "a")


def test_task_moves_only_when_waiting_costs_more():
    task = Task("t", [Input("x", 10**8, {"a"})])
    for occupancy_s, chosen in [(1.9, "a"), (2.1, "b")]:
        workers = [WorkerSnapshot("a", 1, occupancy_s=occupancy_s), WorkerSnapshot("b", 1)]
        decision = DataAware().decide(snapshot(task, workers, even(1e8), idle=("b",)))
        assert decision.worker == chosen


@pytest.mark.parametrize(
    ("uncertainty", "chosen"), [(1.0, "b"), (1.5, "b"), (3.0, "a"), (1e3, "a")]
)
def test_no_data_moves_for_a_gain_within_the_doubt(uncertainty, chosen):
    """Waiting takes 4 s. Moving takes 2 s for both ends, if the believed bandwidth is right."""
    task = Task("t", [Input("x", 10**8, {"a"})])
    workers = [WorkerSnapshot("a", 1, occupancy_s=4.0), WorkerSnapshot("b", 1)]
    found = snapshot(task, workers, even(1e8), idle=("b",), uncertainty=uncertainty)
    assert DataAware().decide(found).worker == chosen


def test_doubt_about_bandwidth_ignores_small_messages():
    task = Task("t", [Input("x", 10, {"a"})])
    workers = [WorkerSnapshot("a", 1, occupancy_s=4.0), WorkerSnapshot("b", 1)]
    found = snapshot(task, workers, even(1e8, latency_s=0.001), idle=("b",), uncertainty=1e3)
    assert DataAware().decide(found).worker == "b"


def test_choice_of_dask_is_always_a_candidate():
    """Otherwise the policy could not compare its own choice with Dask's."""
    names = [f"w{i:02}" for i in range(MAX_CANDIDATES + 1)]
    inputs = [Input(one, 10**8 - i, {one}) for i, one in enumerate(names)]
    workers = [
        WorkerSnapshot(one, 1, occupancy_s=0.0 if one == names[-1] else 60.0) for one in names
    ]
    found = snapshot(Task("t", inputs), workers, even(1e8), uncertainty=10.0, stock=names[-1])
    assert DataAware().decide(found).worker == names[-1]


def test_device_data_stays_on_workers_with_a_device():
    task = Task("t", [Input("x", 100, {"a"})], device="gpu")
    busy = WorkerSnapshot("a", 1, occupancy_s=100.0, devices=("gpu",))
    found = snapshot(task, [busy, WorkerSnapshot("b", 1)], idle=("b",))
    assert DataAware().decide(found).worker == "a"
    # A user's restrictions have priority.
    assert DataAware().decide(found._replace(valid={"b"})).worker == "b"
    on_host = task._replace(device=None)
    assert DataAware().decide(found._replace(task=on_host)).worker == "b"


def test_task_goes_to_the_worker_that_joins_its_output():
    task = Task("t", [Input("x", 10, {"a"})], output_nbytes=10**9, joins=[{"b": 10**9}])
    workers = [WorkerSnapshot("a", 1), WorkerSnapshot("b", 1)]
    decision = DataAware().decide(snapshot(task, workers, even(1e8)))
    assert (decision.worker, decision.stock) == ("b", "a")


def test_block_is_not_moved_for_a_thin_edge():
    """In a stencil, the edge of a block is joined on another, idle worker."""
    task = Task("t", [Input("x", 10**9, {"a"})], output_nbytes=10**6, joins=[{"b": 10**6}])
    workers = [WorkerSnapshot("a", 1, occupancy_s=60.0), WorkerSnapshot("b", 1)]
    found = snapshot(task, workers, even(1e9))
    assert DataAware().decide(found).worker == "a"
    # An idle worker takes the task, if there are no other tasks for it.
    assert DataAware().decide(found._replace(idle=("b",))).worker == "b"
    # It also takes the task if it has some of the inputs.
    both = task._replace(inputs=[*task.inputs, Input("y", 1, {"b"})])
    assert DataAware().decide(found._replace(task=both)).worker == "b"


def test_workers_that_take_no_tasks_are_not_considered():
    task = Task("t", [Input("x", 10**9, {"a", "b"})])
    workers = [WorkerSnapshot("a", 1), WorkerSnapshot("b", 1, nbytes=1)]
    found = snapshot(task, workers, takes_tasks=lambda address: address != "a")
    assert DataAware().decide(found).worker == "b"
    assert Stock().decide(found).worker == "b"


def test_cost_of_a_decision_does_not_grow_with_the_cluster():
    names = [f"w{i}" for i in range(1000)]
    seen = []

    def workers(addresses):
        seen.extend(addresses)
        return [WorkerSnapshot(one, 1) for one in addresses]

    task = Task("t", [Input("x", 100, {"w1"})])
    found = snapshot(task, [], valid=frozenset(names), idle=tuple(names[:4]))
    DataAware().decide(found._replace(workers=workers))
    assert set(seen) == {"w0", "w1", "w2", "w3"}
    assert len(names) > MAX_RESTRICTED


def test_worked_example_of_the_documentation_is_right():
    topology = load("two-hosts")
    nodes = {"left-0": "left/gpu0", "left-1": "left/gpu1", "right-0": "right/gpu0"}

    def path(source, target):
        return topology.path(nodes[source], nodes[target])

    inputs = [Input("x", 4 * 10**9, {"left-0"}), Input("y", 5 * 10**9, {"right-0"})]
    workers = [
        WorkerSnapshot("left-0", 1, 0.5),
        WorkerSnapshot("left-1", 1),
        WorkerSnapshot("right-0", 1, 0.3),
    ]
    found = snapshot(
        Task("t", inputs, 0.05),
        workers,
        by_pair(path),
        idle=("left-1",),
        bandwidth_nbytes_per_s=1e9,
    )
    decision = DataAware().decide(found)
    page = (ROOT / "docs" / "concepts" / "placement.md").read_text()
    for worker in workers:
        one = decision.costs[worker.address]
        cells = [one.transfer_s, one.sending_s, one.queue_s, one.duration_s]
        row = " | ".join(f"{cell:.4f}" for cell in cells)
        total = f"{one.total_s:.4f}"
        total = f"**{total}**" if worker.address == decision.worker else total
        stock = f"{Stock.objective(found, worker)[0]:.4f}"
        stock = f"**{stock}**" if worker.address == decision.stock else stock
        stock = "not a candidate" if worker.address in found.idle else stock
        assert f"| `{worker.address}` | {row} | {total} | {stock} |" in page


def test_workers_that_receive_the_input_first_are_considered():
    workers = [WorkerSnapshot(name, 1) for name in NAMES]
    first, *others = NAMES
    arriving = {name: 1.0 + number for number, name in enumerate(others)}
    needed = [
        Input("x", 1_000, [first], arriving),
        # A worker that fetches more inputs is considered before the others.
        Input("y", 100, [first], {others[-1]: 9.0}),
    ]
    decision = DataAware().decide(snapshot(Task("t", needed), workers, even(1e6)))
    assert set(decision.costs) == {first, others[0], others[-1]}
    valid = {first, *others[2:]}
    for restricted in (
        snapshot(Task("t", needed), workers, even(1e6))._replace(takes_tasks=valid.__contains__),
        snapshot(Task("t", needed), workers, even(1e6), valid=valid),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(policy, "MAX_RESTRICTED", 0)
            decision = DataAware().decide(restricted)
        assert set(decision.costs) == {first, others[2], others[-1]}
