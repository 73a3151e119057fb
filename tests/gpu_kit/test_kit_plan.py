"""Plans carry each archive in time and keep the limits of a call."""

from __future__ import annotations

import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.gpu import __main__ as benchmark
from benchmarks.gpu.kit.__main__ import relative
from benchmarks.gpu.kit.archives import Archive, Part
from benchmarks.gpu.kit.packages import PACKAGES
from benchmarks.gpu.kit.plan import (
    CARRIED_NBYTES,
    CARRIED_PATHS,
    COMMAND_LENGTH,
    MIB,
    PlanError,
    describe,
    plan,
    room_nbytes,
)
from benchmarks.gpu.kit.step import DELIVER
from benchmarks.gpu.kit.steps import CALL_S, STEPS, Step, Work

FOLDER = "build/kit"
ROOM = 57 * MIB


def archive(name, *part_nbytes, unpacked_nbytes=0):
    parts = tuple(Part(f"{name}.{n}", nbytes, "") for n, nbytes in enumerate(part_nbytes))
    return Archive("", unpacked_nbytes, parts)


def real(cudf=(52 * MIB,)):
    sizes = {"tests": (2 * MIB,), "dask": (8 * MIB,), "codecs": (21 * MIB,), "older": (14 * MIB,)}
    archives = {name: archive(name, *parts) for name, parts in (sizes | {"cudf": cudf}).items()}
    assert archives.keys() == PACKAGES.keys()
    return archives


def step(name, *archives, works=()):
    return Step(name, "", archives, (), works)


def check(calls, steps, archives, room):
    """Each archive is there when its step runs, was carried once, and no call is too large."""
    here = []
    for call in calls:
        assert call.nbytes <= room
        assert len(call.carried(FOLDER)) <= CARRIED_PATHS
        assert len(call.command) <= COMMAND_LENGTH
        assert call.most_s <= CALL_S
        here += call.parts
        for one in steps:
            if one.name == call.name:
                assert all(part in here for name in one.archives for part in archives[name].parts)
    assert [call.name for call in calls if call.name != DELIVER] == [one.name for one in steps]
    wanted = {part for one in steps for name in one.archives for part in archives[name].parts}
    assert len(here) == len(wanted) and set(here) == wanted


def test_pruned_kit_needs_a_call_for_each_step():
    calls = plan(STEPS, real(), FOLDER, ROOM)
    check(calls, STEPS, real(), ROOM)
    assert [call.name for call in calls] == ["cupy", "dask", "cudf", "exchange"]
    assert [part.file for part in calls[0].parts] == ["tests.0"]
    assert [part.file for part in calls[2].parts] == ["cudf.0"]


def test_whole_kit_is_delivered_in_calls_before():
    archives = real((57 * MIB,) * 4 + (20 * MIB,))
    calls = plan(STEPS, archives, FOLDER, ROOM)
    check(calls, STEPS, archives, ROOM)
    n_deliveries = sum(call.name == DELIVER for call in calls)
    assert 2 <= n_deliveries <= 4


sizes = st.lists(st.integers(1, 60), min_size=1, max_size=4)


@given(st.lists(sizes, min_size=3, max_size=3), st.integers(60, 150))
def test_every_plan_carries_each_part_once_and_in_time(parts, room):
    archives = {name: archive(name, *some) for name, some in zip("abc", parts, strict=True)}
    steps = [step("one", "a"), step("two", "a", "b"), step("three", "b", "c")]
    check(plan(steps, archives, FOLDER, room), steps, archives, room)


def test_many_small_parts_keep_the_limit_of_paths():
    archives = {"a": archive("a", *[1] * 20)}
    calls = plan([step("one", "a")], archives, FOLDER, ROOM)
    check(calls, [step("one", "a")], archives, ROOM)
    assert len(calls) == 3


def test_part_larger_than_a_call_is_refused():
    with pytest.raises(PlanError, match=r"a\.0 has 60000000 bytes"):
        plan([step("one", "a")], {"a": archive("a", 60_000_000)}, FOLDER, ROOM)


def test_step_that_may_take_too_long_is_refused():
    works = (Work("test_store", 400), Work("facts", 200))
    with pytest.raises(PlanError, match="step one may take"):
        plan([step("one", "a", works=works)], {"a": archive("a", 1)}, FOLDER, ROOM)
    slow = {"a": archive("a", 1, unpacked_nbytes=40 << 30)}
    with pytest.raises(PlanError, match="to unpack"):
        plan([step("one", "a")], slow, FOLDER, ROOM)


def test_command_that_is_too_long_is_refused():
    with pytest.raises(PlanError, match="characters: shorten"):
        plan([step("one", "a")], {"a": archive("a", 1)}, "x" * 2000, ROOM)


def test_room_of_a_call_excludes_the_repository():
    assert room_nbytes(6 * MIB) == CARRIED_NBYTES - 7 * MIB
    with pytest.raises(PlanError, match=r"63\.5 MiB .* remove large files"):
        room_nbytes(int(63.5 * MIB))


def test_plan_tells_files_command_results_and_limit():
    text = describe(plan(STEPS, real(), FOLDER, ROOM), FOLDER)
    (second,) = [block for block in text.split("\n\n") if block.startswith("call 2")]
    assert second.splitlines() == [
        "call 2: dask: Dask, RMM and UCX",
        "  carries  43.0 MiB",
        "           build/kit/manifest.json",
        "           build/kit/dask.0 8.0 MiB",
        "           build/kit/codecs.0 21.0 MiB",
        "           build/kit/older.0 14.0 MiB",
        '  command  python3 -m benchmarks.gpu.kit.step dask --kit build/kit --out "${OUT:?}"',
        "  writes   $OUT/dask.json, $OUT/dask.log",
        f"  limit    {STEPS[1].most_s(0):.0f} s",
    ]


def test_folder_outside_the_repository_is_refused(tmp_path):
    with pytest.raises(PlanError, match=r"that git ignores, such as build/kit"):
        relative(tmp_path)


# ------------------------------------------------------------------ the steps


def test_all_gpu_tests_and_sections_belong_to_a_step():
    works = [work for one in STEPS for work in one.works]
    tests = {path.stem for path in pathlib.Path(__file__).parents[1].glob("gpu/test_*.py")}
    assert {work.name for work in works if work.is_test} == tests
    assert {work.name for work in works if not work.is_test} == set(benchmark.SECTIONS)


def test_section_has_the_time_that_the_benchmark_gives_it():
    for work in (work for one in STEPS for work in one.works):
        if not work.is_test:
            assert work.limit_s >= benchmark.SECTIONS[work.name]


def test_steps_begin_with_the_facts_of_the_device():
    assert {one.works[0].name for one in STEPS} == {"facts"}
