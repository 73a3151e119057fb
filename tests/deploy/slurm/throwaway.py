"""A real SLURM that lives for some tests: munged, slurmctld, and a slurmd for each node.

All daemons run on this machine, and all of their files are in one temporary folder. Ports are free
ones, so that several of these can run side by side. Each node offers GPUs that do not exist, so
that SLURM gives them to jobs as it gives real ones.

It needs Debian's packages `slurm-wlm` and `munge`, and root: slurmd starts jobs for other users.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.limits import HANG_S

#: SLURM offers no event for these states.
_POLL_S = 0.05
_N_GPUS = 2
_SEARCHED = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])

_CONFIGURATION = """\
ClusterName=throwaway
SlurmctldHost={host}({controller})
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
# Processes only: no cgroups, no database, no MPI, no mail.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
MailProg=/bin/true
SwitchType=switch/none
# Nodes may have more cores and memory than the machine.
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerParameters=batch_sched_delay=0,sched_min_interval=100000
ReturnToService=2
KillWait=10
MinJobAge=600
GresTypes=gpu
"""


class Node(NamedTuple):
    """A node: its address, and the command that enters its network, if that is another one."""

    name: str
    address: str = "127.0.0.1"
    enter: tuple[str, ...] = ()


class Slurm:
    """The daemons of one SLURM. `running_slurm` starts them."""

    def __init__(self, folder: Path, nodes: Sequence[Node], controller: str) -> None:
        self.folder = folder
        self._nodes = nodes
        self._controller = controller
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.configuration = folder / "slurm.conf"
        self._environ = {**os.environ, "SLURM_CONF": str(self.configuration), "PATH": _SEARCHED}

    def start(self) -> None:
        """Write the configuration, start the daemons, and wait until all nodes are idle."""
        self._write_configuration()
        folder = self.folder
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "seed-file": "seed"}
        named = [f"--{option}={folder}/munge.{end}" for option, end in files.items()]
        self._start(["munged", "--foreground", "--force", *named])
        self._await((folder / "munge.socket").exists, "munged did not start")
        self._start(["slurmctld", "-D", "-i"])
        for node in self._nodes:
            (folder / f"spool-{node.name}").mkdir()
            self._start([*node.enter, "slurmd", "-D", "-N", node.name])
        self._await(self._is_idle, "not all nodes of SLURM became idle")

    def _write_configuration(self) -> None:
        folder = self.folder
        (folder / "state").mkdir()
        # Others must be able to reach the socket, and nobody else may read the key.
        folder.chmod(0o755)
        key = folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(1024))
        for number in range(_N_GPUS):
            # slurmd wants a character device, takes the GPU's number from its name, and never
            # opens it. This one is a copy of /dev/null.
            try:
                os.mknod(folder / f"gpu{number}", stat.S_IFCHR | 0o600, os.makedev(1, 3))
            except PermissionError:
                pytest.skip("a SLURM needs the right to make device files")
        ports = free_ports(1 + len(self._nodes))
        host = socket.gethostname().partition(".")[0]
        lines = _CONFIGURATION.format(
            host=host, controller=self._controller, folder=folder, ports=ports
        )
        gpus = ""
        for node, port in zip(self._nodes, ports[1:], strict=True):
            lines += f"NodeName={node.name} NodeHostname={host} NodeAddr={node.address} "
            lines += f"Port={port} CPUs=16 RealMemory=64000 Gres=gpu:{_N_GPUS} State=UNKNOWN\n"
            gpus += f"NodeName={node.name} Name=gpu File={folder}/gpu[0-{_N_GPUS - 1}]\n"
        # Each job goes to the node with the fewest.
        lines += "PartitionName=debug Nodes=ALL Default=YES LLN=YES MaxTime=INFINITE State=UP\n"
        self.configuration.write_text(lines)
        (folder / "gres.conf").write_text(gpus)
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")

    def _start(self, command: list[str]) -> None:
        log = self.folder / f"daemon-{len(self._daemons)}.log"
        with log.open("wb") as file:
            daemon = subprocess.Popen(
                # The daemons end with this process, even if it is killed.
                ["setpriv", "--pdeathsig", "TERM", *command],
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._daemons.append(daemon)

    def _await(self, is_so: Callable[[], bool], what: str) -> None:
        give_up = time.monotonic() + HANG_S
        while not is_so():
            ended = [one.args for one in self._daemons if one.poll() is not None]
            if ended or time.monotonic() > give_up:
                logs = [path.read_text()[-2000:] for path in self.folder.glob("daemon-*.log")]
                raise AssertionError("\n".join([what, f"ended: {ended}", *logs]))
            # The wait ends early if the daemon does.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._daemons[-1].wait(_POLL_S)

    def _is_idle(self) -> bool:
        asked = self._call("sinfo", "-h", "-N", "-t", "idle", "-o", "%N")
        return {*asked.stdout.split()} == {node.name for node in self._nodes}

    def _call(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, env=self._environ, capture_output=True, text=True, timeout=HANG_S
        )

    def ask(self, *command: str) -> str:
        """Run a command of SLURM, which has to succeed, and return its output."""
        found = self._call(*command)
        assert found.returncode == 0, f"{command}: {found.stderr}"
        return found.stdout

    def states(self) -> dict[str, str]:
        """Return the state of each job, also of those that ended, by its id."""
        lines = self.ask("squeue", "-h", "-t", "all", "-o", "%i %T").splitlines()
        return dict(line.split() for line in lines)

    def wait_for_state(self, job: str, *states: str) -> None:
        """Return once a job is in one of these states."""
        self._await(
            lambda: self.states()[job] in states, f"job {job} did not become {' or '.join(states)}"
        )

    def close(self) -> None:
        """Cancel all jobs, and stop the daemons."""
        try:
            # It fails if SLURM never started; then there are no jobs.
            if self._call("scancel", "--user=root").returncode == 0:
                self._await(lambda: not self.ask("squeue", "-h"), "jobs did not end")
        finally:
            for daemon in reversed(self._daemons):
                daemon.terminate()
                try:
                    daemon.wait(HANG_S / 4)
                except subprocess.TimeoutExpired:
                    daemon.kill()
                    daemon.wait()


def free_ports(n_ports: int) -> list[int]:
    """Return ports that are free, and that the system gives to nobody who asks for any port."""
    with contextlib.ExitStack() as stack:
        found: list[int] = []
        for port in random.sample(range(10_000, 32_000), 100):
            listener = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                listener.bind(("", port))
                found.append(port)
            if len(found) == n_ports:
                return found
    raise AssertionError("there are no free ports")


def why_not_here() -> str | None:
    """Return why SLURM cannot run on this machine, if so."""
    for command in ("setpriv", "munged", "slurmctld", "slurmd", "sbatch"):
        if shutil.which(command, path=_SEARCHED) is None:
            return f"a SLURM needs Debian's packages slurm-wlm, munge and util-linux: no {command}"
    return None if os.geteuid() == 0 else "a SLURM needs root"


@contextlib.contextmanager
def running_slurm(
    nodes: Sequence[Node] = (Node("n1"), Node("n2")), controller: str = "127.0.0.1"
) -> Iterator[Slurm]:
    """Start a SLURM that the commands of this process use; skip the test if that is impossible."""
    if (reason := why_not_here()) is not None:
        pytest.skip(reason)
    # pytest's temporary folders have paths that are too long for a socket.
    with (
        tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        slurm = Slurm(Path(folder), nodes, controller)
        try:
            slurm.start()
            patch.setenv("SLURM_CONF", str(slurm.configuration))
            yield slurm
        finally:
            slurm.close()
