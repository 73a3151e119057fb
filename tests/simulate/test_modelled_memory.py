"""A modelled memory writes what is needed last, and counts what goes to disk and comes back."""

from __future__ import annotations

import math

from dask_gpurt.simulate.modelled_memory import ModelledMemory


def memory(limit_nbytes: int = 1000, **needed: float) -> ModelledMemory:
    return ModelledMemory(limit_nbytes, lambda key: needed.get(str(key), math.inf))


def test_results_below_the_target_stay():
    full = memory()
    full.put("a", 600)
    assert full.to_write() == []
    assert (full.used_nbytes, full.needed_nbytes) == (600, 0)


def test_the_result_that_is_needed_last_is_written_first():
    full = memory(soon=1, late=9)
    for key in ("soon", "late"):
        full.put(key, 400)
    assert full.to_write() == [("late", 400)]
    assert full.to_write() == []  # it is on its way
    assert full.used_nbytes == 800
    full.written("late")
    assert (full.used_nbytes, full.written_nbytes) == (400, 400)


def test_results_in_use_are_not_written():
    full = memory(soon=1, late=9)
    for key in ("soon", "late"):
        full.put(key, 400)
    assert full.use(["late"]) == []
    assert full.to_write() == [("soon", 400)]
    full.unuse(["late"])
    full.written("soon")
    assert full.use(["soon"]) == [("soon", 400)]
    assert full.read_nbytes == 400


def test_results_are_read_ahead_as_far_as_there_is_room():
    full = memory(a=1, b=2, c=3)
    for key in "abc":
        full.put(key, 300)
        for written, _ in full.to_write():
            full.written(written)
    assert full.used_nbytes == 600
    full.drop("a")
    assert full.read_ahead("bc") == [("c", 300)]
    assert full.read_ahead("bc") == []
    assert (full.used_nbytes, full.read_nbytes) == (600, 300)


def test_a_result_that_is_used_while_it_is_written_stays():
    full = memory(late=9)
    full.put("late", 700)
    assert full.to_write() == [("late", 700)]
    full.use(["late"])
    full.written("late")
    assert (full.used_nbytes, full.written_nbytes) == (700, 0)


def test_dropped_results_free_their_memory():
    full = memory(late=9)
    full.put("late", 700)
    full.to_write()
    full.drop("late")
    full.written("late")
    assert (full.used_nbytes, full.written_nbytes) == (0, 0)
    full.drop("late")
    assert full.used_nbytes == 0


def test_a_task_needs_room_for_its_output_and_inputs_on_disk():
    full = memory(late=9)
    full.put("late", 300)
    assert full.to_write() == []
    assert full.to_write(wanted_nbytes=400, inputs=["late"]) == []
    assert full.to_write(wanted_nbytes=400) == [("late", 300)]
    assert full.is_writing
    full.written("late")
    assert not full.is_writing
    assert full.on_disk_nbytes(["late", "other"]) == 300
    full.reserve(400)
    assert full.has_room(300, ["late"]) and not full.has_room(301, ["late"])
    full.reserve(-400)
    assert (full.used_nbytes, full.needed_nbytes) == (0, 400)


def test_results_in_use_are_needed_and_others_are_not():
    full = memory(soon=1, late=9)
    for key in ("soon", "late"):
        full.put(key, 400)
    full.use(["soon", "late"])
    full.use(["soon"])
    assert full.needed_nbytes == 800
    full.unuse(["soon", "late"])
    full.reserve(300)  # beside the one that is still in use
    assert full.needed_nbytes == 800
    full.reserve(200)
    assert full.needed_nbytes == 900
    full.drop("soon")
    full.unuse(["soon"])
    full.put("more", 400)
    full.use(["more"])
    assert full.needed_nbytes == 900


def test_shards_beyond_their_share_go_to_disk_and_come_back():
    full = memory()
    assert full.take_shards(200) == 0
    assert full.take_shards(200) == 100
    assert (full.used_nbytes, full.written_nbytes) == (300, 100)
    assert full.give_shards(200) == 50
    assert full.give_shards(200) == 50
    assert (full.used_nbytes, full.read_nbytes) == (0, 100)
    assert full.give_shards(1) == 0
