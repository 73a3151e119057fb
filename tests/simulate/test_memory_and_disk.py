"""Tasks of a worker wait for memory and for the disk, and bytes take the disk's time."""

from __future__ import annotations

import math

import pytest

from dask_gpurt.simulate.clock import VirtualClock
from dask_gpurt.simulate.memory_and_disk import MemoryAndDisk
from dask_gpurt.simulate.modelled_memory import ModelledMemory
from dask_gpurt.simulate.transfers import Transfers

LIMIT_NBYTES, DISK_NBYTES_PER_S = 1000, 100.0


class Rig:
    """A worker of 1,000 bytes with a disk of 100 bytes a second. Notes when tasks begin."""

    def __init__(self, *upcoming):
        self.clock = VirtualClock()
        self.memory = ModelledMemory(LIMIT_NBYTES, lambda key: {"soon": 1}.get(key, math.inf))
        self.disk = MemoryAndDisk(
            self.memory,
            Transfers(self.clock, {"disk": DISK_NBYTES_PER_S}),
            ("disk",),
            lambda: upcoming,
        )
        self.began_s = {}

    def begin(self, name, *inputs, output_nbytes=0, shards_nbytes=0.0):
        def start():
            self.began_s[name] = self.clock.now_s

        self.disk.begin(inputs, output_nbytes, shards_nbytes, start)

    def finish(self):
        while self.clock.step():
            pass
        return self.began_s


def test_a_task_with_its_inputs_in_memory_begins_at_once():
    rig = Rig()
    rig.disk.keep([("a", 300)])
    rig.begin("task", "a", output_nbytes=300)
    assert rig.began_s == {"task": 0.0}


def test_a_result_above_the_target_goes_to_disk_and_comes_back():
    rig = Rig()
    rig.disk.keep([("soon", 400), ("late", 500)])
    rig.finish()
    assert (rig.clock.now_s, rig.memory.used_nbytes) == (5.0, 400)
    rig.disk.drop("soon")
    rig.begin("task", "late")
    assert rig.finish() == {"task": 10.0}
    assert (rig.memory.written_nbytes, rig.memory.read_nbytes) == (500, 500)


def test_a_task_without_room_waits_for_the_end_of_another():
    rig = Rig()
    rig.begin("first", output_nbytes=800)
    rig.begin("second", output_nbytes=300)
    assert rig.began_s == {"first": 0.0}
    rig.disk.end((), 800)
    rig.disk.keep([("result", 100)])
    assert rig.began_s == {"first": 0.0, "second": 0.0}


def test_a_task_that_never_has_room_begins_alone():
    rig = Rig()
    rig.begin("huge", output_nbytes=5 * LIMIT_NBYTES)
    assert rig.began_s == {"huge": 0.0}
    assert rig.memory.needed_nbytes == 5 * LIMIT_NBYTES


def test_a_task_waits_for_results_on_their_way_to_disk():
    rig = Rig()
    rig.disk.keep([("soon", 500), ("late", 400)])
    rig.begin("task", "soon", output_nbytes=200)
    assert rig.began_s == {}
    assert rig.finish() == {"task": 4.0}


def test_two_tasks_share_one_read():
    rig = Rig()
    rig.disk.keep([("soon", 400), ("late", 500)])
    rig.finish()
    rig.disk.drop("soon")
    rig.begin("one", "late")
    rig.begin("other", "late")
    assert rig.finish() == {"one": 10.0, "other": 10.0}
    assert rig.memory.read_nbytes == 500


def test_inputs_of_the_next_task_are_read_beside_a_running_one():
    rig = Rig(["late"])
    rig.disk.keep([("soon", 400), ("late", 500)])
    rig.finish()
    rig.disk.drop("soon")
    rig.begin("running")
    rig.finish()
    began_s = rig.clock.now_s
    rig.begin("next", "late")
    assert rig.began_s == {"running": 5.0, "next": pytest.approx(began_s)}


def test_shards_beyond_their_share_wait_on_disk():
    rig = Rig()
    rig.disk.take_shards(500.0)
    rig.finish()
    assert (rig.clock.now_s, rig.memory.used_nbytes) == (2.0, 300)
    rig.begin("output", output_nbytes=500, shards_nbytes=500.0)
    assert rig.finish() == {"output": 4.0}
