"""On a live cluster, `dask gpurt doctor` and `status` report its state and its problems."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import dask_gpurt
from dask_gpurt.command import connect
from dask_gpurt.command.doctor import _links, cluster_findings
from dask_gpurt.command.observe import scheduler_address
from dask_gpurt.command.status import show
from tests.command.conftest import Shell
from tests.command.findings import found
from tests.conftest import Sides
from tests.integration.comparing import collection, partitions

# ------------------------------------------------------------------ a live cluster


@pytest.mark.cluster
def test_status_shows_an_enabled_cluster(
    sides: Sides, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address = scheduler_address(sides.enabled)
    file = tmp_path / "scheduler.json"
    file.write_text(json.dumps({"address": address}))
    assert show(None, file, as_json=True) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["active"]
    assert len(printed["workers"]) == 3
    assert printed["totals"].keys() >= {"sent_nbytes"}
    assert show(address, None, as_json=False) == 0
    text = capsys.readouterr().out
    assert "shuffle bytes sent to other workers" in text
    assert all(worker in text for worker in printed["workers"])


@pytest.mark.cluster
def test_values_without_a_json_form_become_null(
    sides: Sides, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {"rates": [float("inf"), (1.5, float("nan"))], "n": 1, "active": False, "why": None}
    monkeypatch.setattr("dask_gpurt.command.status.ask", lambda client: found)
    show(scheduler_address(sides.enabled), None, as_json=True)
    printed = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert printed.pop("verdict") == {"bottlenecks": [], "text": []}
    assert printed == {**found, "rates": [None, [1.5, None]]}


@pytest.mark.cluster
def test_status_shows_each_shuffle_and_hot_partitions(
    sides: Sides, capsys: pytest.CaptureFixture[str]
) -> None:
    hot = pd.DataFrame({"key": [7] * 900 + list(range(100)), "x": 1.0})
    partitions(sides.enabled, collection([hot] * 4).shuffle("key", npartitions=6))
    last = dask_gpurt.status(sides.enabled)["shuffles"][-1]
    assert last["rows"] == 4000
    assert last["skew"] > 2
    (fullest, rows), *_ = last["fullest"]
    assert rows >= 3600
    assert all(seconds >= 0 for seconds in last["seconds"].values())
    assert last["seconds"]["partition"] > 0
    assert show(scheduler_address(sides.enabled), None, as_json=False) == 0
    text = capsys.readouterr().out
    assert f"the fullest output partitions are {fullest} ({rows:,} rows)" in text
    assert "4,000" in text


@pytest.mark.cluster
def test_doctor_reports_an_enabled_cluster(shell: Shell, sides: Sides) -> None:
    outcome = shell.gpurt("doctor", "--json", "--scheduler", scheduler_address(sides.enabled))
    assert outcome.code == 0, outcome.out
    assert outcome.err == ""
    assert found(outcome, "runtime")[0]["level"] == "ok"
    assert len(found(outcome, "worker")) == 3
    assert found(outcome, "versions")[0]["level"] == "ok"
    memory = found(outcome, "memory")
    assert len(memory) == 3
    workers = dask_gpurt.status(sides.enabled)["workers"]
    for one, (address, worker) in zip(memory, sorted(workers.items()), strict=True):
        disk = worker["memory"]["disk"]
        assert one["text"].startswith(f"{address}: managed; values that do not fit spill to ")
        assert disk["directory"] in one["text"]
        assert ("past the page cache" in one["text"]) == disk["is_direct"]


@pytest.mark.cluster
@pytest.mark.parametrize("command", ["doctor", "status"])
def test_status_and_doctor_do_not_enable_the_runtime(
    shell: Shell, sides: Sides, command: str
) -> None:
    address = scheduler_address(sides.stock)
    env = {"DASK_GPURT__ENABLED": "true"}
    outcome = shell.gpurt(command, "--scheduler", address, env=env)
    assert (outcome.code, outcome.err) == (0, "")
    assert "off: not switched on for this cluster" in outcome.out
    assert not dask_gpurt.status(sides.stock)["active"]


@pytest.mark.cluster
def test_status_names_workers_of_a_disabled_cluster(
    sides: Sides, capsys: pytest.CaptureFixture[str]
) -> None:
    assert show(scheduler_address(sides.stock), None, as_json=False) == 0
    lines = capsys.readouterr().out.splitlines()
    workers = sorted(sides.stock.scheduler_info(n_workers=-1)["workers"])
    first = lines.index(f"workers: {len(workers)}") + 1
    assert [line.split(maxsplit=1) for line in lines[first : first + len(workers)]] == [
        [worker, "not active"] for worker in workers
    ]


@pytest.mark.cluster
def test_address_of_a_worker_is_refused_as_a_scheduler(
    sides: Sides, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = next(iter(dask_gpurt.status(sides.enabled)["workers"]))
    with pytest.raises(connect.ConnectError, match="that is a Worker"):
        show(worker, None, as_json=True)


async def _say_no_versions(dask_worker: Any) -> None:
    """Make a worker delay its answer about versions until `_say_versions`."""
    dask_worker.told_to_go_on = asyncio.Event()
    versions = dask_worker.handlers["versions"]

    async def wait(**message: Any) -> Any:
        await dask_worker.told_to_go_on.wait()
        return versions(**message)

    dask_worker.handlers["versions"] = wait


async def _say_versions(dask_worker: Any) -> None:
    dask_worker.handlers["versions"] = dask_worker.versions
    dask_worker.told_to_go_on.set()


@pytest.mark.cluster
def test_versions_come_from_all_workers_that_answer_in_time(
    sides: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runtime is off on this cluster, so no report names the silent workers."""
    with connect.connected(scheduler_address(sides.stock)) as client:
        in_time = connect.ask(client, versions=True)
        one = [next(iter(in_time["versions"]["workers"]))]
        monkeypatch.setattr(connect, "VERSIONS_TIMEOUT_S", 0.01)
        sides.stock.run(_say_no_versions, workers=one)
        try:
            late = connect.ask(client, versions=True)
        finally:
            sides.stock.run(_say_versions, workers=one)
    assert set(in_time["versions"]["workers"]) == set(sides.stock.scheduler_info()["workers"])
    assert late["versions"]["workers"] is None
    problems = [one.text for one in cluster_findings(late) if one.level == "problem"]
    assert problems == ["not all workers reported their versions in time"]


@pytest.mark.parametrize(
    ("why", "remedy"),
    [
        ("it runs in another container, or on another host", "several workers in one container"),
        ("no files in memory here (Operation not permitted)", "seccomp"),
        ("its memory is not visible here (Permission denied)", "as one user"),
    ],
)
def test_memory_that_is_not_shared_has_a_remedy(why: str, remedy: str) -> None:
    paths = [{"path": "comm", "why_not": {"shared": why}, "peers": 1}]
    (_, note) = _links({"workers": {"tcp://a": {"paths": paths}}})
    assert note.text == f"1 of them not in shared memory: {why}"
    assert remedy in note.remedy


def test_a_gpu_that_ucx_does_not_reach_is_named() -> None:
    paths = [{"path": "ucx", "why_not": {"device": "UCX without CUDA"}, "peers": 1}]
    (_, note) = _links({"workers": {"tcp://a": {"paths": paths}}})
    assert note.text == "1 of them not from device to device: UCX without CUDA"


def test_every_problem_of_a_cluster_has_a_remedy() -> None:
    side = {"host": {"python": "3.11.7.final.0"}, "packages": {"dask": "1", "pandas": "3"}}
    other = {"host": {"python": "3.12.1.final.0"}, "packages": {"dask": "1", "pandas": "2"}}
    problem = "worker tcp://b: dask-gpurt cannot be imported there; run `pip install dask-gpurt`"
    why = "there is no adapter for this kind of data"
    paths = [
        {"path": "shared", "why_not": {}, "peers": 1},
        {"path": "comm", "why_not": {"shared": "far", "ucx": "without ucxx"}, "peers": 2},
        {"path": "comm", "why_not": {"shared": "far", "ucx": "encrypted"}, "peers": 1},
    ]
    told = cluster_findings(
        {
            "scheduler": "tcp://s",
            "active": True,
            "version": "0.0.1",
            "host": "h",
            "workers": {
                "tcp://a": None,
                "tcp://b": None,
                "tcp://c": {
                    "version": "0.0.1",
                    "paths": paths,
                    "memory": None,
                    "unmanaged": "it",
                    "open_files": 1 << 16,
                },
            },
            "not_ready": {"tcp://b": problem},
            "fallbacks": [{"what": "shuffle of cudf", "why": why, "count": 2}],
            "versions": {"client": side, "scheduler": side, "workers": {"tcp://b": other}},
        }
    )
    levels = [(one.level, one.what) for one in told if one.level != "ok"]
    assert levels == [
        ("problem", "versions"),
        ("note", "versions"),
        ("note", "versions"),
        ("note", "worker"),
        ("problem", "worker"),
        ("note", "memory"),
        ("note", "links"),
        ("note", "links"),
        ("note", "links"),
        ("note", "fallback"),
    ]
    without = ("links", "memory")
    assert all(one.remedy for one in told if one.level != "ok" and one.what not in without)
    said = [(one.text, one.remedy) for one in told if one.what == "links"]
    assert [text for text, _ in said] == [
        "1 pair of workers exchange in shared memory",
        "3 pairs of workers exchange through Dask's own connections",
        "3 of them not in shared memory: far",
        "2 of them not over UCX: without ucxx",
        "1 of them not over UCX: encrypted",
    ]
    assert [bool(remedy) for _, remedy in said] == [False, False, False, True, False]


def test_doctor_lists_available_transports_before_a_shuffle() -> None:
    report: dict[str, Any] = {"memory": None, "unmanaged": "it"}
    lacks = {"shared": "no files in memory", "ucx": "without ucxx"}
    assert said_of(report, "links") == [
        ("ok", f"all workers can exchange {way}; pairs connect on first use", "")
        for way in ("in shared memory", "over UCX")
    ]
    (level, text, remedy), *rest = said_of({**report, "lacks": lacks}, "links")
    assert (level, remedy) == ("note", "")
    assert text == "1 of 1 workers cannot exchange in shared memory: no files in memory"
    ((level, text, remedy),) = rest
    assert (level, text) == ("note", "1 of 1 workers cannot exchange over UCX: without ucxx")
    assert "install the ucx extra" in remedy


@pytest.mark.parametrize(("n_files", "n_notes"), [(16, 0), (15, 1)])
def test_too_few_open_files_are_reported(n_files: int, n_notes: int) -> None:
    report = {"memory": None, "unmanaged": "it", "open_files": n_files}
    said = said_of(report, "open files", n_workers=2)
    assert len(said) == n_notes
    for level, text, remedy in said:
        assert (level, "15 files" in text, "ulimit -Hn 16" in remedy) == ("note", True, True)


def said_of(report: dict[str, Any], what: str, n_workers: int = 1) -> list[tuple[str, str, str]]:
    empty = {"version": "0.0.1", "paths": [], "lacks": {}, "open_files": 1 << 16}
    told = cluster_findings(
        {
            "scheduler": "tcp://s",
            "active": True,
            "workers": {f"tcp://{name}": {**empty, **report} for name in "abc"[:n_workers]},
            "not_ready": {},
            "fallbacks": [],
            "versions": {"client": {}, "scheduler": {}, "workers": {}},
        }
        | {"version": dask_gpurt.__version__, "host": "h"}
    )
    return [(one.level, one.text, one.remedy) for one in told if one.what == what]


def memory_of(report: dict[str, Any]) -> tuple[str, str, str]:
    (one,) = said_of(report, "memory")
    return one


@pytest.mark.parametrize(
    ("why", "remedy"),
    [
        ("gpurt.memory.enabled is false", "gpurt.memory.enabled"),
        ("the worker has no memory limit, or distributed...spill is off", "--memory-limit"),
        ("the worker has dask-cuda's store, and ...", "replace-dask-cuda"),
        ("the worker has a store of its own kind (builtins.dict)", "`data=`"),
    ],
)
def test_worker_with_dasks_store_says_why(why: str, remedy: str) -> None:
    level, text, advice = memory_of({"memory": None, "unmanaged": why})
    assert (level, text) == ("note", f"tcp://a: Dask's own store, because {why}")
    assert remedy in advice


@pytest.mark.parametrize(
    ("disk", "level", "said"),
    [
        ({"is_direct": True, "problem": None}, "ok", "spill to /x, past the page cache"),
        ({"is_direct": False, "problem": None}, "note", "spill to /x, through the page cache"),
        ({"is_direct": None, "problem": "Read-only file system"}, "problem", "Read-only"),
    ],
)
def test_doctor_says_where_a_worker_spills(disk: dict[str, Any], level: str, said: str) -> None:
    memory = {"disk": {"directory": "/x", **disk}}
    found_level, text, advice = memory_of({"memory": memory, "unmanaged": None})
    assert found_level == level
    assert said in text
    assert bool(advice) == (level != "ok")


@pytest.mark.parametrize(
    ("device", "level", "said"),
    [
        ({}, "ok", "tcp://a: H200, managed; values are evicted for rmm and cupy"),
        ({"evicts_for": []}, "ok", "values are evicted for no failed allocation"),
        ({"name": None}, "ok", "tcp://a: not used yet"),
        ({"cudf_spills": True}, "note", "cuDF spills its own values: the store counts them"),
        ({"problem": "no driver"}, "note", "Dask manages the values on the GPU: no driver"),
    ],
)
def test_doctor_says_how_gpu_values_are_managed(
    device: dict[str, Any], level: str, said: str
) -> None:
    usual = {"name": "H200", "evicts_for": ["rmm", "cupy"], "cudf_spills": False, "problem": None}
    disk = {"directory": "/x", "is_direct": True, "problem": None}
    memory = {"disk": disk, "device": usual | device}
    (one,) = said_of({"memory": memory, "unmanaged": None}, "gpu")
    assert one[0] == level
    assert said in one[1]
    assert ("cudf" in one[2]) == ("cudf_spills" in device)


def test_doctor_is_silent_about_an_impossible_gpu() -> None:
    disk = {"directory": "/x", "is_direct": True, "problem": None}
    assert said_of({"memory": {"disk": disk, "device": None}, "unmanaged": None}, "gpu") == []
    assert said_of({"memory": None, "unmanaged": "it"}, "gpu") == []
