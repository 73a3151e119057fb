"""Resident blocks and plans agree with an independent brute-force search."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from dask_gpurt.devices.occupancy.architectures import ARCHITECTURES, GFX90A, GPUS, SM70, SM80, SM90
from dask_gpurt.devices.occupancy.planner import LaunchPlan, Reason, Refusal, plan, plan_beside
from dask_gpurt.devices.occupancy.resident_blocks import (
    Launch,
    Limit,
    charged_nbytes,
    occupancy,
    shortages,
)

KIB = 1 << 10

# ------------------------------------------------------------------ a search in place of formulas


def shared_table(architecture):
    """Count the blocks that fit, for every size of a block's shared memory."""
    sizes = np.arange(architecture.shared_per_block_opt_in_nbytes + 1)
    granules = np.zeros_like(sizes)
    # The granules of a size: one more for each filled granule.
    filled = np.arange(0, architecture.shared_per_sm_nbytes, architecture.shared_granule_nbytes)
    granules = np.searchsorted(filled, sizes + architecture.shared_reserved_nbytes, side="left")
    blocks = np.zeros(len(sizes), dtype=np.int64)
    in_all = len(filled)
    for n in range(1, architecture.blocks_per_sm + 1):
        blocks += granules * n <= in_all
    return blocks


def fit_by_registers(architecture, registers, warps):
    """Count blocks by placing their warps into the partitions one after the other."""
    lines = -(-registers * architecture.warp_size // architecture.register_granule)
    free = architecture.registers_per_sm // architecture.register_granule
    of_partition = free // architecture.partitions
    places = np.zeros_like(lines)
    for warp in range(1, architecture.warps_per_sm + 1):
        places += (lines * warp <= of_partition) * architecture.partitions
    blocks = np.zeros_like(lines)
    for n in range(1, architecture.blocks_per_sm + 1):
        blocks += n * warps <= places
    # A launch is refused if a block does not fit with its partitions filled evenly.
    even = (warps + architecture.partitions - 1) // architecture.partitions
    runs = (even * lines <= of_partition) & (registers <= architecture.registers_per_thread)
    return np.where(runs, blocks, 0)


def brute_force(architecture, threads, registers):
    """Return the resident blocks, independent of shared memory."""
    warps = np.ceil(threads / architecture.warp_size).astype(np.int64)
    blocks = np.zeros_like(warps)
    for n in range(1, architecture.blocks_per_sm + 1):
        has_barriers = (warps == 1) | (n <= (architecture.barriers_per_sm or n))
        blocks += (n * warps * architecture.warp_size <= architecture.threads_per_sm) & has_barriers
    blocks[threads > architecture.threads_per_block] = 0
    return np.minimum(blocks, fit_by_registers(architecture, registers, warps))


N_CASES = 100_000


def random_cases(architecture, n, rng):
    """Yield launches, mostly of realistic sizes, and some that no device runs."""
    threads = rng.integers(1, architecture.threads_per_block + 40, n)
    usual = rng.random(n) < 0.5
    threads[usual] = rng.choice([32, 64, 128, 256, 512, 1024], n)[usual]
    registers = rng.integers(0, architecture.registers_per_thread + 4, n)
    registers[rng.random(n) < 0.6] //= 4
    shared = rng.integers(0, architecture.shared_per_block_opt_in_nbytes + 4 * KIB, (2, n))
    shared[rng.random((2, n)) < 0.5] //= 32
    shared[rng.random((2, n)) < 0.5] = 0
    leave = rng.integers(1, architecture.blocks_per_sm + 1, n)
    few = rng.random(n) < 0.7
    leave[few] = rng.integers(1, 6, n)[few]
    return threads, registers, shared[0], shared[1], leave


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_plan_agrees_with_a_search_over_all_sizes(name):
    """Compares a hundred thousand launches, each at every possible size."""
    architecture = ARCHITECTURES[name]
    n = N_CASES // len(ARCHITECTURES) + 1
    rng = np.random.default_rng(sum(name.encode()))
    threads, registers, static, dynamic, leave = random_cases(architecture, n, rng)
    table = shared_table(architecture)
    others = brute_force(architecture, threads, registers)
    assert (np.diff(table) <= 0).all()
    # Positions in the table where each number of blocks starts and ends.
    first = [int((table > k).sum()) for k in range(architecture.blocks_per_sm + 1)]
    end = [int((table >= k).sum()) for k in range(architecture.blocks_per_sm + 1)]
    seen: Counter[object] = Counter()
    for t, r, s, d, k, most in zip(
        *(case.tolist() for case in (threads, registers, static, dynamic, leave, others)),
        strict=True,
    ):
        launch = Launch(t, r, s, d)
        runs = s + d < len(table)
        resident = min(most, int(table[s + d])) if runs else 0
        assert occupancy(architecture, launch).blocks == resident
        found = plan(architecture, launch, k, pending=True)
        # Sizes of static plus dynamic memory with exactly k blocks, from the used size on.
        least, beyond = max(first[k], s + d), end[k]
        if resident > k and least < beyond:
            seen["plans"] += 1
            assert isinstance(found, LaunchPlan)
            assert found.blocks == k == int(table[s + found.dynamic_nbytes])
            assert found.unshaped_blocks == resident
            assert found.most_nbytes == beyond - 1 - s
            # The smallest size, up to the rest of a granule that is charged anyway.
            assert 0 <= found.dynamic_nbytes + s - least < architecture.shared_granule_nbytes
        else:
            assert isinstance(found, Refusal)
            assert found.blocks == resident
            seen[found.reason] += 1
            if resident == 0:
                assert found.reason is Reason.DOES_NOT_RUN
            elif resident <= k:
                assert found.reason is Reason.FEW_ALREADY
            else:
                assert found.reason is Reason.NO_SUCH_AMOUNT
    # The cases covered all branches.
    assert seen["plans"] > n // 5
    assert min(seen[Reason.DOES_NOT_RUN], seen[Reason.FEW_ALREADY]) > n // 20


# ------------------------------------------------------------------ worked figures

#: Least and most dynamic bytes, free bytes, and free bytes after one block has ended, for a kernel
#: without static shared memory. Computed without this code, from the same constants.
WORKED = {
    "V100": {
        1: (49408, 98304, 48896, 98304),
        2: (33024, 49152, 32256, 65280),
        3: (24832, 32768, 23808, 48640),
        4: (19712, 24576, 19456, 39168),
        6: (14080, 16384, 13824, 27904),
        8: (11008, 12288, 10240, 21248),
    },
    "T4": {
        1: (33024, 65536, 32512, 65536),
        2: (22016, 32768, 21504, 43520),
        3: (16640, 21760, 15616, 32256),
        4: (13312, 16384, 12288, 25600),
        6: (9472, 10752, 8704, 18176),
        8: (7424, 8192, 6144, 13568),
    },
    "A40": {
        1: (50304, 101376, 51072, 102400),
        2: (33152, 50176, 34048, 68224),
        3: (24704, 33024, 25216, 50944),
        4: (19584, 24576, 19968, 40576),
        6: (13696, 16000, 14080, 28800),
        8: (10368, 11776, 11264, 22656),
    },
    "A100": {
        1: (83072, 166912, 83840, 167936),
        2: (55040, 82944, 55808, 111872),
        3: (41088, 54912, 41600, 83712),
        4: (32640, 40960, 33280, 66944),
        6: (23040, 26880, 23552, 47616),
        8: (17664, 19968, 18432, 37120),
    },
    "H100": {
        1: (115840, 232448, 116608, 233472),
        2: (76928, 115712, 77568, 155520),
        3: (57472, 76800, 57984, 116480),
        4: (45696, 57344, 46592, 93312),
        6: (32384, 37888, 33024, 66432),
        8: (24960, 28160, 25600, 51584),
    },
    "MI250X": {
        1: (33280, 65536, 32256, 65536),
        2: (22016, 32768, 21504, 43520),
        3: (16896, 21504, 14848, 31744),
        4: (13312, 16384, 12288, 25600),
        6: (9728, 10752, 7168, 16896),
        8: (7680, 8192, 4096, 11776),
    },
}
WORKED |= {"L40S": WORKED["A40"], "H200": WORKED["H100"], "B200": WORKED["H100"]}


@pytest.mark.parametrize("name", GPUS)
def test_occupancy_of_worked_examples(name):
    architecture = GPUS[name].architecture
    small = Launch(threads=32, registers=16)
    for blocks, (least, most, free, after_one) in WORKED[name].items():
        found = plan(architecture, small, blocks, pending=True)
        assert (found.dynamic_nbytes, found.most_nbytes, found.free_nbytes) == (least, most, free)
        charged = charged_nbytes(architecture, replace(small, dynamic_nbytes=least))
        assert found.free_nbytes + charged == after_one
        assert found.needs_opt_in == (least > architecture.shared_per_block_nbytes)


@pytest.mark.parametrize(
    ("architecture", "launch", "blocks", "binding"),
    [
        (SM80, Launch(1024, 32), 2, {Limit.THREADS, Limit.REGISTERS}),
        (SM80, Launch(768, 24), 2, {Limit.THREADS}),
        (SM80, Launch(256, 64), 4, {Limit.REGISTERS}),
        (SM80, Launch(32, 16), 32, {Limit.BLOCKS}),
        (SM80, Launch(128, 16, static_nbytes=40 * KIB), 4, {Limit.SHARED_MEMORY}),
        # 51 warps by the size of the register file, 48 by the size of its four partitions.
        (SM80, Launch(96, 40), 16, {Limit.REGISTERS}),
        # A half-empty warp takes as much as a full one.
        (SM80, Launch(33, 128), 8, {Limit.REGISTERS}),
        # A block of 256 threads with 255 registers runs; one more warp does not fit.
        (SM80, Launch(256, 255), 1, {Limit.REGISTERS}),
        (SM80, Launch(288, 255), 0, {Limit.REGISTERS}),
        (SM80, Launch(256, 256), 0, {Limit.REGISTERS}),
        (SM80, Launch(1025, 16), 0, {Limit.THREADS}),
        (SM80, Launch(32, 16, dynamic_nbytes=163 * KIB), 1, {Limit.SHARED_MEMORY}),
        (SM80, Launch(32, 16, dynamic_nbytes=163 * KIB + 1), 0, {Limit.SHARED_MEMORY}),
        (SM70, Launch(64, 0), 32, {Limit.BLOCKS, Limit.THREADS}),
        # Blocks of one wavefront need none of the sixteen barriers.
        (GFX90A, Launch(64, 16), 32, {Limit.THREADS, Limit.BLOCKS}),
        (GFX90A, Launch(65, 16), 16, {Limit.THREADS, Limit.BLOCKS}),
        (GFX90A, Launch(256, 129), 3, {Limit.REGISTERS}),
    ],
)
def test_binding_limits_of_worked_examples(architecture, launch, blocks, binding):
    found = occupancy(architecture, launch)
    assert found.blocks == blocks
    assert found.binding == binding


@pytest.mark.parametrize(
    "needs",
    [
        {"threads": 0, "registers": 1},
        {"threads": 32, "registers": -1},
        {"threads": 32, "registers": 1, "static_nbytes": -1},
        {"threads": 32, "registers": 1, "dynamic_nbytes": -1},
    ],
)
def test_impossible_launches_are_refused(needs):
    with pytest.raises(ValueError):
        Launch(**needs)


# ------------------------------------------------------------------ properties

architectures = st.sampled_from(list(ARCHITECTURES.values()))
launches = st.builds(
    Launch,
    threads=st.integers(1, 1024),
    registers=st.integers(0, 255),
    static_nbytes=st.integers(0, 48 * KIB),
    dynamic_nbytes=st.integers(0, 160 * KIB),
)


@given(architectures, launches, st.integers(0, 64 * KIB))
def test_more_shared_memory_never_admits_more_blocks(architecture, launch, more):
    larger = replace(launch, dynamic_nbytes=launch.dynamic_nbytes + more)
    assert occupancy(architecture, larger).blocks <= occupancy(architecture, launch).blocks


@given(architectures, launches, st.integers(0, 255), st.integers(1, 1024))
def test_more_registers_or_threads_never_allow_more_blocks(architecture, launch, r, t):
    larger = replace(launch, registers=max(r, launch.registers), threads=max(t, launch.threads))
    assert occupancy(architecture, larger).blocks <= occupancy(architecture, launch).blocks


@given(architectures, launches)
def test_leaving_fewer_blocks_takes_more_memory(architecture, launch):
    found = [plan(architecture, launch, k, pending=True) for k in range(1, 33)]
    plans = [one for one in found if isinstance(one, LaunchPlan)]
    assume(plans)
    amounts = [one.dynamic_nbytes for one in plans]
    assert amounts == sorted(amounts, reverse=True)
    assert len(set(amounts)) == len(amounts)
    for one in plans:
        assert one.dynamic_nbytes > launch.dynamic_nbytes
        shaped = replace(launch, dynamic_nbytes=one.dynamic_nbytes)
        assert occupancy(architecture, shaped).blocks == one.blocks
        assert charged_nbytes(architecture, shaped) * one.blocks + one.free_nbytes == (
            architecture.shared_per_sm_nbytes
        )


@given(architectures, launches)
def test_fewest_and_most_are_the_extreme_plans(architecture, launch):
    exact = [plan(architecture, launch, k, pending=True) for k in range(1, 33)]
    plans = [one for one in exact if isinstance(one, LaunchPlan)]
    fewest = plan(architecture, launch, "fewest", pending=True)
    most = plan(architecture, launch, "most", pending=True)
    if plans:
        assert fewest == plans[0]
        assert most == plans[-1]
    else:
        assert isinstance(fewest, Refusal)
        assert isinstance(most, Refusal)


@given(architectures, launches, st.integers(1, 32))
def test_launch_is_unshaped_while_nothing_is_pending(architecture, launch, leave):
    for wanted in (leave, "fewest", "most"):
        found = plan(architecture, launch, wanted, pending=False)
        assert found.reason is Reason.NOTHING_PENDING
    found = plan_beside(architecture, launch, Launch(32, 16), pending=False)
    assert found.reason is Reason.NOTHING_PENDING


# Two of three drawn pairs cannot share a multiprocessor. If none can, hypothesis fails anyway.
@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(architectures, launches, launches, st.booleans())
def test_a_plan_leaves_room_and_one_more_block_would_not(architecture, launch, other, on_turnover):
    found = plan_beside(architecture, launch, other, pending=True, on_turnover=on_turnover)
    ended = int(on_turnover)
    assume(isinstance(found, LaunchPlan))
    shaped = replace(launch, dynamic_nbytes=found.dynamic_nbytes)
    assert occupancy(architecture, shaped).blocks == found.blocks
    assert not shortages(architecture, shaped, found.blocks - ended, other)
    for blocks in range(found.blocks + 1, found.unshaped_blocks):
        gentler = plan(architecture, launch, blocks, pending=True)
        if isinstance(gentler, LaunchPlan):
            gentler = replace(launch, dynamic_nbytes=gentler.dynamic_nbytes)
            assert shortages(architecture, gentler, blocks - ended, other)


# ------------------------------------------------------------------ refusals


def test_registers_that_bind_are_named():
    found = plan(SM90, Launch(1024, 64), 1, pending=True)
    assert found == Refusal(Reason.FEW_ALREADY, 1, frozenset({Limit.REGISTERS}))
    assert str(found) == "no more blocks than that are resident anyway (registers)"


def test_threads_that_bind_are_named():
    found = plan(SM90, Launch(1024, 16), 2, pending=True)
    assert found == Refusal(Reason.FEW_ALREADY, 2, frozenset({Limit.THREADS}))


def test_blocks_that_bind_are_named():
    found = plan(SM90, Launch(32, 16), 32, pending=True)
    assert found == Refusal(Reason.FEW_ALREADY, 32, frozenset({Limit.BLOCKS}))


def test_a_refusal_names_shared_memory_that_binds():
    found = plan(SM90, Launch(128, 32, dynamic_nbytes=100 * KIB), 2, pending=True)
    assert found == Refusal(Reason.FEW_ALREADY, 2, frozenset({Limit.SHARED_MEMORY}))


def test_block_without_opt_in_is_refused_large_shared_memory():
    launch = Launch(256, 32)
    assert plan(SM90, launch, 2, pending=True).needs_opt_in
    found = plan(SM90, launch, 2, pending=True, opt_in=False)
    assert found == Refusal(Reason.BLOCK_MAXIMUM, 8, needed_nbytes=76928)
    # "fewest" is then the number that the usual maximum leaves.
    fewest = plan(SM90, launch, "fewest", pending=True, opt_in=False)
    assert (fewest.blocks, fewest.dynamic_nbytes, fewest.needs_opt_in) == (4, 45696, False)
    assert fewest.most_nbytes == 48 * KIB


@pytest.mark.parametrize(("spare_nbytes", "kind"), [(0, LaunchPlan), (-1, Refusal)])
def test_the_maximum_itself_is_allowed(spare_nbytes, kind):
    largest = plan(SM90, Launch(256, 32), 1, pending=True).dynamic_nbytes
    tight = replace(SM90, shared_per_block_opt_in_nbytes=largest + spare_nbytes)
    assert isinstance(plan(tight, Launch(256, 32), 1, pending=True), kind)


def test_static_memory_counts_towards_the_maximum():
    launch = Launch(256, 32, static_nbytes=10 * KIB)
    found = plan(SM90, launch, 4, pending=True, opt_in=False)
    assert found.dynamic_nbytes == 45696 - 10 * KIB
    assert found.most_nbytes == 38 * KIB


def test_allocation_granularity_can_rule_out_a_block_count():
    launch = Launch(64, 16)
    assert occupancy(GFX90A, launch).blocks == 32
    found = plan(GFX90A, launch, 15, pending=True)
    assert found == Refusal(Reason.NO_SUCH_AMOUNT, 32)
    assert plan(GFX90A, launch, 14, pending=True).blocks == 14
    assert plan(GFX90A, launch, 16, pending=True).blocks == 16


@pytest.mark.parametrize("leave", [0, -1])
def test_leaving_no_block_is_an_error(leave):
    with pytest.raises(ValueError, match="at least one must run"):
        plan(SM90, Launch(128, 32), leave, pending=True)


#: A block of a collective's kernel: 640 threads of 96 registers, and an estimate of its memory.
COLLECTIVE = Launch(640, 96, static_nbytes=36 * KIB, dynamic_nbytes=82240)


def test_collective_kernel_fits_beside_no_ordinary_block():
    """A planner that considered only shared memory would find room that does not exist."""
    found = plan_beside(SM90, Launch(256, 64), COLLECTIVE, pending=True)
    assert found == Refusal(Reason.NO_ROOM, 4, frozenset({Limit.REGISTERS, Limit.SHARED_MEMORY}))
    smaller = replace(COLLECTIVE, static_nbytes=0)
    found = plan_beside(SM90, Launch(256, 64), smaller, pending=True)
    assert found == Refusal(Reason.NO_ROOM, 4, frozenset({Limit.REGISTERS}))


def test_a_collective_kernel_fits_after_a_block_ends():
    found = plan_beside(SM90, Launch(256, 64), COLLECTIVE, pending=True, on_turnover=True)
    assert isinstance(found, LaunchPlan)
    assert found.blocks == 1


def test_a_small_kernel_fits_beside_several_blocks():
    pack = Launch(256, 32, dynamic_nbytes=8 * KIB)
    found = plan_beside(SM90, Launch(256, 32), pack, pending=True)
    assert found.blocks == 7


def test_launch_is_unchanged_where_there_is_room():
    found = plan_beside(
        SM90, Launch(128, 32, static_nbytes=100 * KIB), Launch(128, 32), pending=True
    )
    assert found.reason is Reason.FITS_ALREADY


def test_both_kernels_must_be_able_to_run():
    never = Launch(2000, 32)
    for one, other in ((never, Launch(32, 32)), (Launch(32, 32), never)):
        assert plan_beside(SM90, one, other, pending=True).reason is Reason.DOES_NOT_RUN
    assert plan(SM90, never, 1, pending=True).reason is Reason.DOES_NOT_RUN
