"""Machines and links of real clusters are read, measured, written and used."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
import threading
from types import SimpleNamespace

import dask
import pytest
from distributed import Client, LocalCluster
from distributed.utils_test import async_poll_for, captured_logger, gen_cluster, poll_for

import dask_gpurt
from dask_gpurt import config
from dask_gpurt.cli import gpurt
from dask_gpurt.command import connect, doctor, status
from dask_gpurt.errors import ActivationError, ConfigError
from dask_gpurt.plugins import activation
from dask_gpurt.plugins.topology import cluster_machines, host_report
from dask_gpurt.plugins.topology.host_report import HostReporter, local_machine
from dask_gpurt.simulate.example_clusters import gpu_hosts
from dask_gpurt.topology import description
from dask_gpurt.topology.machine import MachineReport
from tests.integration.processes import command_line_cluster
from tests.topology.trees import RecordedError, RecordedNvml

ON = {"gpurt.enabled": True, "gpurt.placement.policy": "data-aware"}


def scheduler_plugin(scheduler):
    return scheduler.plugins["gpurt"]


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_client_that_connects_during_a_start_does_not_restart_it(c, s, a):
    text = description.dump(gpu_hosts(1, 1, nic_bandwidth=1e9, nvlink=False))
    with dask.config.set({"gpurt.enabled": True}):
        settings = dataclasses.replace(
            config.read(), topology=config.TopologySettings("box.yaml", text, "off")
        )
    loop, began, go_on, n_read = asyncio.get_running_loop(), asyncio.Event(), threading.Event(), []

    def parse(text, source):
        n_read.append(source)
        loop.call_soon_threadsafe(began.set)
        assert go_on.wait(120)
        return description.parse(text, source)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster_machines, "parse", parse)
        first = asyncio.create_task(activation.activate(c, settings))
        await began.wait()
        second = asyncio.create_task(activation.activate(c, settings))
        opened = s.extensions["gpurt"]._opened
        await async_poll_for(lambda: opened._waiters, timeout=60)
        go_on.set()
        await asyncio.gather(first, second)
    assert n_read == ["box.yaml"]
    assert scheduler_plugin(s).machines.is_described


@gen_cluster(client=True, config=ON)
async def test_links_to_new_workers_are_measured_for_placement(c, s, a, b):
    plugin = scheduler_plugin(s)
    probe = lambda: plugin.machines.summary()["probe"]  # noqa: E731
    await async_poll_for(lambda: probe()["state"] == "done", timeout=60)
    assert probe()["pairs"] == 1
    assert not probe()["problems"]
    # The bandwidth is a measured one, not the default for unknown machines.
    path = plugin.placement._links(a.address, b.address)
    assert path.bandwidth_nbytes_per_s != pytest.approx(400e6, rel=1e-6)
    said = await dask_gpurt.status(c)
    assert said["topology"]["probe"]["pairs"] == 1
    assert "pairs in" in status.as_text({**said, "scheduler": s.address})


@gen_cluster(client=True, config={**ON, "gpurt.topology.probe": "off"})
async def test_machines_are_described_on_request(c, s, a, b):
    found = await activation.machines(c, False)
    assert found["workers"] == 2
    assert found["problems"] == {}
    (host,) = description.parse(found["text"]).hosts
    assert host.addresses == ("127.0.0.1",)
    assert s.plugins["gpurt"].machines.summary()["probe"]["reason"] == "gpurt.topology.probe is off"
    # After that, no worker answers, as with stock Dask.
    await dask_gpurt.disable(c)
    with pytest.raises(ActivationError, match="off on that cluster"):
        await activation.machines(c, False)


@gen_cluster(config=ON)
async def test_a_worker_that_ends_probes_nothing(s, a, b):
    """An error in a handler would be logged with a traceback at the end of a program."""
    await a.rpc.close()
    found = await HostReporter(a).gpurt_probe(b.address)
    assert found == {"problem": f"{b.address} cannot be reached: ConnectionPool is closed"}


@gen_cluster(client=True, config=ON)
async def test_probes_of_a_worker_are_bounded(c, s, a, b):
    report = HostReporter(a)
    found = await report.gpurt_probe(b.address)
    assert found["transfers"][0].nbytes == 128 * 2**10
    assert found["latency_s"] > 0
    nobody = await report.gpurt_probe("tcp://127.0.0.1:9")
    assert "cannot be reached" in nobody["problem"] or "nothing came" in nobody["problem"]
    # The handler is missing, as after the runtime was switched off there.
    handler = b.handlers.pop("gpurt_probe_data")
    assert "no longer answers" in (await report.gpurt_probe(b.address))["problem"]
    b.handlers["gpurt_probe_data"] = handler
    for wrong in (-1, 2**40, "all", None):
        with pytest.raises(ValueError, match="a probe of"):
            await report.gpurt_probe_data(wrong)
    parts = (await report.gpurt_probe_data(2**21 + 5))["parts"]
    assert [len(one.data) for one in parts] == [2**20, 2**20, 5]


def test_local_machine_is_described():
    machine = local_machine()
    assert machine.name
    assert MachineReport.from_plain(MachineReport(machine, None).to_plain()).machine == machine


def test_gpus_come_from_nvml_where_it_works(monkeypatch):
    calls = []

    class Library(RecordedNvml):
        def nvmlInit(self):
            calls.append("init")

        def nvmlShutdown(self):
            calls.append("shutdown")

    monkeypatch.setitem(sys.modules, "pynvml", Library("pcie-box"))
    assert len(host_report._nvml_gpus()) == 2
    assert calls == ["init", "shutdown"]

    def fail():
        raise RecordedError("Driver Not Loaded")

    broken = SimpleNamespace(NVMLError=RecordedError, nvmlInit=fail)
    monkeypatch.setitem(sys.modules, "pynvml", broken)
    assert host_report._nvml_gpus() is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert host_report._nvml_gpus() is None


@pytest.fixture
def cluster():
    with (
        LocalCluster(
            n_workers=1,
            threads_per_worker=1,
            processes=False,
            protocol="tcp://",
            dashboard_address=None,
        ) as found,
        Client(found) as client,
    ):
        yield client


def command(*args):
    with pytest.raises(SystemExit) as end:
        gpurt.main(list(args), standalone_mode=False)
    return end.value.code


def test_command_writes_a_usable_description(cluster, tmp_path, capsys):
    address = cluster.scheduler.address
    assert command("topology", "--scheduler", address) == 2
    assert "DASK_GPURT__ENABLED=true" in capsys.readouterr().err
    dask_gpurt.enable(cluster)
    assert command("topology", "--scheduler", address, "--probe") == 0
    path = tmp_path / "machines.yaml"
    path.write_text(capsys.readouterr().out)
    assert command("topology", "--check", str(path)) == 0
    assert "NUMA node" in capsys.readouterr().out
    with dask.config.set({"gpurt.topology.file": str(path)}):
        dask_gpurt.enable(cluster)
    found = dask_gpurt.status(cluster)
    assert found["topology"]["file"] == str(path)
    assert found["placement"]["policy"] == "data-aware"
    said = doctor.cluster_findings({**found, "scheduler": address, "versions": VERSIONS})
    (finding,) = (one for one in said if one.what == "topology")
    assert str(path) in finding.text


def test_reported_machines_switch_placement_on(cluster):
    dask_gpurt.enable(cluster)
    poll_for(lambda: not dask_gpurt.status(cluster)["topology"]["undescribed"], timeout=60)
    found = dask_gpurt.status(cluster)
    assert found["topology"]["file"] == "auto"
    assert found["placement"]["policy"] == "data-aware"
    assert cluster.submit(sum, [cluster.submit(int, 3), 4]).result() == 7
    said = doctor._topology(found)
    assert said[0].text == "machines are described by workers' reports"
    with dask.config.set({"gpurt.topology.file": None}):
        dask_gpurt.enable(cluster)
    assert dask_gpurt.status(cluster)["placement"]["policy"] == "stock"


#: Run before a worker: its machine has a name of its own, as a container does.
OTHER_MACHINE = "import socket; socket.gethostname = lambda: 'other'\n"
FILE_OF_ONE = """
hosts:
- {name: mine, addresses: [127.0.0.1], numa: [{name: numa0}]}
switches: [ethernet]
links:
- {between: [mine/numa0, ethernet], kind: slow, bandwidth: 3 kB/s}
"""


def test_workers_complete_a_file_that_lacks_their_host(tmp_path, capsys):
    path = tmp_path / "machines.yaml"
    path.write_text(FILE_OF_ONE)
    with command_line_cluster(tmp_path) as processes:
        processes.scheduler()
        processes.worker("--no-nanny", "--host", "127.0.0.1")
        processes.worker("--no-nanny", "--host", "127.0.0.2", before=OTHER_MACHINE)
        with processes.client() as client:
            client.wait_for_workers(2, timeout=60)
            with dask.config.set({"gpurt.topology.file": str(path)}):
                dask_gpurt.enable(client)

            def is_known():
                said = dask_gpurt.status(client)["topology"]
                return said["reported_hosts"] == 1 and not said["is_speed_missing"]

            poll_for(is_known, timeout=60)
            found = dask_gpurt.status(client)
            assert found["topology"]["file"] == str(path)
            assert not found["topology"]["undescribed"]
            assert found["topology"]["probe"]["pairs"] == 2, "the file does not say all"
            workers = list(client.scheduler_info()["workers"])
            parts = [client.submit(int, 3, workers=[one], pure=False) for one in workers]
            assert client.submit(sum, parts).result() == 6
            assert command("topology", "--scheduler", client.scheduler.address) == 0
    text = capsys.readouterr().out
    assert f"as {path} and 2 of its workers describe them" in text
    assert "# mine: as the file says" in text
    assert "# other: as its workers report" in text
    assert "# links between hosts as the file says: mine/numa0 - ethernet" in text
    assert "# other: the network at 127.0.0.2 is described as it was measured" in text
    way = description.parse(text).path("mine/numa0", "other/numa0")
    assert (way.kind, way.bandwidth_nbytes_per_s) == ("slow", 3e3)


def test_doctor_says_what_a_file_lacks():
    probe = {"state": "done", "reason": "", "problems": {}}
    topology = {"file": "box.yaml", "undescribed": [], "reported_hosts": 0, "probe": probe}
    topology["is_speed_missing"] = True
    (said,) = doctor._topology({"topology": topology, "workers": {"a": {}}})
    assert said.level == "note"
    assert said.text == "box.yaml lacks the speed of a link, which no worker could report"
    assert "dask gpurt topology --probe" in said.remedy


def test_doctor_says_why_stock_dask_places_tasks():
    probe = {"state": "done", "reason": "", "problems": {}}
    topology = {"file": "auto", "undescribed": [], "is_speed_missing": True, "probe": probe}
    (said,) = doctor._topology({"topology": topology, "workers": {"a": {}}})
    assert said.level == "note"
    assert "network card reports no speed" in said.text
    assert "stock Dask places tasks" in said.text
    assert "dask gpurt topology --probe" in said.remedy
    topology["undescribed"] = ["a"]
    (said,) = doctor._topology({"topology": topology, "workers": {"a": {}}})
    assert "1 of 1 workers have not reported their machines: a" in said.text


VERSIONS = {"client": {}, "scheduler": {}, "workers": {}}


@gen_cluster(client=True, config=ON)
async def test_worker_without_a_report_is_named(c, s, a, b):
    await activation.machines(c, False)
    silent(s.plugins["gpurt"].machines, {a.address})
    found = await activation.machines(c, False)
    assert found["workers"] == 1
    assert "not included" in found["problems"][b.address]


def silent(machines, but):
    """Pretend that only these workers have reported."""
    machines._ready = but
    machines._reports = {one: report for one, report in machines._reports.items() if one in but}


def test_command_writes_nothing_without_reports(cluster, capsys):
    dask_gpurt.enable(cluster)
    silent(cluster.cluster.scheduler.plugins["gpurt"].machines, set())
    assert command("topology", "--scheduler", cluster.scheduler.address) == 2
    written = capsys.readouterr()
    assert "no worker" in written.err
    assert not written.out


def test_command_explains_an_invalid_description(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(connect, "CONNECT_TIMEOUT_S", 0.2)
    assert command("topology") == 2
    assert "--scheduler" in capsys.readouterr().err
    path = tmp_path / "machines.yaml"
    path.write_text("hosts:\n  - name: a\n")
    assert command("topology", "--check", str(path)) == 2
    assert "line 2" in capsys.readouterr().err
    path.write_bytes(b"hosts: \xff")
    assert command("topology", "--check", str(path)) == 2
    assert str(path) in capsys.readouterr().err
    assert command("topology", "--check", str(tmp_path / "absent")) == 2
    assert command("topology", "--scheduler", "tcp://127.0.0.1:9") == 2
    assert "no scheduler answers" in capsys.readouterr().err


def test_command_names_unconnected_hosts(tmp_path, capsys):
    path = tmp_path / "machines.yaml"
    hosts = [{"name": name, "numa": [{"name": "numa0"}]} for name in ("a", "b")]
    path.write_text(json.dumps({"hosts": hosts}))
    assert command("topology", "--check", str(path)) == 0
    assert "no path from a/numa0 to b/numa0" in capsys.readouterr().out


def test_a_description_without_hosts_can_be_checked(tmp_path, capsys):
    path = tmp_path / "machines.yaml"
    path.write_text("hosts: []\n")
    assert command("topology", "--check", str(path)) == 0
    assert capsys.readouterr().out == f"{path} can be used: 0 hosts, 0 links\n"


@pytest.mark.parametrize(
    "text",
    [
        "word " * 10_000,
        "hosts: " + "word " * 10_000,
        f"hosts: {[{'name': 'a', 'numa': ['x'] * 10_000}]}",
        f"hosts: {'[' * 3}" + "\n- word" * 10_000,
        f"hosts: {[{'name': 'n' * 10_000}]}",
    ],
)
def test_invalid_description_is_one_short_line(tmp_path, capsys, text):
    path = tmp_path / "machines.yaml"
    path.write_text(text)
    assert command("topology", "--check", str(path)) == 2
    written = capsys.readouterr()
    assert not written.out
    assert written.err.count("\n") == 1
    assert len(written.err) < 400


def test_many_hosts_are_summarised(tmp_path, capsys):
    path = tmp_path / "machines.yaml"
    hosts = [{"name": f"h{n}", "numa": [{"name": "numa0"}]} for n in range(100)]
    path.write_text(json.dumps({"hosts": hosts}))
    assert command("topology", "--check", str(path)) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.endswith("machines.yaml can be used: 100 hosts, 0 links")
    assert len(lines) == 2 * 17
    assert "... and 83 more" in lines


def test_undescribed_hosts_get_advice_on_the_description():
    probe = {"state": "stopped", "reason": "tasks began to run", "problems": {"x to y": "lost"}}
    found = {
        "topology": {"file": None, "undescribed": [], "hosts": 2, "probe": probe},
        "workers": {},
    }
    said = doctor._topology(found)
    assert [one.level for one in said] == ["note"] * 3
    assert "dask gpurt topology" in said[0].remedy
    assert "stock Dask places" in said[0].text
    said = doctor._topology({**found, "placement": {"policy": "data-aware"}})
    assert "are learnt" in said[0].text
    assert "tasks began to run" in said[1].text
    assert "lost" in said[2].text
    assert doctor._topology({"topology": None}) == []


@gen_cluster(client=True, nthreads=[("", 1)] * 4)
async def test_workers_outside_of_the_description_are_named(c, s, *workers):
    at = sorted(worker.address for worker in workers)
    with dask.config.set({"gpurt.enabled": True, "gpurt.topology.file": None}):
        settings = config.read()
    await activation.activate(c, settings)
    machines = scheduler_plugin(s).machines
    ready = machines._ready
    silent(machines, set())

    async def told(on_the_device):
        """Return the findings of doctor and the status."""
        device = {"name": "g", "kind": "gpu", "workers": on_the_device}
        hosts = [{"name": "a", "numa": [{"name": "n"}], "devices": [device]}]
        topology = config.TopologySettings("box.yaml", json.dumps({"hosts": hosts}), "off")
        await activation.activate(c, dataclasses.replace(settings, topology=topology))
        found = {**await dask_gpurt.status(c), "scheduler": s.address, "versions": VERSIONS}
        (one,) = (one for one in doctor.cluster_findings(found) if one.what == "topology")
        return one, status.as_text(found)

    one, text = await told([])
    assert (one.level, bool(one.remedy)) == ("problem", True)
    named = f"{at[0]}, {at[1]}, {at[2]}, ..."
    assert one.text == f"4 of 4 workers are on no host of box.yaml, and have not reported: {named}"
    assert "box.yaml, 4 workers are on none of its hosts and have not reported" in text
    one, text = await told(at[:3])
    assert one.text == f"1 of 4 workers are on no host of box.yaml, and have not reported: {at[3]}"
    one, text = await told(at)
    assert (one.level, one.text) == ("ok", "machines are described in box.yaml")
    assert "not reported" not in text
    # Once they report, nothing is missing.
    await told([])
    machines._ready = ready
    machines.workers_changed()
    await async_poll_for(lambda: not machines.summary()["undescribed"], timeout=60)
    (one,) = doctor._topology(await dask_gpurt.status(c))
    assert one.level == "ok"
    assert one.text == "machines are described in box.yaml; workers report those that it lacks: 1"


@gen_cluster(nthreads=[], config={**ON, "gpurt.topology.file": "absent.yaml"})
async def test_missing_description_file_is_reported_at_once(s):
    with pytest.raises(ConfigError, match=r"absent\.yaml"):
        async with Client(s.address, asynchronous=True) as c:
            await dask_gpurt.enable(c)


@gen_cluster(client=True, config={**ON, "gpurt.topology.probe": "off"})
async def test_a_measurement_ends_before_handlers_are_dropped(c, s, a, b):
    """Otherwise a worker is asked for bytes that it no longer serves, and logs an error."""
    asked, may_answer = asyncio.Event(), asyncio.Event()
    for worker in (a, b):
        stock = worker.handlers["gpurt_probe_data"]

        async def held(nbytes, stock=stock):
            asked.set()
            await may_answer.wait()
            return await stock(nbytes)

        worker.handlers["gpurt_probe_data"] = held
    machines = scheduler_plugin(s).machines
    describing = asyncio.ensure_future(activation.machines(c, True))
    await asked.wait()
    with captured_logger("distributed.core") as logged:
        disabling = asyncio.ensure_future(dask_gpurt.disable(c))
        await async_poll_for(lambda: machines._is_ending, timeout=60)
        may_answer.set()
        await disabling
        await asyncio.wait({describing})
    assert "gpurt_probe" not in {*a.handlers, *b.handlers}
    assert "No handler" not in logged.getvalue()
