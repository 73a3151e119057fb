"""Fast paths of the policy agree with the comparison of all candidates."""

from __future__ import annotations

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from dask_gpurt.placement.cost import HeldTask, Input, Task
from dask_gpurt.placement.fast_paths import (
    candidate_nbytes,
    cheapest,
    holder_is_best,
    largest_is_best,
)
from dask_gpurt.placement.policy import DataAware
from dask_gpurt.topology.model import LOCAL, Path
from dask_gpurt.topology.places import path_between
from tests.placement.machines import (
    NAMES,
    by_host,
    deterministic,
    looked_up,
    partners,
    sizes,
    snapshot,
    tasks,
    two_levels,
    ways,
    workers,
)


# The filter drops two of three drawn examples. If it dropped all, hypothesis would fail.
@settings(deterministic, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(tasks(), workers(), ways(), st.floats(0, 1))
def test_holder_fast_path_agrees_with_the_policy(task, all_workers, places, share):
    """They agree for any paths, idle workers and joins of the output."""
    holder, *others = all_workers
    holder = holder._replace(occupancy_s=0.0, n_tasks=0, slowness=1.0)
    inputs = [one._replace(holders=[holder.address], arriving_s={}) for one in task.inputs]
    needed_nbytes = sum(one.nbytes for one in inputs)
    task = task._replace(
        inputs=inputs,
        output_nbytes=int(2.1 * share * needed_nbytes),
        joins=[{others[0].address: 1000}],
        device=None,
    )
    assume(holder_is_best(needed_nbytes, task.output_nbytes, 1, holder.room_nbytes))
    found = snapshot(task, [holder, *others], places, idle=tuple(NAMES))
    assert DataAware().decide(found).worker == holder.address


@deterministic
@given(tasks(), workers(), two_levels(), st.floats(0, 1.1), st.data())
def test_holder_fast_path_agrees_with_many_joins(task, workers, places, share, data):
    """They agree on hosts where no detour is faster, and with joins with one worker each.

    In a join with several workers, one message may carry the output and other data. Then latencies
    count; the test of waits covers that.
    """
    holder, *others = workers
    holder = holder._replace(occupancy_s=0.0, slowness=1.0)
    others = [one._replace(n_tasks=1, occupancy_s=max(one.occupancy_s, 1e-6)) for one in others]
    inputs = [one._replace(holders=[holder.address], arriving_s={}) for one in task.inputs]
    needed_nbytes = sum(one.nbytes for one in inputs)
    joins = data.draw(st.lists(partners(max_size=1), max_size=2))
    output_nbytes = int(2 * share * needed_nbytes / max(1, len(joins)))
    task = task._replace(
        inputs=inputs, output_nbytes=output_nbytes, joins=joins, device=None, duration_s=0.0
    )
    assume(holder_is_best(needed_nbytes, output_nbytes, len(joins), holder.room_nbytes))
    found = snapshot(task, [holder, *others], places, idle=tuple(NAMES))
    assert DataAware().decide(found).worker == holder.address


@deterministic
@given(st.data())
def test_largest_input_fast_path_agrees_with_policy_and_dask(data):
    """They agree for any load of the other workers."""
    n = data.draw(st.integers(2, 5))
    few = st.sampled_from([100, 100, 101, 2**30])
    waits = st.sampled_from([0.0] * 12 + [0.001, 0.5])
    needed = [
        Input(name, data.draw(few | sizes), (name,), outlet_s=data.draw(waits))
        for name in NAMES[:n]
    ]
    task = Task("t", needed, data.draw(st.floats(0, 10)), data.draw(few | sizes))
    rate, latency_s = data.draw(st.floats(1e6, 1e12)), data.draw(st.floats(0, 0.1))
    alike = Path(latency_s, rate, "k")
    places = by_host(
        {name: data.draw(st.sampled_from([name] * 9 + ["A"])) for name in NAMES},
        dict.fromkeys(NAMES, 0) | {"w0": data.draw(st.sampled_from([0] * 9 + [1]))},
        lambda a, b: LOCAL if a == b else Path(0.0, 1e13, "k"),
        lambda a, b: alike,
    )
    found = [one._replace(nbytes=data.draw(few), n_tasks=0) for one in data.draw(workers())]
    nbytes = [one.nbytes for one in needed]
    idle = {name for name in NAMES if data.draw(st.booleans())}
    idle.add(NAMES[nbytes.index(max(nbytes))])
    found = [
        one._replace(
            occupancy_s=0.0,
            room_nbytes=2.0**40,
            receiving_s=data.draw(waits),
            slowness=1.0,
            inlet_s=data.draw(waits),
        )
        if one.address in idle
        # A busy worker needs some time for its tasks. With 0 s, stock Dask would see a tie.
        else one._replace(n_tasks=1, occupancy_s=max(one.occupancy_s, 0.001))
        for one in found
    ]
    first = {name for name, one in zip(NAMES, nbytes, strict=False) if one == max(nbytes)} & idle
    chosen = min((one.nbytes, one.address) for one in found if one.address in first)[1]
    (there,) = (one for one in found if one.address == chosen)
    outlets_s = [one.outlet_s for one in needed if one.key != chosen]
    wait_s = max([there.receiving_s, there.inlet_s, *outlets_s])
    assume(largest_is_best(NAMES[:n], nbytes, task.duration_s, wait_s, places))
    decision = DataAware().decide(snapshot(task, found, places))
    assert (decision.worker, decision.stock) == (chosen, chosen)


def test_largest_input_fast_path_applies_to_plain_cases_only():
    """It applies to equal hosts where all missing inputs come over equal paths."""
    alike = Path(0.001, 1e9, "k")
    hosts = dict(zip(NAMES, NAMES, strict=True))
    kinds = dict.fromkeys(NAMES, 0)

    def found(*nbytes, hosts=hosts, kinds=kinds, duration_s=0.0, wait_s=0.0):
        places = by_host(hosts, kinds, lambda a, b: LOCAL, lambda a, b: alike if a == b else LOCAL)
        return largest_is_best(NAMES[: len(nbytes)], nbytes, duration_s, wait_s, places)

    assert found(1, 3, 2)
    assert found(3, 1, 3)
    assert not found(1, 3, 2, hosts=hosts | {"w2": "w1"})
    assert not found(1, 3, 2, kinds=kinds | {"w2": 1})
    # Beside such a long duration, rounding would hide the small gain.
    assert not found(1, 3, 2, duration_s=1e6)
    # Fetching takes one nanosecond at either end, so a wait above two is too long.
    assert found(1, 3, 2, wait_s=1.9e-9)
    assert not found(1, 3, 2, wait_s=2.1e-9)
    assert not found(3, 1, 3, wait_s=1e-12)
    assert not found(0, 0)
    assert not found()


def test_holder_fast_path_needs_room():
    assert holder_is_best(10, 19, 1, 19)
    assert not holder_is_best(10, 20, 1, 20)
    assert not holder_is_best(10, 19, 1, 18)


def test_holder_fast_path_excludes_large_joined_outputs():
    assert holder_is_best(10, 9, 2, 9)
    assert not holder_is_best(10, 10, 2, 10)
    assert holder_is_best(10, 1000, 0, 1000)


def test_holder_fast_path_excludes_long_waits():
    assert holder_is_best(10, 10, 1, 10, 9e-9, 1e9)
    assert not holder_is_best(10, 10, 1, 10, 11e-9, 1e9)
    # The bandwidth of the paths from the holder is unknown.
    assert not holder_is_best(10, 10, 1, 10, 1e-9)
    assert holder_is_best(10, 10, 1, 10, 0.0)


@deterministic
@given(tasks(), workers(), ways(), st.floats(1e6, 1e12), st.data())
def test_cheapest_fast_path_agrees_with_the_policy(task, found, places, rate, data):
    """They agree exactly in each cost term, for any holders and paths."""
    few = st.sampled_from([100, 100, 101]) | sizes
    holders = data.draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=7))
    nbytes = [data.draw(few) for _ in holders]
    outlets_s = [data.draw(st.sampled_from([0.0, 0.0, 0.5, 3.0])) for _ in holders]
    arriving = st.dictionaries(st.sampled_from(NAMES), st.floats(0, 10), max_size=2)
    arrivals_s = [data.draw(st.just({}) | arriving) for _ in holders]
    for one, of_it in zip(holders, arrivals_s, strict=True):
        of_it.pop(one, None)
    inputs = [
        Input(i, n, (one,), of_it, wait_s)
        for i, (one, n, of_it, wait_s) in enumerate(
            zip(holders, nbytes, arrivals_s, outlets_s, strict=True)
        )
    ]
    task = task._replace(inputs=inputs, device=None)
    idle = data.draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=3))
    plain = HeldTask(
        holders, nbytes, outlets_s, arrivals_s, task.duration_s, task.output_nbytes, task.joins
    )
    held = candidate_nbytes(plain)
    held = {**dict.fromkeys(idle, 0), **held}
    uncertainty = data.draw(st.sampled_from([1.0, 2.0, 10.0]))
    stock = data.draw(st.sampled_from([None, *holders]))
    decision = cheapest(
        plain,
        held,
        looked_up(found)(held),
        places,
        bandwidth=rate,
        uncertainty=uncertainty,
        stock=stock,
    )
    thorough = snapshot(
        task,
        found,
        places,
        idle=tuple(idle),
        bandwidth_nbytes_per_s=rate,
        uncertainty=uncertainty,
        stock=stock,
    )
    assert decision == DataAware().decide(thorough)


@deterministic
@given(tasks(), workers(), two_levels(), st.floats(0, 1.1), st.data())
def test_holder_fast_path_agrees_for_waits_below_any_transfer(task, workers, places, share, data):
    holder, *others = workers
    holder = holder._replace(slowness=1.0)
    inputs = [one._replace(holders=[holder.address], arriving_s={}) for one in task.inputs]
    needed_nbytes = sum(one.nbytes for one in inputs)
    joins = data.draw(st.lists(partners(), max_size=2))
    output_nbytes = int(2 * share * needed_nbytes / max(1, len(joins)))
    ways_from = [path_between(places, holder.address, one.address) for one in others]
    widest = max(one.bandwidth_nbytes_per_s for one in ways_from)
    wait_s = data.draw(st.floats(0, 2)) * needed_nbytes / widest
    holder = holder._replace(occupancy_s=wait_s * holder.nthreads)
    task = task._replace(inputs=inputs, output_nbytes=output_nbytes, joins=joins, device=None)
    assume(
        holder_is_best(needed_nbytes, output_nbytes, len(joins), holder.room_nbytes, wait_s, widest)
    )
    found = snapshot(task, [holder, *others], places, idle=tuple(NAMES))
    costs = DataAware().decide(found).costs
    least_s = min(one.total_s for one in costs.values())
    # From another worker, one message may carry the output and other data.
    messages_s = len(joins) * max(one.latency_s for one in ways_from)
    assert costs[holder.address].total_s <= least_s * (1 + 1e-12) + messages_s


def weighed(holders, nbytes, output_nbytes, joins, arrivals_s):
    nowhere_s = [0.0 for _ in holders]
    return candidate_nbytes(
        HeldTask(holders, nbytes, nowhere_s, arrivals_s, 0.0, output_nbytes, joins)
    )


def test_worker_with_few_joined_bytes_is_not_a_candidate():
    joins = [{"w2": 100, "w3": 24}, {"w3": 1000}]
    nowhere = [{}, {}, {}]
    assert weighed(["w0", "w1", "w0"], [40, 40, 20], 25, joins, nowhere) == {
        "w0": 60,
        "w1": 40,
        "w2": 0,
        "w3": 0,
    }
    assert weighed(["w0"], [100], 24, joins[:1], [{}]) == {"w0": 100}


def test_worker_that_is_fetching_an_input_is_a_candidate():
    arrivals_s = [{"w2": 1.0}, {"w0": 0.5}]
    assert weighed(["w0", "w1"], [1, 2], 0, [], arrivals_s) == {"w0": 1, "w1": 2, "w2": 0}
