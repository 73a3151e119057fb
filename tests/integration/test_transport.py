"""Workers choose the best transport that both have, and every transport gives the same rows."""

from __future__ import annotations

import errno
import os
import socket

import dask
import numpy as np
import pandas as pd
import pytest
from distributed import Client, LocalCluster
from distributed.security import Security

import dask_gpurt
from dask_gpurt.plugins.shuffle import worker_ucx
from dask_gpurt.plugins.worker import worker_runtime
from dask_gpurt.plugins.worker.worker_runtime import runtime_of
from dask_gpurt.transport import shared
from dask_gpurt.transport.ucx.engine import UcxEngine
from tests.codecs.test_nvcomp import emulated
from tests.conftest import stock_client
from tests.failure.gates import Gate, before, from_call, pass_gate
from tests.integration.comparing import collection, partitions, runs
from tests.integration.memory_cluster import until

ROWS = 40_000  # enough for shards that go through shared memory


def frame(number):
    rng = np.random.default_rng(number)
    names = pd.array(rng.choice(["a", "bb", "ccc"], ROWS), dtype="string[pyarrow]")
    return pd.DataFrame({"key": rng.integers(0, 1000, ROWS), "x": rng.random(ROWS), "name": names})


def inputs():
    return collection([frame(number) for number in range(6)])


def shuffled(client):
    """Return the rows of each output partition, after a check that our data plane ran."""
    before = runs(client)["gpurt"]
    parts = partitions(client, inputs().shuffle("key", npartitions=4))
    assert runs(client)["gpurt"] == before + 1
    return parts


def expected():
    whole = pd.concat([frame(number) for number in range(6)])
    return whole.sort_values(["key", "x"]).reset_index(drop=True)


def assert_right(parts):
    whole = pd.concat(parts).sort_values(["key", "x"]).reset_index(drop=True)
    pd.testing.assert_frame_equal(whole, expected())


def paths(client):
    """Return the paths and the reasons of all pairs of workers that sent shards."""
    workers = dask_gpurt.status(client)["workers"].values()
    links = [link for worker in workers for link in worker["links"].values()]
    return {link["path"] for link in links}, [link["why_not"] for link in links]


def out_of_view(pid):
    raise OSError(errno.ESRCH, os.strerror(errno.ESRCH))


@pytest.fixture
def no_peer_in_view(monkeypatch):
    """Make workers see no peer's memory, as on two hosts or in two containers."""
    monkeypatch.setattr(shared, "process_start", out_of_view)


def assert_comms_serve(client, path, reason):
    """Check that a shuffle over Dask's connections is right and says why `path` is not used."""
    dask_gpurt.enable(client)
    assert_right(shuffled(client))
    names, reasons = paths(client)
    assert names == {"comm"}
    assert all(reason in found[path] for found in reasons)


def error_without_ucx(client):
    """Return the error of a shuffle that must take UCX and cannot."""
    with dask.config.set({"gpurt.shuffle.transport": "ucx"}):
        dask_gpurt.enable(client)
    with pytest.raises(RuntimeError) as raised:
        shuffled(client)
    return str(raised.value.__cause__)


def test_workers_of_one_host_share_memory(client):
    dask_gpurt.enable(client)
    assert_right(shuffled(client))
    assert paths(client) == ({"shared"}, [{}, {}])


@pytest.mark.cluster
def test_worker_processes_of_one_host_share_memory():
    options = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": ":0"}
    with LocalCluster(silence_logs=50, **options) as local:
        with Client(local, set_as_default=False) as client:
            dask_gpurt.enable(client)
            assert_right(shuffled(client))
            assert paths(client) == ({"shared"}, [{}, {}])


def test_comm_uses_only_the_connections_of_dask(client):
    with dask.config.set({"gpurt.shuffle.transport": "comm"}):
        dask_gpurt.enable(client)
    assert_right(shuffled(client))
    assert paths(client) == ({"comm"}, [{}, {}])


@pytest.fixture
def nvcomp_alone(monkeypatch):
    """Make the codecs of an emulated device the only ones."""
    monkeypatch.setattr(worker_runtime, "HOST_CODECS", {})
    with emulated(monkeypatch):
        yield


def test_device_codecs_serve_peers_that_have_them(client, nvcomp_alone):
    settings = {"gpurt.shuffle.transport": "comm", "gpurt.shuffle.compression": "zstd"}
    with dask.config.set(settings):
        dask_gpurt.enable(client)
    assert_right(shuffled(client))
    found = dask_gpurt.status(client)
    choices = [one["choice"] for worker in found["workers"].values() for one in worker["codecs"]]
    assert "nvcomp zstd" in choices
    assert set(choices) <= {"nvcomp zstd", "none"}
    assert 0 < found["shuffles"][-1]["wire_nbytes"] < found["shuffles"][-1]["sent_nbytes"]


@pytest.fixture
def ucx():
    pytest.importorskip("ucxx", reason="the ucx extra is not installed")


def test_ucx_is_used_on_request(ucx, client):
    with dask.config.set({"gpurt.shuffle.transport": "ucx"}):
        dask_gpurt.enable(client)
    assert_right(shuffled(client))
    assert paths(client) == ({"ucx"}, [{}, {}])


@pytest.mark.cluster
def test_worker_processes_use_ucx(ucx):
    options = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": ":0"}
    with LocalCluster(silence_logs=50, **options) as local:
        with Client(local, set_as_default=False) as client:
            with dask.config.set({"gpurt.shuffle.transport": "ucx"}):
                dask_gpurt.enable(client)
            assert_right(shuffled(client))
            assert paths(client) == ({"ucx"}, [{}, {}])


@pytest.fixture
def client_over_ipv6():
    if not socket.has_dualstack_ipv6():
        pytest.skip("needs IPv6")
    options = {"processes": False, "n_workers": 2, "threads_per_worker": 1}
    with LocalCluster(host="tcp://[::1]", dashboard_address=None, **options) as local:
        with Client(local, set_as_default=False) as client:
            yield client


def test_remote_peers_on_ipv6_use_dask_connections(ucx, client_over_ipv6, no_peer_in_view):
    assert_comms_serve(client_over_ipv6, "ucx", "IPv4 alone")


def test_required_ucx_on_ipv6_is_a_clear_error(ucx, client_over_ipv6):
    message = error_without_ucx(client_over_ipv6)
    assert "gpurt.shuffle.transport is ucx" in message
    assert "IPv4 alone" in message


def test_remote_peers_use_ucx(ucx, client, no_peer_in_view):
    dask_gpurt.enable(client)
    assert_right(shuffled(client))
    names, reasons = paths(client)
    assert names == {"ucx"}
    assert all("not visible here" in reason["shared"] for reason in reasons)


@pytest.fixture
def engines(ucx, monkeypatch):
    """Return a list of all UCX engines that this process has started."""
    started = []
    start = UcxEngine.start

    async def start_and_note(*args):
        started.append(await start(*args))
        return started[-1]

    monkeypatch.setattr(UcxEngine, "start", start_and_note)
    return started


def are_closed(engines):
    return all(engine.report()["is_closed"] for engine in engines)


def test_last_run_after_disable_leaves_no_ucx_engine(engines, client):
    with dask.config.set({"gpurt.shuffle.transport": "ucx"}):
        dask_gpurt.enable(client)
    with Gate() as gate, dask.config.set({"dataframe.shuffle.method": "p2p"}):
        for worker in client.cluster.workers.values():
            before(worker, "transfer", from_call(2, lambda: pass_gate(gate.path)))
        parts = client.compute(inputs().shuffle("key", npartitions=4).to_delayed())
        gate.wait_for()
        n_before = len(engines)
        dask_gpurt.disable(client)
        gate.open()
        assert_right(client.gather(parts))
    # After the switch-off, no message releases partitions, so none may be waiting for one.
    runtimes = [runtime_of(worker) for worker in client.cluster.workers.values()]
    assert not any(runtime._to_release for runtime in runtimes)
    del parts
    assert len(engines) > n_before
    until(lambda: are_closed(engines))


def test_closed_worker_leaves_no_ucx_engine(engines):
    """The engine may belong to a shuffle that has not ended since the runtime was switched off."""
    with stock_client(1) as client:
        dask_gpurt.enable(client)

        async def link(dask_worker):
            await runtime_of(dask_worker).links.ucx.engine()

        dask_gpurt.disable(client)
        client.run(link)
        assert not are_closed(engines)
    assert are_closed(engines)


def test_required_ucx_without_ucxx_is_a_clear_error(client, without_ucxx):
    message = error_without_ucx(client)
    assert "gpurt.shuffle.transport is ucx" in message
    assert "ucxx" in message


def test_encrypted_cluster_never_uses_ucx(client, monkeypatch, no_peer_in_view):
    monkeypatch.setattr(worker_ucx, "requires_encryption", lambda worker: True)
    assert_comms_serve(client, "ucx", "encrypted")


def test_required_ucx_on_an_encrypted_cluster_is_an_error(client, monkeypatch):
    monkeypatch.setattr(worker_ucx, "requires_encryption", lambda worker: True)
    assert "encrypted" in error_without_ucx(client)


def test_remote_peers_fall_back_to_dask_connections(client, no_peer_in_view, without_ucxx):
    assert_comms_serve(client, "shared", "not visible here")


def test_system_without_memory_files_falls_back(client, monkeypatch, without_ucxx):
    def unsupported(*arguments):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "memfd_create", unsupported)
    assert_comms_serve(client, "shared", "no files in memory")


def test_forgotten_path_is_offered_again(client, monkeypatch):
    dask_gpurt.enable(client)
    shuffled(client)

    def forget(dask_worker):
        runtime_of(dask_worker).links.cool_down()

    client.run(forget)
    opened = []
    open_ = shared.Borrower.open
    monkeypatch.setattr(shared.Borrower, "open", lambda *args: (opened.append(1), open_(*args))[1])
    assert_right(shuffled(client))
    assert len(opened) == 2


def test_path_forgotten_repeatedly_is_an_error(client, monkeypatch):
    open_ = shared.Borrower.open

    def open_and_forget(borrower, descriptor):
        token = open_(borrower, descriptor)
        borrower.forget(token)
        return token

    monkeypatch.setattr(shared.Borrower, "open", open_and_forget)
    dask_gpurt.enable(client)
    with (
        dask.config.set({"distributed.p2p.comm.retry.count": 0}),
        pytest.raises(RuntimeError) as raised,
    ):
        shuffled(client)
    assert "forgets the link" in str(raised.value.__cause__)


# ------------------------------------------------------------------ protocols of the cluster


@pytest.mark.cluster
@pytest.mark.parametrize("in_view", [True, False])
def test_tls_cluster_shuffles_within_and_between_hosts(monkeypatch, in_view):
    """Shards within a host do not use the network; shards between hosts are encrypted."""
    if not in_view:
        monkeypatch.setattr(shared, "process_start", out_of_view)
    security = Security.temporary()
    options = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": ":0"}
    local = LocalCluster(
        processes=False, protocol="tls://", security=security, silence_logs=False, **options
    )
    with local, Client(local, security=security, set_as_default=False) as client:
        dask_gpurt.enable(client)
        assert all(worker.startswith("tls://") for worker in client.scheduler_info()["workers"])
        assert_right(shuffled(client))
        names, reasons = paths(client)
        assert names == {"shared" if in_view else "comm"}
        assert in_view or all("encrypted" in reason["ucx"] for reason in reasons)


@pytest.mark.cluster
@pytest.mark.parametrize("transport", ["auto", "ucx", "comm"])
def test_runtime_works_on_a_ucxx_cluster(ucx, transport):
    """Our engines have to work beside the UCX connections of the cluster itself."""
    pytest.importorskip("distributed_ucxx", reason="the ucx extra is not installed")
    options = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": ":0"}
    with (
        LocalCluster(protocol="ucxx://", host="127.0.0.1", silence_logs=50, **options) as local,
        Client(local, set_as_default=False) as client,
    ):
        with dask.config.set({"gpurt.shuffle.transport": transport}):
            dask_gpurt.enable(client)
        assert all(worker.startswith("ucxx://") for worker in client.scheduler_info()["workers"])
        assert_right(shuffled(client))
        wanted = {"auto": "shared", "ucx": "ucx", "comm": "comm"}[transport]
        assert paths(client)[0] == {wanted}
