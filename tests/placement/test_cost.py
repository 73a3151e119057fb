"""Each term of the cost of a task on a worker has the right value, and all add up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.placement.cost import (
    SPILL_NBYTES_PER_S,
    Cost,
    Input,
    Task,
    WorkerSnapshot,
    costs,
    steal_pays,
)
from dask_gpurt.topology.model import LOCAL, Path
from tests.placement import machines
from tests.placement.machines import deterministic


def ways(**paths):
    """Paths by pairs such as `a_b`, each a latency and a bandwidth; other pairs have none."""
    closed = Path(0.0, 1e-300, "k")
    known = {tuple(pair.split("_")): Path(*values, "k") for pair, values in paths.items()}
    return machines.by_pair(lambda a, b: LOCAL if a == b else known.get((a, b), closed))


def cost(task, worker, places):
    """Return the cost of a task on a single worker."""
    return costs(task, [worker], places)[worker.address]


def test_missing_input_takes_the_best_path_of_any_holder():
    task = Task("t", [Input("x", 1000, {"a", "b"})])
    found = cost(task, WorkerSnapshot("c", 1), ways(a_c=(1.0, 1000.0), b_c=(0.0, 2000.0)))
    assert found.transfer_s == found.sending_s == 0.5
    assert cost(task, WorkerSnapshot("a", 1), ways()).data_s == 0


def test_latency_decides_where_there_is_little_to_move():
    ways_to_c = ways(a_c=(1.0, 1000.0), b_c=(0.0, 10.0))
    small = Task("t", [Input("x", 5, {"a", "b"})])
    large = Task("t", [Input("x", 500, {"a", "b"})])
    assert cost(small, WorkerSnapshot("c", 1), ways_to_c).transfer_s == 0.5
    assert cost(large, WorkerSnapshot("c", 1), ways_to_c).transfer_s == 1.5


def test_input_in_flight_costs_its_remaining_time():
    way = ways(a_c=(0.0, 100.0))
    task = Task("t", [Input("x", 1000, {"a"}, {"c": 2.5})])
    found = cost(task, WorkerSnapshot("c", 1), way)
    assert (found.arriving_s, found.transfer_s, found.sending_s) == (2.5, 0, 0)
    late = Task("t", [Input("x", 1000, {"a"}, {"c": 99.0})])
    assert cost(late, WorkerSnapshot("c", 1), way).arriving_s == 10


def test_queue_time_is_divided_by_the_threads():
    task = Task("t", [], duration_s=3.0)
    found = cost(task, WorkerSnapshot("a", 4, occupancy_s=8.0), ways())
    assert (found.queue_s, found.duration_s, found.total_s) == (2, 3, 5)


def test_spilling_is_charged_for_bytes_that_do_not_fit():
    task = Task("t", [Input("x", 600, {"a"})], output_nbytes=500)
    way = ways(a_b=(0.0, 1e9))
    room = WorkerSnapshot("b", 1, room_nbytes=1000)
    assert cost(task, room, way).spill_s == 100 / SPILL_NBYTES_PER_S
    # The worker with the input needs room only for the output.
    assert cost(task, room._replace(address="a"), way).spill_s == 0
    overfull = WorkerSnapshot("a", 1, room_nbytes=-100)
    assert cost(task, overfull, way).spill_s == 600 / SPILL_NBYTES_PER_S


def test_join_costs_the_transfer_to_its_best_worker():
    path = machines.even(100.0)
    small = Task("t", [], output_nbytes=100, joins=[{"b": 1000}])
    large = Task("t", [], output_nbytes=9000, joins=[{"b": 1000}])
    assert cost(small, WorkerSnapshot("a", 1), path).join_s == 1
    assert cost(large, WorkerSnapshot("a", 1), path).join_s == 10
    assert cost(large, WorkerSnapshot("b", 1), path).join_s == 0
    two = Task("t", [], output_nbytes=100, joins=[{"b": 100}, {"c": 300}])
    assert cost(two, WorkerSnapshot("b", 1), path).join_s == 1
    assert cost(two, WorkerSnapshot("c", 1), path).join_s == 1
    assert cost(two, WorkerSnapshot("d", 1), path).join_s == 2


@deterministic
@given(machines.tasks(), machines.workers(), machines.ways())
def test_cost_terms_are_non_negative_and_sum_to_the_total(task, workers, path):
    for worker in workers:
        found = cost(task, worker, path)
        assert all(term >= 0 for term in found)
        assert found.total_s == pytest.approx(
            found.data_s + found.sending_s + found.queue_s + found.duration_s, abs=1e-9
        )


def term(queue_s, transfer_s):
    return Cost(transfer_s, 0.0, 0.0, queue_s, 1.0, 0.0, 0.0)


def test_a_steal_has_to_save_more_than_it_moves():
    assert steal_pays(term(5.0, 0.0), term(1.0, 3.0))
    assert not steal_pays(term(5.0, 0.0), term(1.0, 4.0))
    assert not steal_pays(term(5.0, 0.0), term(5.0, 0.0))
    # Data that the victim would have to fetch, too, does not count as moved by the steal.
    assert steal_pays(term(5.0, 3.0), term(1.0, 6.0))


@deterministic
@given(st.floats(0, 1e3), st.floats(0, 1e3), st.floats(0, 1e3), st.floats(0, 1e3))
def test_task_is_not_stolen_back_and_forth(a_queue, a_data, b_queue, b_data):
    a, b = term(a_queue, a_data), term(b_queue, b_data)
    assert not (steal_pays(a, b) and steal_pays(b, a))


def test_input_of_another_host_waits_for_transfers_on_its_link():
    places = machines.by_host(
        {"a": "left", "b": "left", "c": "right"},
        dict.fromkeys("abc", 0),
        lambda source, target: LOCAL if source == target else Path(0.0, 1000.0, "k"),
        lambda source, target: Path(0.0, 100.0, "k"),
    )
    near, far = Task("t", [Input("x", 1000, {"b"})]), Task("t", [Input("x", 1000, {"c"})])
    behind = WorkerSnapshot("a", 1, receiving_s=0.5, inlet_s=3.0)
    assert cost(near, behind, places).transfer_s == 1.5
    assert cost(far, behind, places).transfer_s == 13
    # The task waits for both links at the same time, so the longer wait counts. The time that the
    # holder needs to send stays the same.
    later = WorkerSnapshot("a", 1, receiving_s=4.0, inlet_s=3.0)
    assert cost(far, later, places).transfer_s == 14
    assert cost(far, later, places).sending_s == 10
    # The holder's link out counts in the same way. An input on the same host does not use it.
    sent = [Task("t", [Input("x", 1000, one, outlet_s=5.0)]) for one in ({"b"}, {"c"})]
    assert [cost(one, behind, places).transfer_s for one in sent] == [1.5, 15]
    # An input that is already arriving does not use the link again.
    both = Task("t", [Input("x", 1000, {"c"}, {"a": 2.0}, 5.0), Input("y", 1000, {"b"})])
    assert cost(both, behind, places).transfer_s == 1.5
