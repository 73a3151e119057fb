"""The report and the progress line of a run show all work of its clusters, and only that."""

from __future__ import annotations

import asyncio
import io
import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from distributed import Client

import dask_gpurt
from dask_gpurt.command import observe, run_report
from dask_gpurt.command.observe import ClusterRecord, CounterSnapshot, Recorder
from dask_gpurt.command.progress import Progress
from dask_gpurt.metrics import MEANING
from dask_gpurt.plugins import activation
from dask_gpurt.plugins.activation import read_status
from dask_gpurt.plugins.scheduler import gpurt_scheduler
from dask_gpurt.tracing import advice
from tests.conftest import Sides


def status(sent: int, *workers: str, **more: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"active": True, "reason": None, "runs": {"gpurt": 0, "stock": 0}}
    said = {"totals": {"sent_nbytes": sent, "shuffles_gpurt": 3}, "fallbacks": []}
    return {**found, **said, "workers": dict.fromkeys(workers), "ready": [*workers], **more}


def test_departed_workers_still_count() -> None:
    record = ClusterRecord("tcp://s")
    record.absorb(status(12, "a", "b"))
    record.absorb(status(14, "b"))
    # One reading arrived before an earlier one, and one worker did not answer.
    late = status(13, "b")
    late["workers"]["c"] = None
    record.absorb(late)
    assert record.workers == {"a", "b"}
    assert record.totals == {"sent_nbytes": 14}


def test_threads_of_departed_workers_do_not_count() -> None:
    record = ClusterRecord("tcp://s")
    figures = {"spent": {}, "shuffles": []}
    load = {"load": {"threads": 2, "cores": 4, "task_s": 1.0}}
    record.absorb({**status(1), **figures, "workers": {"tcp://a:1": load, "tcp://a:2": load}})
    record.absorb({**status(1), **figures, "workers": {"tcp://a:3": load}})
    found = observe.summed([(record, ClusterRecord("tcp://s"))])
    assert len(found.loads) == 3
    assert found.n_threads == 4


def test_the_peak_of_earlier_work_is_not_that_of_a_program() -> None:
    def read(*peaks_nbytes: int) -> ClusterRecord:
        addresses = [f"tcp://a:{number}" for number in range(len(peaks_nbytes))]
        load = {"threads": 1, "cores": 4, "task_s": 1.0}
        workers = {address: {"load": load} for address in addresses}
        record = ClusterRecord("tcp://s", peaks=dict(zip(addresses, peaks_nbytes, strict=True)))
        record.absorb({**status(1), "spent": {}, "shuffles": [], "workers": workers})
        return record

    def most_nbytes(before: ClusterRecord, after: ClusterRecord) -> int | None:
        loads = observe.summed([(after, before)]).loads
        return run_report.most_memory_nbytes({"workers": loads})

    assert most_nbytes(read(10, 20), read(30, 40)) == 40
    assert most_nbytes(read(), read(30, 20)) == 30
    # The second worker may have taken up to 20 bytes, or fewer.
    assert most_nbytes(read(10, 20), read(11, 20)) is None
    assert most_nbytes(read(), read()) is None


def test_counters_of_an_earlier_activation_still_count() -> None:
    record = ClusterRecord("tcp://s")
    for name, n in (("one", 1), ("one", 2), ("two", 1), ("one", 1)):
        record.absorb(status(10 * n, activation=name, runs={"gpurt": n, "stock": 0}))
    assert record.runs == {"gpurt": 3}
    assert record.totals == {"sent_nbytes": 30}


def snapshot(**more: Any) -> CounterSnapshot:
    values: dict[str, Any] = {
        "totals": dict.fromkeys(MEANING, 0),
        "runs": {"gpurt": 0, "stock": 0},
        "fallbacks": [],
        "clusters": [{"scheduler": "tcp://s", "active": True, "reason": None, "workers": 2}],
        "not_ready": {},
        "tasks_done": 0,
        "tasks_total": 0,
    }
    return CounterSnapshot(**{**values, **more})


def test_silent_worker_does_not_hide_reports_of_others() -> None:
    """A reading waits until the scheduler stops waiting for the silent worker."""
    assert observe.READ_TIMEOUT_S > gpurt_scheduler.ANSWER_DEADLINE_S + 1


@pytest.mark.cluster
def test_only_work_after_the_start_is_counted(sides: Sides) -> None:
    """Work that a cluster did before the recorder met it is not counted."""
    import dask

    before = dask_gpurt.status(sides.enabled)
    seen = threading.Event()
    recorder = Recorder(seen.set, with_tasks=True)

    async def watch(client: Client) -> None:
        await recorder.begin(client)

    sides.enabled.sync(watch, sides.enabled)
    assert seen.is_set()
    assert set(recorder.snapshot().totals.values()) == {0}
    frame = dask.datasets.timeseries(end="2000-01-04", freq="1h")
    # The scheduler forgets tasks when the last future for them is released.
    future = sides.enabled.compute(frame.shuffle("id", shuffle_method="p2p"))
    future.result()
    recorder.finish()
    now = recorder.snapshot()
    after = dask_gpurt.status(sides.enabled)
    for name in MEANING:
        assert now.totals[name] == after["totals"][name] - before["totals"][name]
    assert now.runs["gpurt"] == 1
    assert now.tasks_total >= now.tasks_done > 0
    sides.enabled.sync(recorder.end, sides.enabled)


@pytest.mark.cluster
def test_readings_between_leave_the_workers_alone(sides: Sides) -> None:
    """The scheduler counts from heartbeats, and says when a reading costs it much."""
    recorder = Recorder(lambda: None, with_tasks=False)
    client = sides.enabled
    client.sync(recorder.begin, client)

    async def poll(client: Client) -> tuple[float, dict[str, Any]]:
        rest_s = await recorder.read(client, ask_workers=False)
        return rest_s, await read_status(client, ask_workers=False)

    rest_s, found = client.sync(poll, client)
    assert observe.INTERVAL_S <= rest_s <= observe.MAX_INTERVAL_S
    assert set(found["workers"].values()) == {None}
    assert found["rest_s"] > 0
    assert recorder.snapshot().clusters[0]["workers"] == len(found["ready"]) > 1
    client.sync(recorder.end, client)


@pytest.mark.parametrize(("asked_s", "rest_s"), [(0.0, 0.5), (7.0, 7.0), (1e6, 30.0)])
def test_a_busy_scheduler_is_read_less_often(
    monkeypatch: pytest.MonkeyPatch, asked_s: float, rest_s: float
) -> None:
    async def answer(client: Any, *, ask_workers: bool) -> dict[str, Any]:
        assert not ask_workers
        return {**status(1, "a"), "rest_s": asked_s}

    monkeypatch.setattr(activation, "read_status", answer)
    recorder = Recorder(lambda: None, with_tasks=False)
    recorder._records["tcp://s"] = ClusterRecord("tcp://s")
    client: Any = SimpleNamespace(scheduler=SimpleNamespace(address="tcp://s"))
    assert asyncio.run(recorder.read(client, ask_workers=False)) == rest_s


@pytest.mark.cluster
def test_forked_process_does_not_ask_inherited_clients(sides: Sides) -> None:
    """Event loops of inherited clients have no threads in the child, so a call would hang."""
    recorder = Recorder(lambda: None, with_tasks=False)
    sides.enabled.sync(recorder.begin, sides.enabled)
    assert recorder.clients_of(sides.enabled.cluster) == [sides.enabled]
    recorder.forget()
    assert recorder.clients_of(sides.enabled.cluster) == []
    sides.enabled.sync(recorder.end, sides.enabled)


def test_failing_client_is_ignored() -> None:
    class Broken:
        scheduler = None

    recorder = Recorder(lambda: None, with_tasks=True)
    before = recorder.snapshot()
    asyncio.run(recorder.read(Broken()))  # type: ignore[arg-type]
    assert recorder.snapshot() == before


def test_report_names_everything_once(tmp_path: Path) -> None:
    fallbacks = [
        {"what": "shuffle of cudf", "why": "there is no adapter for it", "count": 2},
        {"what": "shuffle of pandas", "why": "worker x: pip install", "count": 1},
    ]
    clusters = [{"scheduler": "tcp://s", "active": False, "reason": "too old", "workers": 0}]
    one = snapshot(fallbacks=fallbacks, clusters=clusters, not_ready={"x": "worker x: pip install"})
    found = run_report.as_dict(one, 1.25, 3, ["a note"])
    text = run_report.as_text(found)
    for part in ("1.2 s", "2 times", "no adapter", "once", "tcp://s: too old", "a note"):
        assert part in text
    assert text.count("pip install") == 1
    run_report.write(found, tmp_path / "r.json")
    assert '"exit_code": 3' in (tmp_path / "r.json").read_text()
    assert "nothing ran" in run_report.as_text(run_report.as_dict(snapshot(clusters=[]), 0, 0, []))


@pytest.mark.parametrize(("n_stock", "shown"), [(0, "  0 B\n"), (1, "  0 B by dask_gpurt\n")])
def test_bytes_of_stock_shuffles_are_not_said_to_be_none(n_stock: int, shown: str) -> None:
    found = run_report.as_dict(snapshot(runs={"gpurt": 0, "stock": n_stock}), 1.0, 0, [])
    moved, stayed, spilled = run_report.as_text(found).splitlines(keepends=True)[1:4]
    assert moved.endswith(shown) and stayed.endswith(shown)
    # Dask's own metrics have what stock Dask writes, too.
    assert spilled.endswith("  0 B\n")


def test_spilled_bytes_are_those_of_values_and_shards() -> None:
    found = run_report.as_dict(snapshot(spent={"written_nbytes": 3 << 20}), 1.0, 0, [])
    assert "  spilled to disk        3.00 MiB\n" in run_report.as_text(found)
    assert found["spilled_nbytes"] == 3 << 20


@pytest.mark.parametrize("why", ["pip install x", "no adapter", "no word from worker"])
def test_advice_depends_on_the_reason(why: str) -> None:
    assert advice.of_fallback(why) != advice.of_fallback("something else")


class Terminal(io.StringIO):
    """A terminal that sets an event when something was drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn = threading.Event()

    def write(self, text: str) -> int:
        if "tasks" in text:
            self.drawn.set()
        return super().write(text)


@pytest.mark.parametrize("columns", ["200", "30"])
def test_progress_is_drawn_and_wiped(monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    totals = {**dict.fromkeys(MEANING, 0), "sent_nbytes": 3 << 20}
    spent = {"written_nbytes": 1 << 20}
    terminal = Terminal()
    progress = Progress(
        lambda: snapshot(tasks_done=3, tasks_total=8, totals=totals, spent=spent), terminal
    )
    progress.start()
    assert terminal.drawn.wait(120)
    progress.stop()
    text = terminal.getvalue()
    parts = re.search(r"3/8 tasks, 3.00 MiB moved(, 1.00 MiB spilled, \d+\.\d\d \ws)?", text)
    assert parts is not None
    assert bool(parts[1]) == (columns == "200")
    assert text.endswith("\r\x1b[2K")
    assert "\n" not in text


def test_progress_shows_nothing_while_idle() -> None:
    terminal = io.StringIO()
    asked = threading.Event()

    def idle() -> CounterSnapshot:
        asked.set()
        return snapshot(tasks_done=4, tasks_total=4)

    progress = Progress(idle, terminal)
    progress.start()
    assert asked.wait(120)
    progress.stop()
    assert terminal.getvalue() == ""


def test_progress_survives_a_closed_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[object] = []
    monkeypatch.setattr(threading, "excepthook", failures.append)
    terminal = Terminal()
    terminal.close()
    asked = threading.Event()

    def busy() -> CounterSnapshot:
        asked.set()
        return snapshot(tasks_done=1, tasks_total=2)

    progress = Progress(busy, terminal)
    progress.start()
    assert asked.wait(120)
    progress.stop()
    assert failures == []
