"""The eviction policies move nearly as few bytes as Belady's rule, on traces of real programs.

The table has the bytes that both workers move, divided by those that Belady's rule moves. Memory is
70 / 50 / 30 % of the size that would hold all values:

| trace        | next-use           | no hints           | lru                | largest            |
| ------------ | ------------------ | ------------------ | ------------------ | ------------------ |
| anomaly_held | 1.14 / 1.15 / 1.11 | 1.25 / 1.20 / 1.12 | 2.46 / 1.74 / 1.47 | 2.46 / 1.74 / 1.46 |
| anomaly_made | 1.00 / 1.03 / 1.05 | 1.02 / 1.07 / 1.07 | 1.32 / 1.37 / 1.26 | 1.32 / 1.37 / 1.25 |
| dot          | 1.00 / 1.11 / 1.10 | 0.87 / 0.95 / 1.02 | 1.16 / 1.42 / 1.40 | 1.16 / 1.42 / 1.40 |
| layers       | 1.01 / 1.09 / 1.06 | 0.74 / 1.06 / 1.20 | 0.84 / 1.21 / 1.29 | 0.84 / 1.21 / 1.29 |
| merge        | 0.93 / 1.06 / 1.10 | 0.91 / 1.13 / 1.05 | 0.97 / 1.19 / 1.29 | 2.53 / 3.68 / 3.44 |
| overlap      | 0.68 / 0.98 / 1.06 | 1.69 / 1.77 / 1.68 | 0.90 / 1.18 / 1.43 | 1.65 / 1.72 / 1.68 |
| scan         | 1.02 / 1.03 / 1.01 | 1.02 / 1.03 / 1.01 | 2.73 / 1.82 / 1.35 | 2.73 / 1.82 / 1.35 |
| steps        | 1.00 / 1.00 / 1.00 | 1.00 / 1.00 / 1.00 | 1.00 / 1.00 / 2.29 | 1.00 / 1.00 / 2.29 |
| tree         | 1.03 / 1.08 / 1.08 | 0.70 / 0.91 / 1.18 | 0.81 / 1.13 / 1.35 | 0.81 / 1.13 / 1.35 |

New recordings change the figures by about 0.05, because the order depends on the faster worker.
Figures below 1 are possible: Belady's rule is optimal only for values of one size whose eviction
costs nothing, and here a first eviction is a write. `test_belady_is_near_the_optimum` measures the
distance to the optimum.
"""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest

from dask_gpurt.memory.decisions.eviction_policy import (
    POLICIES,
    EvictionCandidate,
    EvictionPolicy,
    NextUse,
)
from dask_gpurt.memory.decisions.foresight import Outlook
from tests.memory.belady import Belady, Informed, optimum, replay
from tests.memory.traces import FOLDER, Event, Node, Trace, load, names

SHARES = (0.7, 0.5, 0.3)


class Flat(Informed):
    """A policy that assumes that tasks run in the order of Dask's priorities."""

    def look(self) -> Outlook[int]:
        return Outlook(lambda task: self.nodes[task].priority, lambda task: (), lambda task: False)


class InStep(Informed):
    """A policy that assumes that peers have progressed as far as this worker."""

    def look(self) -> Outlook[int]:
        outlook = super().look()
        return Outlook(outlook._priority, outlook._waits_for, outlook._is_unassigned)


def times_belady(name: str, share: float, chooser) -> float:
    """Return bytes moved by all workers of a trace, relative to Belady's rule."""
    ours = best = 0
    for trace in load(name):
        capacity = int(share * trace.peak_nbytes())
        ours += replay(trace, capacity, chooser(trace)).nbytes
        best += replay(trace, capacity, Belady(trace)).nbytes
    return ours / best


def informed(policy: str, **options):
    return lambda trace: Informed(trace, POLICIES[policy], **options)


@pytest.mark.share(4)
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("name", names())
def test_next_use_moves_little_more_than_the_optimum(name, share):
    assert times_belady(name, share, informed("next-use")) <= 1.15


@pytest.mark.share(3)
@pytest.mark.parametrize("share", SHARES)
def test_next_use_moves_much_less_than_lru(share):
    """The average counts, because traces that nearly fit into memory have little to gain."""
    ratios = [
        times_belady(name, share, informed("next-use")) / times_belady(name, share, informed("lru"))
        for name in names()
    ]
    assert sum(ratios) / len(ratios) <= 0.85


def test_scans_of_a_kept_array_read_only_the_excess():
    """Dask moves the whole array on every pass; here the resident part stays."""
    for trace in load("scan"):
        held_nbytes = trace.peak_nbytes()
        moved = replay(trace, held_nbytes // 2, informed("next-use")(trace))
        assert moved.read_nbytes <= 1.1 * 4 * held_nbytes / 2
        # The excess is written, and in each pass one more chunk, whose place the next one takes.
        assert moved.written_nbytes <= 0.7 * held_nbytes


def test_ignoring_queued_roots_moves_far_more_bytes():
    flat = times_belady("merge", 0.3, lambda trace: Flat(trace, POLICIES["next-use"]))
    assert flat >= 1.5 * times_belady("merge", 0.3, informed("next-use"))


def test_ignoring_slower_peers_moves_far_more_bytes():
    in_step = times_belady("merge", 0.3, lambda trace: InStep(trace, POLICIES["next-use"]))
    assert in_step >= 1.05 * times_belady("merge", 0.3, informed("next-use"))


class MostRecent(NextUse):
    """Evicts the most recent value without a known use first, dirty or not."""

    def rank(self, candidate: EvictionCandidate) -> tuple[Any, ...]:
        return super().rank(candidate._replace(made=-candidate.made))


class LeastRecent(NextUse):
    """Evicts the oldest value without a known use first, clean or not."""

    def rank(self, candidate: EvictionCandidate) -> tuple[Any, ...]:
        if not candidate.is_clean:
            return super().rank(candidate)
        return super().rank(candidate._replace(last_used=-candidate.last_used))


def without_hints(name: str, policy: EvictionPolicy) -> float:
    return times_belady(name, 0.5, lambda trace: Informed(trace, policy, hints=False))


def test_oldest_dirty_value_without_a_known_use_has_to_leave():
    """A program that makes new values from old ones uses the new ones next."""
    assert without_hints("steps", MostRecent()) >= 1.9 * without_hints("steps", NextUse())


def test_newest_clean_value_without_a_known_use_has_to_leave():
    """A scan has read these values back. With hints, their uses would be known."""
    ours = without_hints("anomaly_held", NextUse())
    assert without_hints("anomaly_held", LeastRecent()) >= 1.1 * ours


def test_stencil_without_hints_of_the_scheduler_moves_more_bytes():
    blind = times_belady("overlap", 0.5, informed("next-use", hints=False))
    assert blind >= 1.5 * times_belady("overlap", 0.5, informed("next-use"))


@pytest.mark.parametrize("name", names())
def test_traces_are_whole(name):
    for trace in load(name):
        there: set[int] = set()
        for kind, nodes in trace.events:
            for node in nodes:
                if kind == "put":
                    assert trace.nodes[node].nbytes > 0
                    there.add(node)
                elif kind == "release":
                    there.remove(node)
                elif kind in ("run", "send"):
                    used = trace.nodes[node].inputs if kind == "run" else (node,)
                    assert there.issuperset(used)
        assert any(event.kind == "run" for event in trace.events)


def test_traces_stay_small():
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 300_000


# ---------------------------------------------------------------------- the oracle itself


def program(sizes: list[int], uses: list[tuple[int, ...]]) -> Trace:
    """Values that are made before their first use, and never released."""
    nodes = [Node(nbytes, (number,), ()) for number, nbytes in enumerate(sizes)]
    events, made = [], set()
    for inputs in uses:
        for node in inputs:
            if node not in made:
                made.add(node)
                events.append(Event("put", (node,)))
        task = len(nodes)
        nodes.append(Node(0, (task,), inputs))
        events += [Event(kind, (task,)) for kind in ("run", "put", "release")]
    return Trace(nodes, events)


def some_programs(count: int, *, n_values: int, largest: int, n_inputs: int):
    random_ = random.Random(42)
    for _ in range(count):
        sizes = [random_.randint(1, largest) for _ in range(n_values)]
        uses = [
            tuple(sorted(random_.sample(range(n_values), random_.randint(1, n_inputs))))
            for _ in range(12)
        ]
        yield program(sizes, uses)


def test_belady_agrees_with_a_case_worked_by_hand():
    """There is room for two of three values; each new value evicts the one that is used last."""
    trace = program([10, 10, 10], [(0,), (1,), (2,), (0,), (1,), (2,)])
    moved = replay(trace, 20, Belady(trace))
    # Value 2 evicts 1, which is written. When 1 is read back, it evicts 0, which is written, too.
    assert (moved.read_nbytes, moved.written_nbytes) == (10, 20)


def test_clean_value_is_not_written_again():
    trace = program([10, 10], [(0,), (1,)] * 4)
    moved = replay(trace, 10, Belady(trace))
    assert (moved.read_nbytes, moved.written_nbytes) == (60, 20)


def test_copy_for_a_peer_takes_no_room():
    trace = program([10, 10], [(0,), (1,)])
    sent = Trace(trace.nodes, [*trace.events, Event("send", (0,)), Event("send", (0,))])
    assert replay(sent, 10, informed("lru")(sent)).read_nbytes == 20


def test_inputs_of_a_running_task_stay_while_others_come_in():
    trace = program([10, 10], [(0, 1)])
    assert replay(trace, 10, Belady(trace)).read_nbytes == 10


def test_belady_is_the_optimum_where_it_is_known_to_be():
    """Values have one size, are used one at a time, and writes cost nothing."""
    for trace in some_programs(40, n_values=5, largest=1, n_inputs=1):
        for capacity in (2, 3):
            best = optimum(trace, capacity, write_cost=0)
            assert replay(trace, capacity, Belady(trace)).read_nbytes == best


def test_belady_is_near_the_optimum():
    """With different sizes and a cost of writes, Belady's cost is on average within a sixth."""
    ratios = []
    for trace in some_programs(60, n_values=5, largest=4, n_inputs=2):
        best = optimum(trace, 8)
        found = replay(trace, 8, Belady(trace)).nbytes
        assert found >= best
        ratios.append(found / best if best else 1.0)
    assert sum(ratios) / len(ratios) <= 7 / 6


def test_less_memory_never_moves_fewer_bytes_at_the_optimum():
    for trace in some_programs(20, n_values=4, largest=3, n_inputs=2):
        costs = [optimum(trace, capacity) for capacity in (6, 7, 8, 9)]
        assert all(tighter >= wider for tighter, wider in pairwise(costs))
