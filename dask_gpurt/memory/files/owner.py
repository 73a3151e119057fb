"""The process that owns a directory, and the proof that it is dead.

A file lock alone is no proof. Some network file systems keep locks on one machine only, so another
machine can lock the file of a living process. So the record of an owner names its process, the
system it runs on, and how far its lock can be trusted.

A process is called dead only in these cases:

- Same system, same process id namespace: the process is looked up.
- Same system, another namespace (another container): the lock is free, and was taken in the same
  mount. The system itself keeps the locks of that mount.
- Same machine, after a reboot: no process of the earlier boot is left.

In all other cases nobody knows whether it lives, and its directory stays.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from enum import Enum
from typing import Any

from dask_gpurt.system_calls import process_start

#: Process id namespace of a system outside of all containers: a constant of Linux.
SYSTEM_NAMESPACE = 0xEFFFFFFC
#: Most bytes that are read of a record.
MOST_NBYTES = 4096


class Fate(Enum):
    """The state of an owner, as far as known."""

    LIVING = "living"
    DEAD = "dead"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class OwnerPlace:
    """The system that a process runs on.

    Attributes
    ----------
    host
        Name of the machine.
    machine
        Identity of the installation; empty if it has none. Machines with one image may share it.
    boot
        Random number of this boot of the kernel.
    pid_namespace
        Number of the process id namespace.
    """

    host: str
    machine: str
    boot: str
    pid_namespace: int

    def is_same_machine(self, other: OwnerPlace) -> bool:
        """Return whether both are one machine, and not two containers of the same name."""
        return (
            self.machine != ""
            and (self.host, self.machine) == (other.host, other.machine)
            and self.pid_namespace == other.pid_namespace == SYSTEM_NAMESPACE
        )


@dataclass(frozen=True)
class Owner:
    """A process and its lock.

    Attributes
    ----------
    started
        Start of the process, in clock ticks since the boot. A later process of the same id has
        another number, and setting the clock does not change it.
    is_locked
        Whether the process holds a lock for as long as it lives.
    device
        Number of the mount that the lock was taken in.
    """

    host: str
    machine: str
    boot: str
    pid_namespace: int
    pid: int
    started: int
    is_locked: bool
    device: int

    @property
    def place(self) -> OwnerPlace:
        return OwnerPlace(self.host, self.machine, self.boot, self.pid_namespace)

    def packed(self) -> bytes:
        """Return the record: a line of JSON, which people can read too."""
        return json.dumps(asdict(self)).encode() + b"\n"


def unpacked(record: bytes) -> Owner | None:
    """Return the owner that a record names; None if the record is invalid or incomplete."""
    try:
        found = json.loads(record)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    values: dict[str, Any] = {}
    for field in fields(Owner):
        value = found.get(field.name)
        if type(value).__name__ != field.type:
            return None
        values[field.name] = value
    return Owner(**values)


def fate(
    owner: Owner | None,
    here: OwnerPlace | None,
    started: Callable[[int], int | None],
    device: int,
    take_lock: Callable[[], bool | None],
) -> Fate:
    """Return the fate of an owner, as far as this process can know it.

    Parameters
    ----------
    owner
        None if the record names none.
    here
        The system that this process runs on; None if unknown.
    started
        Returns when the process of an id started; None if there is no such process.
    device
        Number of the mount in which this process sees the lock.
    take_lock
        Takes the lock. Returns False if another process holds it, None if that is unknown. Called
        only if the answer matters.
    """
    if owner is None or here is None:
        return Fate.UNKNOWN
    needs_lock = False
    if owner.boot == here.boot:
        if owner.pid_namespace != here.pid_namespace:
            if not owner.is_locked or owner.device != device:
                return Fate.UNKNOWN
            needs_lock = True
        elif started(owner.pid) == owner.started:
            return Fate.LIVING
    elif not owner.place.is_same_machine(here):
        return Fate.UNKNOWN
    # Checked even if the owner is gone: a process that it forked may hold the lock.
    is_free = take_lock() if owner.is_locked else None
    if is_free is False:
        return Fate.LIVING
    if is_free is None and needs_lock:
        return Fate.UNKNOWN
    return Fate.DEAD


def this_place() -> OwnerPlace | None:
    """Return the system that this process runs on; None if unknown."""
    try:
        boot = _text("/proc/sys/kernel/random/boot_id")
        pid_namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return None
    try:
        machine = _text("/etc/machine-id")
    except OSError:
        machine = ""
    return OwnerPlace(os.uname().nodename, machine, boot, pid_namespace)


def this_process(is_locked: bool, device: int) -> Owner | None:
    """Return this process as an owner; None if the system does not tell enough."""
    place, pid = this_place(), os.getpid()
    when = started(pid)
    if place is None or when is None:
        return None
    return Owner(**asdict(place), pid=pid, started=when, is_locked=is_locked, device=device)


def started(pid: int) -> int | None:
    """Return when a process started, in ticks since the boot; None if it does not run."""
    try:
        return int(process_start(pid))
    except OSError:
        return None


def _text(path: str) -> str:
    with open(path, "rb") as file:
        return file.read(MOST_NBYTES).decode(errors="replace").strip()
