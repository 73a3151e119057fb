"""Handlers refuse unexpected arguments with one clear error and change nothing."""

from __future__ import annotations

import copy

import pandas as pd
import pytest
from dask import config as dask_config
from distributed.core import rpc
from distributed.utils_test import async_poll_for, gen_cluster

import dask_gpurt
from dask_gpurt import config
from dask_gpurt.errors import ConfigError, ProtocolError
from dask_gpurt.plugins import request_checks
from dask_gpurt.plugins.shuffle.peer_links import Links
from tests.integration.comparing import collection

VERSION = dask_gpurt.__version__


class Hostile:
    """An object with a text of any length."""

    def __repr__(self) -> str:
        return "x" * 10**6


@pytest.mark.parametrize("value", [None, 3, ["a"], b"a", "a" * 1001, Hostile()])
def test_invalid_names_are_refused(value):
    with pytest.raises(ProtocolError, match=r"worker is a .* a text of at most 1000") as caught:
        request_checks.name("worker", value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("value", [None, 0, 1, "yes", []])
def test_invalid_flags_are_refused(value):
    with pytest.raises(ProtocolError, match="true or false"):
        request_checks.flag("probe", value)


def nested(depth):
    key = "a"
    for _ in range(depth):
        key = (key,)
    return key


@pytest.mark.parametrize("value", [None, ["a"], {"a": 1}, ("a", ["b"]), nested(33), object()])
def test_invalid_keys_are_refused(value):
    with pytest.raises(ProtocolError, match="the key of a task"):
        request_checks.key(value)


@pytest.mark.parametrize("value", ["a", b"a", 1, 1.5, ("a", 0, ("b", 1)), nested(32)])
def test_valid_keys_are_accepted(value):
    assert request_checks.key(value) is value


@pytest.mark.parametrize("value", [None, "abc", {"a"}, [["a"]], ["a"] * 100_001])
def test_invalid_key_lists_are_refused(value):
    with pytest.raises(ProtocolError, match="key"):
        request_checks.keys(value)


@pytest.mark.parametrize(
    "value", [None, "12", 3, {0: 1}, [1, 2, 3, 4], [-1], [True], [1.0], ["1"], [2**48 + 1], [None]]
)
def test_invalid_rows_are_refused(value):
    with pytest.raises(ProtocolError, match="rows is a"):
        request_checks.rows(value, 3)


@pytest.mark.parametrize("value", [5, ["why"], "a" * 10_001])
def test_invalid_problems_are_refused(value):
    with pytest.raises(ProtocolError, match="problem is a"):
        request_checks.problem(value)


def changed(path, value):
    """Plain settings with another value in one place."""
    plain = copy.deepcopy(config.read().to_plain())
    *sections, last = path.split(".")
    found = plain
    for name in sections:
        found = found[name]
    if value is ...:
        del found[last]
    else:
        found[last] = value
    return plain


WRONG_SETTINGS = [
    "all of them",
    None,
    {},
    changed("strict", ...),
    changed("unknown", 1),
    changed("shuffle", [1]),
    changed("shuffle.unknown", 1),
    changed("shuffle.memory", ...),
    changed("shuffle.memory", -1),
    changed("shuffle.memory", float("nan")),
    changed("shuffle.message_nbytes", 0),
    changed("shuffle.message_nbytes", "plenty"),
    changed("shuffle.in_flight", True),
    changed("shuffle.compression", ["zstd"]),
    changed("shuffle.transport", "pigeon"),
    changed("strict", "perhaps"),
    changed("memory.policy", "random"),
    changed("memory.directory", 3),
    changed("memory.disk_limit_nbytes", -5),
    changed("memory.device", []),
    changed("placement.policy", None),
    changed("topology.probe", "always"),
    changed("topology.text", 5),
    changed("topology.text", "hosts: {"),
    changed("topology.file", ["a"]),
]


@pytest.mark.parametrize("plain", [one for one in WRONG_SETTINGS if one != WRONG_SETTINGS[-2]])
def test_unusable_settings_are_refused(plain):
    with pytest.raises(ConfigError):
        config.Settings.from_plain(plain)


def test_length_of_a_machine_description_is_bounded(monkeypatch, tmp_path):
    monkeypatch.setattr(config, "MAX_DESCRIPTION", 10)
    with pytest.raises(ConfigError, match=r"topology\.file"):
        config.Settings.from_plain(changed("topology.text", "#" * 11))
    path = tmp_path / "machines.yaml"
    path.write_text("#" * 11)
    with dask_config.set({"gpurt.topology.file": str(path)}), pytest.raises(ConfigError):
        config.read()


#: Handlers of the scheduler and calls that are wrong.
WRONG_ON_SCHEDULER = [
    *(("gpurt_configure", {"settings": one, "version": VERSION}) for one in WRONG_SETTINGS),
    ("gpurt_configure", {"settings": config.read().to_plain(), "version": 5}),
    ("gpurt_configure", {"settings": config.read().to_plain(), "version": "1" * 1001}),
    ("gpurt_configure", {"settings": config.read().to_plain()}),
    ("gpurt_sketch", {"shuffle_id": ["a"]}),
    ("gpurt_sketch", {"shuffle_id": 5, "rows": [1]}),
    ("gpurt_sketch", {"shuffle_id": "a" * 1001, "rows": [1]}),
    ("gpurt_sketch", {"shuffle_id": "a", "rows": [1], "more": 1}),
    ("gpurt_next_uses", {"keys": "a", "worker": "b"}),
    ("gpurt_next_uses", {"keys": [{"a": 1}], "worker": "b"}),
    ("gpurt_next_uses", {"keys": ["a"], "worker": {}}),
    ("gpurt_worker_ready", {"worker": ["a"], "problem": None}),
    ("gpurt_worker_ready", {"worker": "a", "problem": ["b"]}),
    ("gpurt_worker_ready", {"worker": "a", "problem": "b" * 10_001}),
    ("gpurt_explain", {"key": {"a": 1}}),
    ("gpurt_explain", {"key": None}),
    ("gpurt_topology", {"probe": "yes"}),
    ("gpurt_overview", {"more": 1}),
    ("gpurt_status", {"reports": 5}),
]


def state_of_plugin(plugin):
    return (
        plugin.settings,
        plugin.machines.topology,
        plugin.placement,
        dict(plugin.data_plane_choice._sketches),
        set(plugin.readiness.ready),
        dict(plugin.readiness.not_ready),
        plugin.scheduler.worker_plugins["gpurt"],
        plugin.is_active,
    )


@gen_cluster(
    client=True, nthreads=[("", 1)] * 2, config={"gpurt.topology.file": None}
)  # reports of workers would change the machines meanwhile
async def test_wrong_calls_of_the_scheduler_change_nothing(c, s, a, b):
    await dask_gpurt.enable(c)
    plugin = s.plugins["gpurt"]
    before = state_of_plugin(plugin)
    for handler, message in WRONG_ON_SCHEDULER:
        with pytest.raises((ConfigError, ProtocolError, TypeError)) as caught:
            await getattr(c.scheduler, handler)(**message)
        assert len(str(caught.value)) < 500, handler
        assert state_of_plugin(plugin) == before, (handler, message)
    assert (await dask_gpurt.status(c))["active"]


@gen_cluster(client=True, nthreads=[("", 1)] * 2)
async def test_sketch_of_an_unknown_shuffle_is_refused(c, s, a, b):
    """Only sketches of known shuffles with the right number of partitions are kept."""
    await dask_gpurt.enable(c)
    plugin = s.plugins["gpurt"]
    for number in range(300):
        assert await c.scheduler.gpurt_sketch(shuffle_id=f"none-{number}", rows=[1] * 99) is None
    assert not plugin.data_plane_choice._sketches
    # The input of this shuffle waits, so the shuffle has not begun.
    from distributed import Event

    event = Event("goes", client=c)

    def waiting(frame):
        Event("goes").wait()
        return frame

    frames = [pd.DataFrame({"a": range(20)})] * 2
    lazy = collection(frames).map_partitions(waiting, meta=frames[0]).shuffle("a", npartitions=3)
    with dask_config.set({"dataframe.shuffle.method": "p2p"}):
        total = c.compute(lazy.a.sum())
    barriers = []

    def is_there():
        barriers[:] = [key for key in s.tasks if str(key).startswith("shuffle-barrier-")]
        return barriers

    await async_poll_for(is_there, timeout=60)
    shuffle_id = barriers[0].removeprefix("shuffle-barrier-")
    assert await c.scheduler.gpurt_sketch(shuffle_id=shuffle_id) == "_partitions"
    for rows in ([1] * 4, [-1], [0.5], ["a"], "abc", {}, [2**60]):
        with pytest.raises(ProtocolError, match="rows is a"):
            await c.scheduler.gpurt_sketch(shuffle_id=shuffle_id, rows=rows)
    assert not plugin.data_plane_choice._sketches
    assert await c.scheduler.gpurt_sketch(shuffle_id=shuffle_id, rows=[9, 1, 1]) is None
    assert plugin.data_plane_choice._sketches == {shuffle_id: [9, 1, 1]}
    await event.set()
    assert await total == 2 * sum(range(20))
    assert plugin.data_plane_choice.runs["gpurt"] == 1


@gen_cluster(client=True, nthreads=[("", 1)], worker_kwargs={"memory_limit": "16 GiB"})
async def test_wrong_calls_of_a_worker_change_nothing(c, s, a):
    await dask_gpurt.enable(c)
    wrong = [
        ("gpurt_explain", {"key": {"a": 1}}),
        ("gpurt_explain", {"key": None}),
        ("gpurt_explain", {}),
        ("gpurt_probe", {"source": 5}),
        ("gpurt_probe", {"source": "a" * 1001}),
        ("gpurt_probe_data", {"nbytes": "many"}),
        ("gpurt_probe_data", {"nbytes": True}),
        ("gpurt_probe_data", {"nbytes": -1}),
        ("gpurt_probe_data", {"nbytes": 2**40}),
        ("gpurt_report", {"most": 1, "more": 1}),
        ("gpurt_report", {}),
        ("gpurt_report", {"most": -1}),
        ("gpurt_report", {"most": True}),
        ("gpurt_machine", {"more": 1}),
    ]
    async with rpc(a.address) as worker:
        for handler, message in wrong:
            with pytest.raises((ProtocolError, TypeError)) as caught:
                await getattr(worker, handler)(**message)
            assert len(str(caught.value)) < 500
        said = await worker.gpurt_probe(source="nobody://knows")
        assert "cannot be reached" in said["problem"]
        assert (await worker.gpurt_report(most=1))["version"] == VERSION


@pytest.mark.parametrize("offers", [None, 5, [], ["shared"], {}, {"shared": 1, "ucx": 2}])
@gen_cluster(nthreads=[("", 1)])
async def test_invalid_path_offers_are_refused(s, a, offers):
    links = Links(a, 0)
    try:
        with pytest.raises(ProtocolError, match="an offer must name"):
            await links.accept(offers)
    finally:
        await links.disconnect()
        links.close()
