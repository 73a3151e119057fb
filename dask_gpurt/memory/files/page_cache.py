"""Room in the page cache: bytes that a process can write without waiting for the disk.

Linux begins to write when a share of the memory that it could use for files is dirty
(`vm.dirty_background_ratio`, 10 % by default). It lets writers wait for the disk from the middle
between that share and a second one (`vm.dirty_ratio`, 20 %). Below, a file costs a copy in memory,
and a file that is removed within seconds may never reach the disk.

So `memory.files.disk_tier` writes through the cache only while there is room. The limits are those
of the kernel (`domain_dirty_limits` and `dirty_freerun_ceiling` in `mm/page-writeback.c`): one for
the machine and one for each control group of this process with a limit. In version 1, groups have
no limit of dirty pages of their own, so a limited one has no room here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

#: Settings of the kernel, in `/proc/sys/vm`. Of each pair, the one in bytes is 0 or wins.
_SETTINGS = ("dirty_background_bytes", "dirty_background_ratio", "dirty_bytes", "dirty_ratio")


class PageCache:
    """The room of this process in the page cache.

    Parameters
    ----------
    proc, groups
        Where the kernel's reports and the control groups are mounted.
    """

    def __init__(self, proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> None:
        self._proc = proc
        # A process hardly ever moves to another group. A container sees its own group as the root.
        self._groups, old = _groups_of_process(proc, groups)
        self._is_told = not any(_is_limited_v1(group) for group in old)
        # Read once, because this is asked before each write: every file that is read releases the
        # interpreter's lock some times, and on a busy worker each of them waits for it again.
        self._settings: dict[str, int] = {}
        try:
            for name in _SETTINGS:
                text = (proc / "sys/vm" / name).read_text(encoding="ascii")
                self._settings[name] = int(text)
        except (OSError, ValueError):
            self._is_told = False

    def takes(self, nbytes: int) -> bool:
        """Return whether a file of that size can be written without waiting for the disk."""
        return nbytes <= self.room_nbytes()

    def room_nbytes(self) -> int:
        """Return the bytes that may still become dirty, 0 if the system does not tell."""
        if not self._is_told:
            return 0
        try:
            seen = _numbers(self._proc / "meminfo")
            usable_nbytes = 1024 * (seen["MemFree"] + seen["Active(file)"] + seen["Inactive(file)"])
            share = self._dirty_share(usable_nbytes)
            dirty_nbytes = 1024 * (seen["Dirty"] + seen["Writeback"])
            rooms = [share * usable_nbytes - dirty_nbytes]
            for group in self._groups:
                if limits := _limits(group):
                    rooms.append(_room_of_group(group, min(limits), share))
        except (OSError, ValueError, LookupError, ZeroDivisionError):
            return 0
        return max(0, int(min(rooms)))

    def _dirty_share(self, usable_nbytes: int) -> float:
        """Return the share of usable memory that may be dirty before writers wait."""
        background, limit = (
            self._settings[f"{name}_bytes"] / usable_nbytes or self._settings[f"{name}_ratio"] / 100
            for name in ("dirty_background", "dirty")
        )
        return ((background if background < limit else limit / 2) + limit) / 2


def _groups_of_process(proc: Path, mount: Path) -> tuple[list[Path], list[Path]]:
    """Return the control groups of this process and those above, of version 2 and of version 1."""
    new: list[Path] = []
    old: list[Path] = []
    try:
        lines = (proc / "self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return new, old
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            new += _upwards(mount, path)
        elif "memory" in controllers.split(","):
            old += _upwards(mount / "memory", path)
    return new, old


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    """Yield a group and the groups above it, up to the mount point."""
    group = mount / path.lstrip("/")
    while group != mount and mount in group.parents:
        yield group
        group = group.parent
    yield mount


def _limits(group: Path) -> list[int]:
    """Return the limits of a group of version 2. The root has none, and no such files."""
    found = []
    for name in ("memory.max", "memory.high"):
        try:
            text = (group / name).read_text(encoding="ascii").strip()
        except OSError:
            continue
        if text != "max":
            found.append(int(text))
    return found


def _room_of_group(group: Path, limit_nbytes: int, share: float) -> float:
    seen = _numbers(group / "memory.stat")
    used_nbytes = int((group / "memory.current").read_text(encoding="ascii"))
    files_nbytes = seen["active_file"] + seen["inactive_file"]
    usable_nbytes = max(0, limit_nbytes - used_nbytes) + files_nbytes
    return share * usable_nbytes - seen["file_dirty"] - seen["file_writeback"]


def _is_limited_v1(group: Path) -> bool:
    """Return whether a group of version 1 has a limit. The kernel's default is near 2**63."""
    try:
        text = (group / "memory.limit_in_bytes").read_text(encoding="ascii")
        return int(text) < 1 << 60
    except (OSError, ValueError):
        return False


def _numbers(path: Path) -> dict[str, int]:
    """Return the numbers of a file with a name and a number in each line."""
    lines = (line.split() for line in path.read_text(encoding="ascii").splitlines())
    return {line[0].removesuffix(":"): int(line[1]) for line in lines}
