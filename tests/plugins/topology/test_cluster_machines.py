"""A scheduler learns machines and links from workers that answer, lie or stay silent."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from types import SimpleNamespace

import pytest

from dask_gpurt.config import TopologySettings
from dask_gpurt.errors import ConfigError
from dask_gpurt.plugins.topology import cluster_machines as machines_module
from dask_gpurt.plugins.topology.cluster_machines import Machines
from dask_gpurt.topology import description
from dask_gpurt.topology.machine import Machine, MachineReport
from tests.topology.test_model import DATA

#: Bytes a second of a probe: 10 MB in 0.1 s.
ANSWER = {"latency_s": 0.0, "transfers": [(10_000_000, 0.1)]}
RATE = 100e6


def address(host, port=1):
    return f"tcp://10.0.0.{host}:{port}"


class Cluster:
    """A stand-in for a scheduler: workers and their answers."""

    def __init__(self, n_hosts, per_host=1):
        self.workers = {
            address(host, port): SimpleNamespace(
                name=address(host, port), host=f"10.0.0.{host}", processing={}
            )
            for host in range(n_hosts)
            for port in range(1, per_host + 1)
        }
        self.asked = []
        self.answers = {}

    def rpc(self, one):
        return SimpleNamespace(
            gpurt_machine=partial(self._answer, one, "gpurt_machine"),
            gpurt_probe=partial(self._answer, one, "gpurt_probe"),
        )

    async def _answer(self, one, op, source=None):
        self.asked.append((one, source))
        answer = self.answers.get((one, op), self.answers.get(op))
        if callable(answer):
            answer = answer()
        if asyncio.iscoroutine(answer):
            answer = await answer
        if isinstance(answer, Exception):
            raise answer
        if answer is None:
            machine = Machine(self.workers[one].host, "1", (), (), ())
            answer = ANSWER if source else MachineReport(machine, None).to_plain()
        return answer

    def probed(self):
        return [(source, one) for one, source in self.asked if source]


class Learner:
    """A stand-in for placement."""

    def __init__(self, undescribed=(), *, is_written=False):
        self.told = {}
        self.described = []
        self._undescribed = undescribed
        self.is_written = is_written

    def are_links_described(self):
        return True

    def are_links_written(self):
        return self.is_written

    def undescribed(self):
        return list(self._undescribed)

    def set_topology(self, topology):
        self.described.append(topology)

    def observe(self, target, rates):
        for source, (total, count) in rates.items():
            self.told[source, target] = total / count


def settings(probe="auto", name=None):
    text = None if name is None else (DATA / f"{name}.yaml").read_text()
    return TopologySettings(name, text, probe)


async def machines(cluster, probe="auto", name=None):
    found = Machines(cluster, cluster.workers.keys())
    await found.configure(settings(probe, name))
    return found


async def settled(found):
    """Wait for all tasks that the machines object started by itself."""
    found.workers_changed()
    await found._probing
    if found._discovering is not None:
        await found._discovering


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 120))


# ---------------------------------------------------------------------- described


def test_measurements_alone_do_not_describe_machines():
    cluster = Cluster(2)
    found = run(machines(cluster))
    assert not found.is_described
    run(found.describe(probe=True))
    assert not found.is_described
    run(found.configure(settings(name="two-hosts")))
    assert found.is_described
    assert found.summary()["file"] == "two-hosts"


def test_invalid_description_changes_nothing():
    found = run(machines(Cluster(2), name="two-hosts"))
    before = found.topology
    with pytest.raises(ConfigError, match="line 1"):
        run(found.configure(TopologySettings("wrong.yaml", "hosts: [{}]", "on")))
    assert found.topology is before
    assert found.summary()["file"] == "two-hosts"


def test_reading_a_description_does_not_block_the_loop(monkeypatch):
    async def go():
        loop, began, go_on = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

        def parse(text, source):
            loop.call_soon_threadsafe(began.set)
            assert go_on.wait(120)
            return description.parse(text, source)

        monkeypatch.setattr(machines_module, "parse", parse)
        reading = asyncio.create_task(machines(Cluster(2), name="two-hosts"))
        await began.wait()
        go_on.set()
        assert (await reading).is_described

    run(go())


def test_description_shared_by_clients_is_read_once():
    found = run(machines(Cluster(2), name="two-hosts"))
    before = found.topology
    run(found.configure(settings("on", "two-hosts")))
    assert found.topology is before
    run(found.configure(settings()))
    assert found.topology is None
    assert not found.is_described


# ---------------------------------------------------------------------- automatic probes


def test_links_are_measured_where_placement_uses_them():
    async def go():
        cluster, learner = Cluster(2), Learner()
        found = await machines(cluster)
        await settled(found)
        assert cluster.probed() == []
        assert "does not use" in found.summary()["probe"]["reason"]
        found.set_learner(learner)
        await settled(found)
        both = {(address(0), address(1)), (address(1), address(0))}
        assert set(cluster.probed()) == both
        assert learner.told == dict.fromkeys(both, pytest.approx(RATE))
        probe = found.summary()["probe"]
        assert (probe["state"], probe["pairs"]) == ("done", 2)
        assert probe["slowest_nbytes_per_s"] == probe["fastest_nbytes_per_s"] == pytest.approx(RATE)
        # No worker is new, so nothing is measured again.
        await settled(found)
        assert len(cluster.probed()) == 2
        # A learner that is set later gets all earlier measurements.
        later = Learner()
        found.set_learner(later)
        assert later.told == learner.told

    run(go())


@pytest.mark.parametrize(
    ("probe", "name", "n_hosts", "is_probed"),
    [
        ("auto", None, 2, True),
        ("auto", "two-hosts", 2, False),
        ("auto", None, 17, False),
        ("on", "two-hosts", 2, True),
        ("on", None, 17, True),
        ("off", None, 2, False),
    ],
)
def test_links_are_measured_when_the_setting_says_so(probe, name, n_hosts, is_probed):
    async def go():
        cluster = Cluster(n_hosts)
        found = await machines(cluster, probe, name)
        found.set_learner(Learner(is_written=name is not None))
        await settled(found)
        assert bool(cluster.probed()) == is_probed
        assert found.summary()["probe"]["state"] == ("done" if is_probed else "not run")

    run(go())


@pytest.mark.parametrize("n_strangers", [0, 1, 2])
def test_links_that_a_file_lacks_are_measured(n_strangers):
    async def go():
        cluster = Cluster(2)
        found = await machines(cluster, name="two-hosts")
        strangers = list(cluster.workers)[:n_strangers]
        found.set_learner(Learner(strangers, is_written=not strangers))
        await settled(found)
        assert bool(cluster.probed()) == bool(strangers)
        said = found.summary()
        assert (said["file"], said["undescribed"]) == ("two-hosts", strangers)
        assert said["probe"]["reason"] == ("" if strangers else "machines are described")

    run(go())


def test_new_hosts_are_measured_without_repeating_old_pairs():
    async def go():
        cluster = Cluster(2)
        found = await machines(cluster)
        found.set_learner(Learner())
        await settled(found)
        before = cluster.probed()
        cluster.workers.update(Cluster(3).workers)
        await settled(found)
        new = cluster.probed()[len(before) :]
        assert new and all(address(2) in pair for pair in new)

    run(go())


def test_hosts_that_join_during_a_probe_are_measured():
    async def go():
        cluster = Cluster(2)

        def grow():
            cluster.workers.update(Cluster(3).workers)
            return ANSWER

        cluster.answers["gpurt_probe"] = grow
        found = await machines(cluster)
        found.set_learner(Learner())
        await settled(found)
        assert len(set(cluster.probed())) == len(cluster.probed()) == 6

    run(go())


def test_probe_ends_when_its_time_is_over(monkeypatch):
    async def go():
        cluster, seconds = Cluster(3), iter(range(1000))
        monkeypatch.setattr(
            "dask_gpurt.plugins.topology.cluster_machines.time", lambda: 3 * next(seconds)
        )
        found = await machines(cluster)
        found.set_learner(Learner())
        await settled(found)
        assert found.summary()["probe"]["state"] == "stopped"
        n_probed = len(cluster.probed())
        assert 0 < n_probed < 6
        await settled(found)
        assert len(cluster.probed()) == n_probed

    run(go())


def test_probe_does_not_run_beside_tasks():
    async def go():
        cluster = Cluster(3)
        found = await machines(cluster)
        found.set_learner(Learner())
        cluster.workers[address(0)].processing["task"] = 1
        await settled(found)
        assert cluster.probed() == []
        assert found.summary()["probe"]["reason"] == "tasks were running"
        cluster.workers[address(0)].processing.clear()

        def begin_a_task():
            cluster.workers[address(1)].processing["task"] = 1
            return ANSWER

        cluster.answers["gpurt_probe"] = begin_a_task
        await settled(found)
        assert len(cluster.probed()) == 1
        probe = found.summary()["probe"]
        assert (probe["state"], probe["reason"]) == ("stopped", "tasks began to run")
        # The probe continues where it stopped.
        cluster.answers.clear()
        cluster.workers[address(1)].processing.clear()
        await settled(found)
        assert len(set(cluster.probed())) == len(cluster.probed()) == 6

    run(go())


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ({"problem": "nobody there"}, "nobody there"),
        ({"latency_s": 0.0, "transfers": []}, "not an answer"),
        ("nonsense", "not an answer"),
        (OSError("connection lost"), "connection lost"),
    ],
)
def test_unmeasurable_pairs_are_named(answer, problem):
    async def go():
        cluster, learner = Cluster(2), Learner()
        cluster.answers[address(1), "gpurt_probe"] = answer
        found = await machines(cluster)
        found.set_learner(learner)
        await settled(found)
        assert list(learner.told) == [(address(1), address(0))]
        ((about, why),) = found.summary()["probe"]["problems"].items()
        assert about == f"{address(0)} to {address(1)}"
        assert problem in why

    run(go())


def test_probe_does_not_wait_for_a_silent_worker(monkeypatch):
    monkeypatch.setattr("dask_gpurt.plugins.topology.cluster_machines._PROBE_DEADLINE_S", 0.01)

    async def go():
        cluster = Cluster(2)
        cluster.answers[address(1), "gpurt_probe"] = asyncio.Event().wait
        found = await machines(cluster)
        found.set_learner(Learner())
        await settled(found)
        assert found.summary()["probe"]["pairs"] == 1
        assert "no answer in 0.01 s" in str(found.summary()["probe"]["problems"])

    run(go())


def test_closing_ends_a_probe():
    async def go():
        cluster = Cluster(2)
        cluster.answers["gpurt_probe"] = asyncio.Event().wait
        found = await machines(cluster)
        found.set_learner(Learner())
        found.workers_changed()
        await asyncio.sleep(0)
        await found.close()
        assert found._probing.cancelled()

    run(go())


# ---------------------------------------------------------------------- requested probes


def test_machines_are_asked_once_and_forgotten_on_departure():
    async def go():
        cluster = Cluster(2)
        found = await machines(cluster)
        first = await found.describe(probe=False)
        assert first["workers"] == 2
        topology = description.parse(first["text"])
        assert [host.name for host in topology.hosts] == ["10.0.0.0", "10.0.0.1"]
        assert await found.describe(probe=False) == first
        assert len(cluster.asked) == 2
        del cluster.workers[address(1)]
        found.remove_worker(address(1))
        assert (await found.describe(probe=False))["workers"] == 1

    run(go())


def test_worker_that_leaves_during_a_request_is_forgotten():
    async def go():
        cluster = Cluster(2)
        found = await machines(cluster)

        def leave():
            ws = cluster.workers.pop(address(1))
            found.remove_worker(address(1))
            return MachineReport(Machine(ws.host, "1", (), (), ()), None).to_plain()

        cluster.answers[address(1), "gpurt_machine"] = leave
        assert (await found.describe(probe=False))["workers"] == 1
        # Another worker takes its place.
        cluster.workers.update(Cluster(2).workers)
        cluster.answers.clear()
        assert (await found.describe(probe=False))["workers"] == 2
        assert [one for one, _ in cluster.asked].count(address(1)) == 2

    run(go())


def test_measurements_of_a_host_end_with_its_last_worker():
    async def go():
        cluster = Cluster(2, per_host=2)
        cluster.answers[address(1), "gpurt_probe"] = {"problem": "nobody there"}
        found = await machines(cluster, "on")
        await settled(found)
        before = found.summary()["probe"]
        assert (before["pairs"], len(before["problems"])) == (3, 1)
        for port in (2, 1):
            assert found.summary()["probe"] == before
            del cluster.workers[address(1, port)]
            found.remove_worker(address(1, port))
        after = found.summary()["probe"]
        assert (after["pairs"], after["problems"]) == (1, {})
        # A host that takes its place is measured, too.
        cluster.workers.update(Cluster(2, per_host=2).workers)
        cluster.answers.clear()
        await settled(found)
        assert found.summary()["probe"]["pairs"] == 4

    run(go())


def test_probes_of_several_clients_take_turns():
    async def go():
        cluster = Cluster(2)
        found = await machines(cluster, "off")
        at_once = most_at_once = 0

        async def answer():
            nonlocal at_once, most_at_once
            at_once += 1
            most_at_once = max(most_at_once, at_once)
            await asyncio.sleep(0)
            at_once -= 1
            return ANSWER

        cluster.answers["gpurt_probe"] = answer
        await asyncio.gather(*(found.describe(probe=True) for _ in range(3)))
        assert len(cluster.probed()) == 6
        assert most_at_once == 1

    run(go())


def test_invalid_report_is_named_and_left_out():
    async def go():
        cluster = Cluster(2)
        cluster.answers[address(1), "gpurt_machine"] = {"machine": 7, "gpu": None}
        both = await machines(cluster)
        found = await both.describe(probe=False)
        assert found["workers"] == 1
        assert "cannot be used" in found["problems"][address(1)]
        cluster.answers.clear()
        found = await both.describe(probe=False)
        assert (found["workers"], found["problems"]) == (2, {})

    run(go())


def test_requested_probe_ignores_settings_and_repeats():
    async def go():
        cluster = Cluster(2)
        cluster.workers[address(0)].processing["task"] = 1
        found = await machines(cluster, "off")
        first = await found.describe(probe=True)
        assert "as it was measured" in first["text"]
        way = description.parse(first["text"]).path("10.0.0.0/numa0", "10.0.0.1/numa0")
        assert way.bandwidth_nbytes_per_s == RATE
        await found.describe(probe=True)
        assert len(cluster.probed()) == 4

    run(go())
