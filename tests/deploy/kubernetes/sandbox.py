"""A pod's container as a process of this machine: what surrounds it, and its command line.

A container gets namespaces of its own for network, processes, mounts, host name and IPC; the
control group and the volumes of its pod; and the user and system call filter that its security
context names. In place of an image it has the files of this machine.

`kubelet.py` runs the commands that this module makes. Only `ControlGroup` touches the system.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

from tests.deploy.kubernetes.patching import Object, value_at

#: The bridge of the node. Pods and services have addresses of its network.
BRIDGE = "cbr0"
NODE_ADDRESS = "10.0.0.1"
NETWORK_BITS = 8
#: The user of our images.
_USER = 1000
_UNITS = {"Ki": 10, "Mi": 20, "Gi": 30}


def make_bridge() -> list[str]:
    """Return commands that make the network of the node, for `ip -batch`."""
    return [
        "link set lo up",
        f"link add {BRIDGE} type bridge",
        f"addr add {NODE_ADDRESS}/{NETWORK_BITS} dev {BRIDGE}",
        f"link set {BRIDGE} up",
    ]


def connect_network(name: str, link: str) -> list[str]:
    """Return commands that make a pod's network and connect it, for `ip -batch`.

    Parameters
    ----------
    name
        Name of the network namespace.
    link
        Name of the node's end of the connection.
    """
    return [
        f"netns add {name}",
        f"link add {link} type veth peer name eth0 netns {name}",
        f"link set {link} master {BRIDGE} up",
    ]


def open_network(address: str) -> list[str]:
    """Return commands that give a pod's network its address, for `ip -batch` inside of it."""
    return [
        "link set lo up",
        f"addr add {address}/{NETWORK_BITS} dev eth0",
        "link set eth0 up",
        # It leads nowhere. Programs ask for it to learn their own address.
        f"route add default via {NODE_ADDRESS}",
    ]


def nbytes(quantity: str) -> int:
    """Return a quantity of Kubernetes in bytes."""
    unit = quantity[-2:]
    return int(quantity[:-2]) << _UNITS[unit] if unit in _UNITS else int(quantity)


@dataclass(frozen=True)
class ControlGroup:
    """The control group that limits a pod's memory.

    Attributes
    ----------
    folder
        The group's folder on this machine.
    mount
        Where a container sees its own group.
    """

    folder: Path
    mount: Path

    @classmethod
    def make(cls, name: str, limit_nbytes: int) -> ControlGroup | None:
        """Make a group; return None if this machine does not allow that."""
        try:
            return cls._of_version_1(name, limit_nbytes) or cls._of_version_2(name, limit_nbytes)
        except OSError:
            return None

    @classmethod
    def _of_version_1(cls, name: str, limit_nbytes: int) -> ControlGroup | None:
        mount = Path("/sys/fs/cgroup/memory")
        ours = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
        inside = [path for _, controllers, path in ours if controllers == "memory"]
        if not inside or not mount.is_dir():
            return None
        folder = mount / inside[0].strip("/") / name
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(limit_nbytes))
        return cls(folder, mount)

    @classmethod
    def _of_version_2(cls, name: str, limit_nbytes: int) -> ControlGroup | None:
        mount = Path("/sys/fs/cgroup")
        # Only where groups have limits already: the machine's own settings are left alone.
        if "memory" not in (mount / "cgroup.subtree_control").read_text().split():
            return None
        folder = mount / name
        folder.mkdir()
        (folder / "memory.max").write_text(str(limit_nbytes))
        return cls(folder, mount)

    def add(self, pid: int) -> None:
        (self.folder / "cgroup.procs").write_text(str(pid))

    def remove(self) -> None:
        """Remove the group, whose processes have ended."""
        self.folder.rmdir()


#: The first process of a container prepares its surroundings as root, then gives that up. The line
#: that it reads tells that the control group has it.
_SCRIPT = Template("""set -e
read ready
mount -t proc proc /proc
hostname $name
$mounts
cd $home
exec $drop $command </dev/null
""")


@dataclass(frozen=True)
class Sandbox:
    """All that surrounds one pod's container.

    Attributes
    ----------
    folder
        The pod's own folder.
    profiles
        Folder with the system call filters that pods may name.
    group
        The pod's control group; None if this machine does not allow one.
    """

    pod: Object
    address: str
    folder: Path
    profiles: Path
    group: ControlGroup | None

    @property
    def container(self) -> Object:
        (only,) = self.pod["spec"]["containers"]
        return only

    @property
    def memory_nbytes(self) -> int | None:
        limit = value_at(self.container, "resources.limits.memory")
        return None if limit is None else nbytes(str(limit))

    def environ(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return the variables of the container."""
        made = {
            **inherited,
            "PATH": os.path.dirname(sys.executable) + os.pathsep + inherited["PATH"],
            "HOSTNAME": self.pod["metadata"]["name"],
            "HOME": str(self.folder),
            "KUBERNETES_SERVICE_HOST": "10.96.0.0",
        }
        return made | {one["name"]: one["value"] for one in self.container.get("env", ())}

    def command(self, network: str, inherited: Mapping[str, str]) -> list[str]:
        """Return the command line that runs the container in its surroundings."""
        script = _SCRIPT.substitute(
            name=shlex.quote(self.pod["metadata"]["name"]),
            mounts="\n".join(self._mounts()),
            home=shlex.quote(str(self.folder)),
            drop=shlex.join(self._drop()),
            command=shlex.join(self._program(inherited)),
        )
        namespaces = ["--mount", "--pid", "--fork", "--kill-child", "--uts", "--ipc"]
        enter = ["nsenter", f"--net=/run/netns/{network}", "unshare", *namespaces]
        return [*enter, "sh", "-c", script]

    def _program(self, inherited: Mapping[str, str]) -> Iterator[str]:
        environ = self.environ(inherited)
        for part in [*self.container.get("command", ()), *self.container.get("args", ())]:
            for name, value in environ.items():
                part = part.replace(f"$({name})", value)
            yield part

    def _mounts(self) -> Iterator[str]:
        volumes = {one["name"]: one for one in self.pod["spec"].get("volumes", ())}
        for mount in self.container.get("volumeMounts", ()):
            where = shlex.quote(mount["mountPath"])
            yield f"mkdir -p {where}"
            if volumes[mount["name"]]["emptyDir"].get("medium") == "Memory":
                yield f"mount -t tmpfs tmpfs {where}"
            else:
                inside = shlex.quote(str(self.folder / "volumes" / mount["name"]))
                yield f"mkdir -p {inside}"
                yield f"mount --bind {inside} {where}"
        if self.group is not None:
            yield f"mount --bind {self.group.folder} {self.group.mount}"

    def _drop(self) -> Iterator[str]:
        """Yield commands that give up rights, as the security context says."""
        context: dict[str, Any] = self.container.get("securityContext") or {}
        limit = self.memory_nbytes
        if self.group is None and limit is not None:
            yield from ("prlimit", f"--rss={limit}")
        # In a user namespace: this machine's files stay readable, and the user has no capability.
        user = context.get("runAsUser", _USER if context.get("runAsNonRoot") else 0)
        yield from ("unshare", "--user", f"--map-user={user}", f"--map-group={user}")
        if context.get("allowPrivilegeEscalation") is False:
            yield from ("setpriv", "--no-new-privs")
        profile = context.get("seccompProfile", {})
        if profile.get("type") == "Localhost":
            filters = Path(__file__).with_name("seccomp.py")
            path = self.profiles / profile["localhostProfile"]
            yield from (sys.executable, str(filters), str(path))
