"""When values are used, from the states of tasks."""

from __future__ import annotations

import pytest

from dask_gpurt.memory import foresight
from dask_gpurt.memory.foresight import Outlook, reachable


class Graph:
    """Tasks by name, with a number for a priority and what they wait for."""

    def __init__(self, held_back: str = "", **tasks: tuple[int, str]) -> None:
        self.tasks = {name: (number, waits.split()) for name, (number, waits) in tasks.items()}
        self.asked: list[str] = []
        self.outlook = Outlook(self.priority, self.waits_for, held_back.split().__contains__)

    def priority(self, task: str) -> tuple[int, ...]:
        return (0, self.tasks[task][0])

    def waits_for(self, task: str) -> list[str]:
        self.asked.append(task)
        return self.tasks[task][1]

    def order(self, names: str) -> str:
        return " ".join(sorted(names.split(), key=self.outlook.use))


def test_tasks_that_can_run_go_by_priority():
    assert Graph(a=(3, ""), b=(1, ""), c=(2, "b")).order("a b c") == "b c a"


def test_a_task_comes_after_a_root_that_is_held_back():
    graph = Graph("root", root=(1, ""), early=(2, "middle"), middle=(1, "root"), queued=(99, ""))
    assert graph.order("early queued root") == "queued root early"


def test_tasks_that_need_held_back_roots_go_by_the_last_of_them():
    graph = Graph("r1 r5", r1=(1, ""), r5=(5, ""), both=(2, "r1 r5"), first=(9, "r1"))
    assert graph.order("both first") == "first both"


def test_of_tasks_that_wait_for_the_same_the_priority_decides():
    graph = Graph("root", root=(1, ""), late=(8, "root"), early=(7, "root"))
    assert graph.order("late early") == "early late"


def test_a_task_is_not_before_its_inputs_whatever_its_priority():
    graph = Graph(layer_1=(40, ""), layer_2=(0, "layer_1"), between=(20, ""))
    assert graph.order("layer_2 between layer_1") == "between layer_1 layer_2"


def test_the_next_use_is_the_soonest_of_the_dependents():
    graph = Graph("root", root=(1, ""), blocked=(2, "root"), runs=(7, ""))
    assert graph.outlook.next_use(["blocked", "runs"]) == graph.outlook.use("runs")
    assert graph.outlook.next_use([]) is None


def test_what_a_worker_knows_of_its_own_queue_compares():
    graph = Graph("root", root=(1, ""), blocked=(2, "root"), before=(4, ""), after=(6, ""))
    uses = [graph.outlook.use("before"), reachable((0, 5, -3)), graph.outlook.use("after")]
    assert uses == sorted(uses)
    assert reachable((0, 99, -3)) < graph.outlook.use("blocked")


def test_a_task_is_looked_at_once_however_many_wait_for_it():
    graph = Graph(root=(0, ""), **{f"t{n}": (n, "root") for n in range(1, 50)})
    graph.outlook.next_use(name for name in graph.tasks if name != "root")
    assert graph.asked.count("root") == 1


def test_deep_graphs_do_not_run_out_of_stack():
    chain = {f"t{n}": (n, f"t{n - 1}" if n else "") for n in range(3_000)}
    graph = Graph("t0", **chain)
    assert graph.outlook.use("t2999") > reachable((1,))


def test_a_question_too_large_is_answered_from_what_is_known(monkeypatch):
    monkeypatch.setattr(foresight, "_MAX_TASKS", 2)
    graph = Graph("root far", root=(1, ""), far=(2, ""), a=(3, "root"), b=(4, "a"))
    graph.tasks |= {"c": (5, ["far"]), "d": (6, ["b", "c"])}
    # Two tasks' inputs are followed: b's, and a's. Those of c are not, and of d's the known count.
    assert graph.outlook.use("b") > reachable((99,))
    assert graph.outlook.use("c") == reachable((0, 5))
    assert graph.outlook.use("d") > reachable((99,))


@pytest.mark.parametrize("waits", ["b", "a"])
def test_the_answer_is_the_same_in_any_order_of_questions(waits):
    graph = Graph("a", a=(1, ""), b=(2, "a"), c=(3, waits))
    assert graph.outlook.use("c") > reachable((0, 1000))
