"""`dask gpurt doctor` and `status`: what they find here, on a live cluster, and nowhere."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import dask_gpurt
from dask_gpurt.cli import gpurt
from dask_gpurt.command import connect, findings
from dask_gpurt.command.doctor import cluster_findings, examine
from dask_gpurt.command.observe import scheduler_address
from dask_gpurt.command.status import show
from tests.command.conftest import Outcome, Shell
from tests.conftest import Sides
from tests.integration.comparing import collection, partitions

CLIENT_PRELOAD = "distributed:\n  client:\n    preload: [json]\n"


def found(outcome: Outcome, what: str) -> list[dict[str, Any]]:
    assert "Traceback" not in outcome.err
    return [one for one in outcome.json["findings"] if one["what"] == what]


def test_nothing_is_wrong(shell: Shell) -> None:
    outcome = shell.gpurt("doctor", "--json")
    assert outcome.code == 0, outcome.out
    assert outcome.err == ""
    (flag,) = found(outcome, "flag")
    assert flag["level"] == "note"
    assert "not set" in flag["text"]
    assert "DASK_GPURT__ENABLED=true" in flag["remedy"]
    for name in ("python", "dask", "distributed", "pandas", "pyarrow", "numpy"):
        assert found(outcome, name)[0]["level"] == "ok"
    for name in ("cudf", "cupy", "rmm", "ucxx", "nvcomp"):
        assert found(outcome, name)[0]["level"] == "ok"
    assert "not yet run on a GPU" in found(outcome, "gpu")[0]["text"]
    assert found(outcome, "huge pages")
    assert found(outcome, "support")[0]["level"] == "ok"
    text = shell.gpurt("doctor").out
    assert text.endswith("no problems\n")
    assert "-> set DASK_GPURT__ENABLED=true" in text


@pytest.mark.parametrize(("value", "level", "state"), [("true", "ok", "on"), ("0", "note", "off")])
def test_flag_by_environment(shell: Shell, value: str, level: str, state: str) -> None:
    (flag,) = found(shell.gpurt("doctor", "--json", env={"DASK_GPURT__ENABLED": value}), "flag")
    assert flag["level"] == level
    assert flag["text"].startswith(f"{state}, by the environment variable DASK_GPURT__ENABLED")


def test_flag_by_file(shell: Shell, user_yaml: Callable[[str], Path]) -> None:
    path = user_yaml("gpurt:\n  enabled: true\n")
    outcome = shell.gpurt("doctor", "--json")
    assert outcome.code == 0
    (flag,) = found(outcome, "flag")
    assert (flag["level"], flag["text"]) == ("ok", f"on, by {path}")


def test_preload_list_replaced_by_file(shell: Shell, user_yaml: Callable[[str], Path]) -> None:
    path = user_yaml(CLIENT_PRELOAD)
    outcome = shell.gpurt("doctor", "--json")
    assert outcome.code == 1
    (preload,) = found(outcome, "preload")
    assert preload["level"] == "problem"
    assert str(path) in preload["text"]
    assert "distributed.client.preload" in preload["text"]
    assert "add dask_gpurt.preload" in preload["remedy"]


def test_preload_list_replaced_by_environment(shell: Shell) -> None:
    name = "DASK_DISTRIBUTED__SCHEDULER__PRELOAD"
    outcome = shell.gpurt("doctor", "--json", env={name: '["json"]'})
    assert outcome.code == 1
    assert name in found(outcome, "preload")[0]["text"]


def test_run_puts_a_replaced_preload_back(shell: Shell) -> None:
    shell.write("show.py", "import dask; print(dask.config.get('distributed.client.preload'))")
    shell.env["DASK_DISTRIBUTED__CLIENT__PRELOAD"] = '["json"]'
    shell.env["DASK_DISTRIBUTED__CLIENT__PRELOAD_ARGV"] = "[[]]"
    names = ["dask_gpurt.preload", "json", "dask_gpurt.command.observe"]
    assert shell.gpurt("run", "show.py").out.strip() == str(names)


def test_a_single_name_is_a_list_of_preloads(shell: Shell) -> None:
    """As Dask takes it; letter by letter, no client could start."""
    shell.write("show.py", "import dask; print(dask.config.get('distributed.client.preload'))")
    shell.env["DASK_DISTRIBUTED__CLIENT__PRELOAD"] = "json"
    names = ["dask_gpurt.preload", "json", "dask_gpurt.command.observe"]
    assert shell.gpurt("run", "show.py").out.strip() == str(names)
    assert found(shell.gpurt("doctor", "--json"), "preload")[0]["level"] == "problem"
    outcome = shell.gpurt("doctor", "--json", env={"DASK_DISTRIBUTED__CLIENT__PRELOAD": "5"})
    assert found(outcome, "preload")[0]["level"] == "problem"


@pytest.mark.parametrize("text", ["gpurt: true\n", "gpurt:\n#  enabled: true\n"])
def test_a_file_without_a_section(
    shell: Shell, user_yaml: Callable[[str], Path], text: str
) -> None:
    user_yaml(text)
    assert found(shell.gpurt("doctor", "--json"), "flag")


def test_unknown_key_and_bad_value(shell: Shell) -> None:
    env = {"DASK_GPURT__SHUFFLE__MEMROY": "0.5", "DASK_GPURT__SHUFFLE__IN_FLIGHT": "many"}
    outcome = shell.gpurt("doctor", "--json", env=env)
    assert (outcome.code, outcome.json["problems"], outcome.err) == (1, 2, "")
    value, key = found(outcome, "settings")
    assert "gpurt.shuffle.in-flight is 'many'" in value["text"]
    assert "gpurt.shuffle.memroy" in key["text"]
    assert key["remedy"] == "did you mean gpurt.shuffle.memory?"


def test_a_description_that_cannot_be_used(shell: Shell) -> None:
    path = shell.write("machines.yaml", "hosts:\n- {name: a}\n")
    env = {"DASK_GPURT__TOPOLOGY__FILE": str(path)}
    outcome = shell.gpurt("doctor", "--json", env=env)
    assert (outcome.code, outcome.err) == (1, "")
    (value,) = found(outcome, "settings")
    assert (value["level"], value["text"][: len(str(path)) + 8]) == ("problem", f"{path}, line 2")
    shell.write("machines.yaml", "hosts:\n- {name: a, numa: [{name: n}]}\n")
    assert found(shell.gpurt("doctor", "--json", env=env), "settings")[0]["level"] == "ok"


def test_unsupported_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    from dask_gpurt.plugins.patches import p2p

    monkeypatch.setattr(p2p, "unsupported_reason", lambda: "distributed 1 is too old")
    finding = findings.support()
    assert finding.level == "problem"
    assert "pip install" in finding.remedy


@pytest.mark.parametrize("policy", ["never", "unknown"])
def test_no_huge_pages(monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    from dask_gpurt.devices.host_memory import pages

    monkeypatch.setattr(pages, "system_policy", lambda: policy)
    assert findings.huge_pages().level == "note"


# ------------------------------------------------------------------ no cluster


@pytest.mark.parametrize(
    "args",
    [
        ("status",),
        ("status", "--scheduler", "a:b:c"),
        ("status", "--scheduler", "no://a:1"),
        ("status", "--scheduler", "tcp://127.0.0.1:1"),
        ("status", "--scheduler-file", "no.json"),
        ("status", "--scheduler-file", "empty.json"),
        ("status", "--scheduler", "a", "--scheduler-file", "empty.json"),
        ("doctor", "--scheduler", "a:b:c"),
        ("doctor", "--scheduler-file", "no.json"),
    ],
)
def test_no_such_scheduler(
    shell: Shell,
    args: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(connect, "CONNECT_TIMEOUT_S", 0.3)
    monkeypatch.chdir(shell.directory)
    shell.write("empty.json", "{}")
    with pytest.raises(SystemExit) as exit:
        gpurt.main(list(args))
    printed = capsys.readouterr()
    assert exit.value.code == 2
    assert printed.err.startswith(f"dask gpurt {args[0]}: ")
    assert len(printed.err.splitlines()) == 1


@pytest.mark.parametrize("command", ["status", "doctor"])
def test_nothing_comes_after_the_line(shell: Shell, command: str) -> None:
    """A client that never connected may complain once more when the interpreter ends."""
    outcome = shell.gpurt(command, "--scheduler", "a:b:c")
    assert outcome.code == 2
    assert len(outcome.err.splitlines()) == 1
    assert "Traceback" not in outcome.out


@pytest.mark.parametrize("option", ["--bad", "--scheduler"])
@pytest.mark.parametrize("command", ["status", "doctor"])
def test_wrong_option(command: str, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        gpurt.main([command, option])
    assert exit.value.code == 2
    assert option in capsys.readouterr().err


def test_scheduler_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(connect, "CONNECT_TIMEOUT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        assert examine(address, None, as_json=False) == 2
    printed = capsys.readouterr()
    problem = f"no scheduler answers at {address}: it sends nothing for 0.3 s"
    assert printed.err.startswith(f"dask gpurt doctor: {problem}; check the port")
    assert len(printed.err.splitlines()) == 1
    # What was found here is said all the same.
    assert "pandas" in printed.out
    assert "-> check the port" in printed.out


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.parametrize("command", ["doctor", "status", "topology"])
def test_where_nobody_listens(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """At once, though distributed would try again and again, until its time is up."""
    with pytest.MonkeyPatch.context() as patch:
        # Nobody waits for it.
        patch.setattr(connect, "CONNECT_TIMEOUT_S", 3600.0)
        with pytest.raises(SystemExit) as exit:
            gpurt.main([command, "--scheduler", f"127.0.0.1:{closed_port()}"])
    assert exit.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"dask gpurt {command}: no scheduler answers at 127.0.0.1:")
    assert "nothing listens on that port; start the scheduler" in said


def test_a_host_that_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert examine("tcp://no.such.host.invalid:8786", None, as_json=False) == 2
    printed = capsys.readouterr()
    assert "there is no host 'no.such.host.invalid'" in printed.err
    assert "-> correct the name of the host" in printed.out


@pytest.mark.parametrize("words", [b"SSH-2.0-OpenSSH_9.2\r\n", b"220 mail\r\n", b""])
def test_another_program(words: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            client, _ = server.accept()
            client.sendall(words)
            client.close()

        with ThreadPoolExecutor(1) as threads:
            answering = threads.submit(answer)
            address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
            assert examine(address, None, as_json=False) == 2
            answering.result()
    assert "another program listens on that port; correct the port" in capsys.readouterr().err


@pytest.mark.cluster
def test_what_to_do_about_the_address_of_a_worker(
    sides: Sides, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = next(iter(sides.stock.scheduler_info()["workers"]))
    assert examine(worker, None, as_json=False) == 2
    printed = capsys.readouterr()
    assert f"{worker}: that is a Worker; give the address of the scheduler" in printed.err


# ------------------------------------------------------------------ a live cluster


@pytest.mark.cluster
def test_status_of_an_enabled_cluster(
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
def test_what_json_has_no_word_for_is_null(
    sides: Sides, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {"rates": [float("inf"), (1.5, float("nan"))], "n": 1, "on": True, "why": None}
    monkeypatch.setattr("dask_gpurt.command.status.ask", lambda client: found)
    show(scheduler_address(sides.enabled), None, as_json=True)
    printed = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert printed == {**found, "rates": [None, [1.5, None]]}


@pytest.mark.cluster
def test_status_tells_of_each_shuffle_and_of_hot_partitions(
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
def test_doctor_on_an_enabled_cluster(shell: Shell, sides: Sides) -> None:
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
def test_asking_switches_nothing_on(shell: Shell, sides: Sides, command: str) -> None:
    address = scheduler_address(sides.stock)
    env = {"DASK_GPURT__ENABLED": "true"}
    outcome = shell.gpurt(command, "--scheduler", address, env=env)
    assert (outcome.code, outcome.err) == (0, "")
    assert "off: not switched on for this cluster" in outcome.out
    assert not dask_gpurt.status(sides.stock)["active"]


@pytest.mark.cluster
def test_status_names_workers_also_where_the_runtime_is_off(
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
def test_a_worker_is_no_scheduler(sides: Sides, capsys: pytest.CaptureFixture[str]) -> None:
    worker = next(iter(dask_gpurt.status(sides.enabled)["workers"]))
    with pytest.raises(connect.ConnectError, match="that is a Worker"):
        show(worker, None, as_json=True)


async def _say_no_versions(dask_worker: Any) -> None:
    """Until `_say_versions`."""
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
def test_versions_are_those_of_all_who_answer_in_time(
    sides: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the runtime is off, so that nobody knows who is silent."""
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


def test_every_remedy_of_a_cluster_in_trouble() -> None:
    side = {"host": {"python": "3.11.7.final.0"}, "packages": {"dask": "1", "pandas": "3"}}
    other = {"host": {"python": "3.12.1.final.0"}, "packages": {"dask": "1", "pandas": "2"}}
    problem = "worker tcp://b: dask-gpurt cannot be imported there; run `pip install dask-gpurt`"
    why = "there is no adapter for this kind of data"
    links = {
        "tcp://d": {"path": "shared", "why_not": {}},
        "tcp://e": {"path": "comm", "why_not": {"shared": "not in view", "ucx": "without ucxx"}},
        "tcp://f": {"path": "comm", "why_not": {"shared": "not in view", "ucx": "encrypted"}},
    }
    told = cluster_findings(
        {
            "scheduler": "tcp://s",
            "active": True,
            "version": "0.0.1",
            "host": "h",
            "workers": {
                "tcp://a": None,
                "tcp://b": None,
                "tcp://c": {"version": "0.0.1", "links": links, "memory": None, "unmanaged": "it"},
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
        "2 pairs of workers exchange through Dask's own connections",
        "2 of them not in shared memory: not in view",
        "1 of them not over UCX: without ucxx",
        "1 of them not over UCX: encrypted",
    ]
    assert [bool(remedy) for _, remedy in said] == [False, False, False, True, False]


def test_before_a_shuffle_the_ways_that_there_are() -> None:
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


def said_of(report: dict[str, Any], what: str) -> list[tuple[str, str, str]]:
    told = cluster_findings(
        {
            "scheduler": "tcp://s",
            "active": True,
            "workers": {"tcp://a": {"version": "0.0.1", "links": {}, "lacks": {}, **report}},
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
def test_a_worker_that_keeps_dasks_store_says_why(why: str, remedy: str) -> None:
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
def test_where_values_of_a_worker_go(disk: dict[str, Any], level: str, said: str) -> None:
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
def test_what_is_done_with_values_of_a_gpu(device: dict[str, Any], level: str, said: str) -> None:
    usual = {"name": "H200", "evicts_for": ["rmm", "cupy"], "cudf_spills": False, "problem": None}
    disk = {"directory": "/x", "is_direct": True, "problem": None}
    memory = {"disk": disk, "device": usual | device}
    (one,) = said_of({"memory": memory, "unmanaged": None}, "gpu")
    assert one[0] == level
    assert said in one[1]
    assert ("cudf" in one[2]) == ("cudf_spills" in device)


def test_nothing_is_said_of_a_gpu_that_cannot_be() -> None:
    disk = {"directory": "/x", "is_direct": True, "problem": None}
    assert said_of({"memory": {"disk": disk, "device": None}, "unmanaged": None}, "gpu") == []
    assert said_of({"memory": None, "unmanaged": "it"}, "gpu") == []
