"""Clusters started by `run` and `demo` refuse other users of the machine."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from urllib.request import HTTPCookieProcessor, build_opener

import psutil
import pytest

from dask_gpurt import local_cluster
from dask_gpurt.demo import command as demo
from tests.integration.processes import WITHOUT_HEARTBEATS, environment
from tests.limits import HANG_S
from tests.thoroughness import only_if_all

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

STRANGER = Path(__file__).with_name("stranger.py")

#: A program that computes, prints the scheduler's address, waits for input, and computes again.
SCRIPT = """
    import sys
    import dask
    from distributed import get_client, get_worker, worker_client

    def inside(x):
        assert get_client().submit(int, 4).result() == 4
        with worker_client() as client:
            return client.submit(sum, [x, 1]).result() + len(get_worker().address) * 0

    first = dask.delayed(sum)([1, 2]).compute()
    client = get_client()
    print(client.scheduler.address, flush=True)
    sys.stdin.readline()
    print(dask.delayed(inside)(first).compute(), flush=True)
    print(type(client.security).__name__, client.security.require_encryption, flush=True)
"""


def ports_of(process: psutil.Process) -> list[int]:
    """Return the ports of a process and its children, after a check that all are on loopback."""
    found = set()
    for one in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            for conn in one.net_connections("inet"):
                if conn.status == psutil.CONN_LISTEN:
                    assert conn.laddr.ip in ("127.0.0.1", "::1"), conn
                    found.add(conn.laddr.port)
    return sorted(found)


def assert_keeps_its_key(process: psutil.Process) -> None:
    """Check that no key is in arguments, environments or temporary files, which others can read."""
    for one in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            assert "PRIVATE KEY" not in " ".join([*one.cmdline(), *one.environ().values()])
            for file in one.open_files():
                assert os.stat(file.path).st_mode & 0o077 == 0 or not file.path.endswith(".pem")


def attack(address: str, ports: list[int], marker: Path) -> list[str]:
    """Run an attack as another user; return its successes in words."""
    scheduler = int(address.rpartition(":")[2])
    assert scheduler in ports
    # A user without rights may be unable to read the interpreter, so the program starts first.
    order = [scheduler, *(port for port in ports if port != scheduler)]
    done = subprocess.run(
        [sys.executable, str(STRANGER), str(marker), *map(str, order)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stderr
    return [*done.stdout.splitlines(), *(["its code ran"] if marker.exists() else [])]


def open_dashboard(said: str) -> None:
    """Open the dashboard as its owner, by the address that was printed: all its pages are there."""
    browser = build_opener(HTTPCookieProcessor())
    with browser.open(said.partition("dashboard: ")[2].strip(), timeout=HANG_S) as page:
        assert page.status == 200
        assert b'href="gpurt"' in page.read()


@contextlib.contextmanager
def running_script(directory: Path) -> Iterator[subprocess.Popen[str]]:
    path = directory / "script.py"
    path.write_text(textwrap.dedent(SCRIPT))
    process = subprocess.Popen(
        [sys.executable, "-m", "dask", "gpurt", "run", "--n-workers", "2", str(path)],
        cwd=directory,
        env=environment(**WITHOUT_HEARTBEATS),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@only_if_all
def test_cluster_of_the_run_command_resists_strangers(tmp_path: Path) -> None:
    with running_script(tmp_path) as process:
        assert process.stdout is not None and process.stdin is not None
        address = process.stdout.readline().strip()
        assert address.startswith("tls://127.0.0.1:"), address
        assert process.stderr is not None
        open_dashboard(process.stderr.readline())
        ports = ports_of(psutil.Process(process.pid))
        assert_keeps_its_key(psutil.Process(process.pid))
        # The ports are those of the scheduler, two nannies and two workers.
        assert len(ports) >= 5
        assert attack(address, ports, tmp_path / "marker") == []
        out, err = process.communicate("go on\n", timeout=HANG_S)
        assert out.splitlines() == ["4", "Security True"], err
        assert process.returncode == 0 and "Traceback" not in err, err


def test_clusters_of_the_demo_resist_strangers(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        said: list[str] = []
        client, _ = demo._start_cluster(True, said.append, stack)
        open_dashboard(said[0])
        children = psutil.Process().children(recursive=True)
        ports = {port for child in children for port in ports_of(child)}
        address = client.scheduler.address
        own = int(address.rpartition(":")[2])
        assert attack(address, [own, *sorted(ports - {own})], tmp_path / "marker") == []
        assert client.submit(sum, [1, 2]).result(HANG_S) == 3


def test_no_cluster_starts_without_the_certificate_package(tmp_path: Path) -> None:
    """No unprotected cluster may start. The package is one of our requirements."""
    program = textwrap.dedent(
        """
        import sys
        sys.modules["cryptography"] = None
        from dask_gpurt import local_cluster
        try:
            local_cluster.start(1, 1)
        except local_cluster.InsecureClusterError as error:
            print(error)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert "pip install cryptography" in done.stdout, done.stderr


def test_each_cluster_has_its_own_certificate() -> None:
    one, other = local_cluster.temporary_security(), local_cluster.temporary_security()
    assert one.tls_client_key != other.tls_client_key
    assert one.require_encryption
