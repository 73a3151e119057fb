"""The room in the page cache follows the kernel's limits: the machine's and the control groups'."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dask_gpurt.memory.files.page_cache import PageCache

MIB = 1 << 20
GIB = 1 << 30


class Machine:
    """A machine's `/proc` and control groups, as files."""

    def __init__(self, folder: Path) -> None:
        self.proc = folder / "proc"
        self.groups = folder / "cgroup"
        self.settings = {
            "dirty_background_ratio": 10,
            "dirty_background_bytes": 0,
            "dirty_ratio": 20,
            "dirty_bytes": 0,
        }
        self.memory = {
            "MemTotal": 64 * GIB,
            "MemFree": 10 * GIB,
            "Active(file)": 4 * GIB,
            "Inactive(file)": 6 * GIB,
            "Dirty": 0,
            "Writeback": 0,
        }
        self.of_process = "0::/\n"

    def group(self, path: str, limit: str | int, used: int, **stat: int) -> Path:
        folder = self.groups / path
        folder.mkdir(parents=True, exist_ok=True)
        stat = {"inactive_file": 0, "active_file": 0, "file_dirty": 0, "file_writeback": 0, **stat}
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.high").write_text("max\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text("".join(f"{n} {v}\n" for n, v in stat.items()))
        return folder

    def cache(self) -> PageCache:
        for folder in (self.proc / "self", self.proc / "sys/vm", self.groups):
            folder.mkdir(parents=True, exist_ok=True)
        for name, value in self.settings.items():
            (self.proc / "sys/vm" / name).write_text(f"{value}\n")
        lines = [f"{name}:{nbytes // 1024:>15} kB\n" for name, nbytes in self.memory.items()]
        (self.proc / "meminfo").write_text("".join([*lines, "HugePages_Total:       0\n"]))
        (self.proc / "self/cgroup").write_text(self.of_process)
        return PageCache(self.proc, self.groups)

    def room(self) -> int:
        return self.cache().room_nbytes()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_middle_of_the_two_limits_of_usable_memory_may_be_dirty(machine):
    assert machine.room() == 3 * GIB


def test_files_of_exactly_the_room_are_taken(machine):
    cache = machine.cache()
    assert cache.takes(3 * GIB)
    assert not cache.takes(3 * GIB + 1)


def test_dirty_and_written_pages_count(machine):
    machine.memory.update({"Dirty": GIB, "Writeback": 512 * MIB})
    assert machine.room() == 1536 * MIB
    machine.memory["Dirty"] = 4 * GIB
    assert machine.room() == 0


def test_each_reading_is_fresh(machine):
    cache = machine.cache()
    before = cache.room_nbytes()
    machine.memory["Dirty"] = GIB
    machine.cache()
    assert cache.room_nbytes() == before - GIB


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"dirty_background_bytes": 300 * MIB, "dirty_background_ratio": 0}, 2198 * MIB),
        ({"dirty_background_ratio": 0}, 2 * GIB),
        ({"dirty_background_ratio": 0, "dirty_ratio": 0}, 0),
        # The kernel takes half of the limit if the background's is not below it.
        ({"dirty_background_ratio": 20}, 3 * GIB),
        ({"dirty_bytes": 256 * MIB, "dirty_ratio": 0}, 192 * MIB),
    ],
)
def test_settings_of_the_kernel(machine, settings, expected):
    machine.settings.update(settings)
    assert machine.room() == pytest.approx(expected, abs=1)


def test_limited_group_has_room_of_its_own(machine):
    machine.of_process = "0::/pod/worker\n"
    machine.group("pod/worker", 4 * GIB, 3 * GIB, inactive_file=MIB * 512, active_file=MIB * 512)
    assert machine.room() == pytest.approx(0.15 * 2 * GIB, abs=1)
    machine.group(
        "pod/worker",
        4 * GIB,
        3 * GIB,
        inactive_file=GIB,
        file_dirty=100 * MIB,
        file_writeback=50 * MIB,
    )
    assert machine.room() == pytest.approx(0.15 * 2 * GIB - 150 * MIB, abs=1)


def test_smallest_room_of_all_groups_above_wins(machine):
    machine.of_process = "0::/job/step\n"
    machine.group("job/step", "max", 3 * GIB)
    machine.group("job", 4 * GIB, 3 * GIB)
    assert machine.room() == pytest.approx(0.15 * GIB, abs=1)
    (machine.groups / "job/step/memory.high").write_text(f"{int(3.5 * GIB)}\n")
    assert machine.room() == pytest.approx(0.075 * GIB, abs=1)


def test_group_above_its_limit_has_no_room(machine):
    machine.of_process = "0::/worker\n"
    machine.group("worker", 2 * GIB, 3 * GIB)
    assert machine.room() == 0


def test_container_sees_its_own_group_as_the_root(machine):
    machine.group("", 2 * GIB, GIB)
    assert machine.room() == pytest.approx(0.15 * GIB, abs=1)
    # Its path may be that of the host, which the container does not see.
    machine.of_process = "0::/kubepods/pod7\n"
    assert machine.room() == pytest.approx(0.15 * GIB, abs=1)


@pytest.mark.parametrize(("limit", "expected"), [(4 * GIB, 0), (2**63 - 4096, 3 * GIB)])
@pytest.mark.parametrize("path", ["memory/docker/7", "memory"])
def test_limited_groups_of_version_1_have_no_room(machine, path, limit, expected):
    machine.of_process = "4:cpu:/docker/7\n3:memory,hugetlb:/docker/7\n0::/\n"
    folder = machine.groups / path
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    assert machine.room() == expected


@pytest.mark.parametrize("missing", ["meminfo", "sys/vm/dirty_ratio", "sys/vm/dirty_bytes"])
def test_system_that_does_not_tell_has_no_room(machine, missing):
    machine.cache()
    (machine.proc / missing).unlink()
    assert PageCache(machine.proc, machine.groups).room_nbytes() == 0


@pytest.mark.parametrize("text", ["", "MemFree: many kB\n", "MemFree\n", "Dirty: 0 kB\n"])
def test_unexpected_reports_mean_no_room(machine, text):
    cache = machine.cache()
    (machine.proc / "meminfo").write_text(text)
    assert cache.room_nbytes() == 0


def test_system_without_proc_has_no_room(tmp_path):
    assert not PageCache(tmp_path / "none", tmp_path / "none").takes(1)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports its page cache")
def test_this_kernel_reports_by_the_same_names(machine):
    reported = {line.split(":")[0] for line in Path("/proc/meminfo").read_text().splitlines()}
    assert machine.memory.keys() <= reported
    assert all(Path("/proc/sys/vm", name).exists() for name in machine.settings)
    assert not PageCache().takes(1 << 60)
