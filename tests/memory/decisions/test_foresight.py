"""Next uses of values are predicted from the states of tasks."""

from __future__ import annotations

import heapq

import pytest

from dask_gpurt.memory.decisions import foresight
from dask_gpurt.memory.decisions.foresight import Outlook, Pace, assigned_use


class Graph:
    """Tasks by name, with a number as priority and the tasks that they wait for.

    Parameters
    ----------
    here, at_peer
        Tasks that this worker and its peer were assigned, in order.
    """

    def __init__(
        self, held_back: str = "", here: str = "", at_peer: str = "", **tasks: tuple[int, str]
    ) -> None:
        self.tasks = {name: (number, waits.split()) for name, (number, waits) in tasks.items()}
        self.asked: list[str] = []
        self.outlook = Outlook(
            self.priority,
            self.waits_for,
            held_back.split().__contains__,
            {task: turn for turn, task in enumerate(at_peer.split())}.get,
            [self.priority(task) for task in here.split()],
        )

    def priority(self, task: str) -> tuple[int, ...]:
        return (0, self.tasks[task][0])

    def waits_for(self, task: str) -> list[str]:
        self.asked.append(task)
        return self.tasks[task][1]

    def order(self, names: str) -> str:
        return " ".join(sorted(names.split(), key=self.outlook.use))


def test_tasks_that_can_run_go_by_priority():
    assert Graph(a=(3, ""), b=(1, ""), c=(2, "b")).order("a b c") == "b c a"


def test_task_comes_after_a_queued_root_that_it_needs():
    graph = Graph("root", root=(1, ""), early=(2, "middle"), middle=(1, "root"), queued=(99, ""))
    assert graph.order("early queued root") == "queued root early"


def test_tasks_rank_by_their_last_queued_root():
    graph = Graph("r1 r5", r1=(1, ""), r5=(5, ""), both=(2, "r1 r5"), first=(9, "r1"))
    assert graph.order("both first") == "first both"


def test_priority_decides_between_tasks_with_the_same_wait():
    graph = Graph("root", root=(1, ""), late=(8, "root"), early=(7, "root"))
    assert graph.order("late early") == "early late"


def test_a_task_is_not_before_its_inputs_whatever_its_priority():
    graph = Graph(layer_1=(40, ""), layer_2=(0, "layer_1"), between=(20, ""))
    assert graph.order("layer_2 between layer_1") == "between layer_1 layer_2"


def test_task_waiting_for_a_peer_comes_after_as_many_own_tasks():
    graph = Graph(
        here="h11 h12 h13",
        at_peer="p1 p2 p3",
        **{f"h{n}": (n, "") for n in (11, 12, 13)},
        **{f"p{n}": (n, "") for n in (1, 2, 3)},
        first=(4, "p1"),
        second=(4, "p2"),
    )
    assert graph.order("second h13 h12 first h11") == "h11 first h12 second h13"


def test_peer_that_is_ahead_makes_no_use_sooner():
    graph = Graph(
        here="h1 h2", at_peer="p8", h1=(1, ""), h2=(2, ""), p8=(8, ""), between=(5, ""), t=(0, "p8")
    )
    assert graph.order("t between h1") == "h1 between t"


def test_task_waiting_for_a_busier_peer_comes_after_own_tasks():
    graph = Graph(
        here="h9", at_peer="p1 p2 p3", h9=(9, ""), p1=(1, ""), p2=(2, ""), p3=(3, ""), t=(4, "p3")
    )
    assert graph.order("t h9") == "h9 t"


def test_worker_without_a_queue_ranks_by_priority():
    graph = Graph(at_peer="p1", p1=(1, ""), t=(3, "p1"), before=(2, ""), after=(4, ""))
    assert graph.order("after t before") == "before t after"


def test_peer_fetches_inputs_when_it_is_assigned_a_task():
    """It does not wait until it runs the task."""
    graph = Graph(
        here="h8 h9", at_peer="p1 p2", h8=(8, ""), h9=(9, ""), p1=(1, ""), p2=(2, ""), t=(3, "p2")
    )
    assert graph.order("t h8 p2") == "p2 h8 t"


def test_the_next_use_is_the_soonest_of_the_dependents():
    graph = Graph("root", root=(1, ""), blocked=(2, "root"), runs=(7, ""))
    assert graph.outlook.next_use(["blocked", "runs"]) == graph.outlook.use("runs")
    assert graph.outlook.next_use([]) is None


def test_uses_known_to_the_worker_and_scheduler_compare():
    graph = Graph("root", root=(1, ""), blocked=(2, "root"), before=(4, ""), after=(6, ""))
    uses = [graph.outlook.use("before"), assigned_use((0, 5, -3)), graph.outlook.use("after")]
    assert uses == sorted(uses)
    assert assigned_use((0, 99, -3)) < graph.outlook.use("blocked")


def test_task_with_many_dependents_is_visited_once():
    graph = Graph(root=(0, ""), **{f"t{n}": (n, "root") for n in range(1, 50)})
    graph.outlook.next_use(name for name in graph.tasks if name != "root")
    assert graph.asked.count("root") == 1


def test_deep_graphs_do_not_overflow_the_stack():
    chain = {f"t{n}": (n, f"t{n - 1}" if n else "") for n in range(3_000)}
    graph = Graph("t0", **chain)
    assert graph.outlook.use("t2999") > assigned_use((1,))


def test_oversized_question_is_answered_from_known_uses(monkeypatch):
    monkeypatch.setattr(foresight, "_MAX_TASKS", 2)
    graph = Graph("root far", root=(1, ""), far=(2, ""), a=(3, "root"), b=(4, "a"))
    graph.tasks |= {"c": (5, ["far"]), "d": (6, ["b", "c"])}
    # The limit of two tasks lets b and a be followed, but not c. For d, its known inputs count.
    assert graph.outlook.use("b") > assigned_use((99,))
    assert graph.outlook.use("c") == assigned_use((0, 5))
    assert graph.outlook.use("d") > assigned_use((99,))


@pytest.mark.parametrize("waits", ["b", "a"])
def test_the_answer_is_the_same_in_any_order_of_questions(waits):
    graph = Graph("a", a=(1, ""), b=(2, "a"), c=(3, waits))
    assert graph.outlook.use("c") > assigned_use((0, 1000))


def test_answers_take_a_bounded_share_of_the_time():
    pace = Pace(0.1)
    assert pace.rest_s(0.02, 100.0) == pytest.approx(0.2)
    # A client in between waits until the previous one may ask again, plus its own pause.
    assert pace.rest_s(0.01, 100.1) == pytest.approx(0.2)
    # Unused time does not add up.
    assert pace.rest_s(0.01, 200.0) == pytest.approx(0.1)
    pace, due_s, taken_s = Pace(0.1), [0.0] * 50, 0.0
    while due_s[0] < 60.0:
        now_s = heapq.heappop(due_s)
        taken_s += 0.02
        heapq.heappush(due_s, now_s + pace.rest_s(0.02, now_s))
    # After a first round without earlier requests.
    assert 5.0 < taken_s < 0.1 * 60 + 50 * 0.02
