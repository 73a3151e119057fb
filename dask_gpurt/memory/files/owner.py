"""The process that a directory belongs to, and whether it can be shown to be dead.

A file lock alone does not tell. Some network file systems know it on one machine only, so that
another machine can lock the file of a living process. An owner therefore names its process, the
system that the process runs on, and how far its lock can be trusted.

A process is only called dead by a machine that can know it:

- the same system and the same namespace of process ids: the process is looked up;
- the same system and another namespace, as another container: its lock is free, and was taken in
  the same mount, whose locks the system keeps itself;
- the same machine after another boot: no process of the earlier boot is left.

Everything else is unknown, and what is unknown is left alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from enum import Enum
from typing import Any

#: Namespace of process ids of a system itself, outside of all containers. Linux fixes it.
SYSTEM_NAMESPACE = 0xEFFFFFFC
#: Records are shorter. More is not read.
MOST_NBYTES = 4096


class Fate(Enum):
    """What is known of an owner."""

    LIVING = "living"
    DEAD = "dead"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Place:
    """Where a process runs.

    Attributes
    ----------
    host
        Name of the machine.
    machine
        Identity of the installation; empty if it has none. Machines with one image may share it.
    boot
        Random number of this boot of this kernel.
    pid_namespace
        Number of the namespace that process ids belong to.
    """

    host: str
    machine: str
    boot: str
    pid_namespace: int

    def is_same_machine(self, other: Place) -> bool:
        """Whether both are one machine, and not two containers that are called alike."""
        return (
            self.machine != ""
            and (self.host, self.machine) == (other.host, other.machine)
            and self.pid_namespace == other.pid_namespace == SYSTEM_NAMESPACE
        )


@dataclass(frozen=True)
class Owner:
    """A process, and the lock that it holds.

    Attributes
    ----------
    started
        When the process started, in ticks of the system since its boot. A later process of the
        same id has another number, and no clock that is set changes it.
    is_locked
        Whether it holds a lock for as long as it lives.
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
    def place(self) -> Place:
        return Place(self.host, self.machine, self.boot, self.pid_namespace)

    def packed(self) -> bytes:
        """The record, a line of JSON that people can read as well."""
        return json.dumps(asdict(self)).encode() + b"\n"


def unpacked(record: bytes) -> Owner | None:
    """The owner that a record names; None if it is none, or was not written to its end."""
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
    here: Place | None,
    started: Callable[[int], int | None],
    device: int,
    take_lock: Callable[[], bool | None],
) -> Fate:
    """What can be known of an owner from here.

    Parameters
    ----------
    owner
        None if nobody has left a name.
    here
        Where this process runs; None if that cannot be found out.
    started
        Process id to when that process started; None if there is none.
    device
        Number of the mount that the lock is seen in from here.
    take_lock
        Takes the lock of the directory. False if somebody else holds it, None if this cannot be
        known. Only called if it matters.
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
    # Also where the process is known to be gone: a process that it forked off may hold the lock.
    is_free = take_lock() if owner.is_locked else None
    if is_free is False:
        return Fate.LIVING
    if is_free is None and needs_lock:
        return Fate.UNKNOWN
    return Fate.DEAD


def this_place() -> Place | None:
    """Where this process runs; None where the system does not say."""
    try:
        boot = _text("/proc/sys/kernel/random/boot_id")
        pid_namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return None
    try:
        machine = _text("/etc/machine-id")
    except OSError:
        machine = ""
    return Place(os.uname().nodename, machine, boot, pid_namespace)


def this_process(is_locked: bool, device: int) -> Owner | None:
    """This process as an owner; None where the system does not say enough."""
    place, pid = this_place(), os.getpid()
    when = started(pid)
    if place is None or when is None:
        return None
    return Owner(**asdict(place), pid=pid, started=when, is_locked=is_locked, device=device)


def started(pid: int) -> int | None:
    """When a process started, in ticks since boot; None if there is none that still runs."""
    try:
        status = _text(f"/proc/{pid}/stat")
    except OSError:
        return None
    # The name in parentheses may have anything in it.
    state, *numbers = status[status.rindex(")") + 2 :].split()
    return None if state in "ZX" else int(numbers[18])


def _text(path: str) -> str:
    with open(path, "rb") as file:
        return file.read(MOST_NBYTES).decode(errors="replace").strip()
