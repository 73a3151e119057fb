"""Launches inside `shaped` request the planned shared memory; all others are unchanged."""

from __future__ import annotations

import pytest

from dask_gpurt.devices.occupancy import shaping
from dask_gpurt.devices.occupancy.architectures import SM80, SM90
from dask_gpurt.devices.occupancy.planner import LaunchPlan, Reason, Refusal, plan
from dask_gpurt.devices.occupancy.resident_blocks import Launch, Limit
from dask_gpurt.devices.occupancy.shaping import (
    Failure,
    LaunchHook,
    LaunchRefusedError,
    Planner,
    shaped,
)
from tests.devices.occupancy.fake_driver import (
    BLOCK,
    FOUR,
    GRID,
    KIB,
    TWO,
    CountingPlanner,
    FakeDriver,
    Made,
    always,
    launch,
)

# ------------------------------------------------------------------ what launches carry


def test_intercepted_launches_change_only_their_shared_memory(hook, driver):
    with shaped(Planner(SM90, 2), always, hook):
        launch(hook)
    assert driver.launches == [Made("k", GRID, BLOCK, TWO, 7)]


def test_launch_outside_of_a_scope_is_unshaped(hook, driver):
    launch(hook)
    with shaped(Planner(SM90, 2), always, hook):
        launch(hook)
    launch(hook)
    launch(hook, shared_nbytes=100)
    assert driver.carried == [0, TWO, 0, 100]


def test_launch_after_an_error_in_a_scope_is_unshaped(hook, driver):
    with pytest.raises(KeyError), shaped(Planner(SM90, 2), always, hook):
        raise KeyError
    launch(hook)
    assert driver.carried == [0]


def test_a_disabled_hook_changes_nothing(driver):
    hook = LaunchHook(driver, enabled=False)
    planner = CountingPlanner(2)
    with shaped(planner, always, hook):
        launch(hook)
    assert driver.carried == [0]
    assert planner.asked == []
    assert driver.asked == {}


def test_scope_does_not_shape_while_nothing_is_pending(hook, driver):
    """Each launch asks, because communication starts and ends within one `with` block."""
    pending = iter([False, True, True, False])
    planner = CountingPlanner(2)
    with shaped(planner, lambda: next(pending), hook):
        launch(hook)
        assert planner.asked == []
        assert driver.asked == {}
        for _ in range(3):
            launch(hook)
    assert driver.carried == [0, TWO, TWO, 0]


def test_shaping_never_lowers_a_launchs_shared_memory(hook, driver):
    """The plan leaves it unchanged, and a planner that asks for less is ignored."""
    with shaped(Planner(SM90, 4), always, hook):
        launch(hook, shared_nbytes=48 * KIB)
    less = LaunchPlan(16, 16, 4, 8, 0, needs_opt_in=False)
    with shaped(lambda _: less, always, hook):
        launch(hook, shared_nbytes=1024)
    assert driver.carried == [48 * KIB, 1024]


def test_the_planner_gets_the_resources_of_the_launch(driver):
    driver.registers, driver.static_nbytes = 40, 3 * KIB
    hook = LaunchHook(driver, enabled=True)
    planner = CountingPlanner(2)
    with shaped(planner, always, hook):
        launch(hook, shared_nbytes=512, block=(8, 4, 3))
    assert planner.asked == [Launch(96, 40, 3 * KIB, 512)]
    assert driver.carried == [TWO - 3 * KIB]


def test_the_driver_refuses_launches_with_too_many_threads(hook, driver):
    with shaped(Planner(SM90, 2), always, hook):
        launch(hook, block=(1025, 1, 1))
    assert driver.carried == [0]
    (decided,) = hook.decisions()
    assert decided.why == Refusal(Reason.DOES_NOT_RUN, 0, frozenset({Limit.THREADS}))


def test_decision_carries_its_reason(hook, driver):
    with shaped(Planner(SM90, 2), always, hook):
        launch(hook)
        launch(hook, block=(1024, 1, 1))
    first, second = hook.decisions()
    assert (first.kernel, first.block, first.asked_nbytes, first.nbytes) == ("k", BLOCK, 0, TWO)
    assert first.why == plan(SM90, Launch(256, 32), 2, pending=True)
    assert (second.asked_nbytes, second.nbytes) == (0, 0)
    assert second.why == Refusal(Reason.FEW_ALREADY, 2, frozenset({Limit.THREADS, Limit.REGISTERS}))


# ------------------------------------------------------------------ more than 48 KiB


def test_the_allowance_is_raised_once_before_the_launch(hook, driver):
    with shaped(Planner(SM90, 2), always, hook):
        for _ in range(5):
            launch(hook)
    assert driver.allowances == [("k", TWO)]
    assert driver.refused == []
    assert driver.carried == [TWO] * 5


def test_a_kernel_without_a_larger_plan_is_unchanged(hook, driver):
    with shaped(Planner(SM90, 4), always, hook):
        launch(hook)
    assert driver.carried == [FOUR]
    assert driver.allowances == []


def test_the_allowance_of_a_kernel_only_grows(hook, driver):
    """The kernel's owner may have launches that need the allowance."""
    driver.set_max_dynamic_shared("k", 200 * KIB)
    with shaped(Planner(SM90, 2), always, hook):
        launch(hook)
    launch(hook, shared_nbytes=200 * KIB)
    assert driver.carried == [TWO, 200 * KIB]
    assert driver.allowances == [("k", 200 * KIB)]


def test_launch_is_unchanged_where_the_device_refuses_the_limit():
    """The table of architectures says that the device allows this limit."""
    driver = FakeDriver(opt_in_nbytes=64 * KIB)
    hook = LaunchHook(driver, enabled=True)
    with shaped(Planner(SM90, 2), always, hook):
        launch(hook)
        launch(hook)
    assert driver.carried == [0, 0]
    assert driver.refused == []
    assert driver.asked == {"k": 1}
    (decided,) = hook.decisions()
    assert isinstance(decided.why, Failure)
    assert "bytes" in str(decided.why)


def test_a_refused_launch_is_repeated_unchanged_and_remembered(hook, driver):
    """The kernel's owner has reset the limit to its own need."""
    with shaped(Planner(SM90, 2), always, hook):
        launch(hook)
        del driver.allowed["k"]
        launch(hook)
        launch(hook)
    assert driver.carried == [TWO, 0, 0]
    assert [made.shared_nbytes for made in driver.refused] == [TWO]
    (decided,) = hook.decisions()
    assert isinstance(decided.why, Failure)
    assert decided.nbytes == 0


def test_a_refusal_of_the_original_launch_is_raised(hook, driver):
    with (
        shaped(Planner(SM90, 2), always, hook),
        pytest.raises(LaunchRefusedError, match=str(100 * KIB)),
    ):
        launch(hook, shared_nbytes=100 * KIB, block=(512, 1, 1))


def test_other_launch_errors_are_not_refusals(hook, driver, monkeypatch):
    """The launch may have run. A second launch would repeat its work."""
    tried = []

    def lost(*arguments):
        tried.append(arguments)
        raise OSError("device lost")

    monkeypatch.setattr(driver, "launch", lost)
    with shaped(Planner(SM90, 2), always, hook), pytest.raises(OSError, match="device lost"):
        launch(hook)
    assert len(tried) == 1


def test_an_unloaded_kernel_is_decided_again(hook, driver):
    with shaped(Planner(SM90, 2), always, hook):
        launch(hook)
        launch(hook, kernel="other")
        hook.forget("k")
        driver.registers, driver.allowed = 255, {}
        launch(hook)
        launch(hook, kernel="other", shared_nbytes=16)
    assert driver.asked == {"k": 2, "other": 2}
    assert driver.carried == [TWO, TWO, 0, 16]


# ------------------------------------------------------------------ what fails costs the shape only


def test_a_failing_planner_leaves_the_launch_unchanged(hook, driver):
    asked = []

    def fails(one):
        asked.append(one)
        raise ZeroDivisionError("planned for nobody")

    with shaped(fails, always, hook):
        launch(hook, shared_nbytes=5)
        launch(hook, shared_nbytes=5)
    assert driver.carried == [5, 5]
    assert len(asked) == 1
    (decided,) = hook.decisions()
    assert "planned for nobody" in str(decided.why)


def test_failing_attributes_leave_the_launch_unchanged(hook, driver, monkeypatch):
    monkeypatch.setattr(driver, "attributes", lambda kernel: 1 // 0)
    with shaped(Planner(SM90, 2), always, hook):
        launch(hook)
    assert driver.carried == [0]
    assert "ZeroDivisionError" in str(hook.decisions()[0].why)


def test_a_failing_pending_leaves_the_launch_unchanged(hook, driver):
    def pending():
        raise RuntimeError("no ledger")

    with shaped(Planner(SM90, 2), pending, hook):
        launch(hook)
    assert driver.carried == [0]
    assert "no ledger" in hook.failure


# ------------------------------------------------------------------ nesting


def test_an_inner_scope_replaces_the_outer_one_until_it_ends(hook, driver):
    with shaped(Planner(SM90, 2), always, hook):
        launch(hook)
        with shaped(Planner(SM90, 4), always, hook):
            launch(hook)
        launch(hook)
    assert driver.carried == [TWO, FOUR, TWO]


def test_an_inner_scope_without_pending_work_is_unshaped(hook, driver):
    with shaped(Planner(SM90, 2), always, hook), shaped(Planner(SM90, 4), lambda: False, hook):
        launch(hook)
    assert driver.carried == [0]


def test_scopes_of_two_devices_do_not_hide_each_other(hook, driver):
    other_driver = FakeDriver()
    other = LaunchHook(other_driver, enabled=True)
    with shaped(Planner(SM90, 2), always, hook), shaped(Planner(SM80, 2), always, other):
        launch(hook)
        launch(other)
    launch(hook)
    launch(other)
    assert driver.carried == [TWO, 0]
    assert other_driver.carried == [55040, 0]


def test_equal_planners_decide_once(hook, driver):
    for _ in range(3):
        with shaped(Planner(SM90, 2), always, hook):
            launch(hook)
    assert driver.asked == {"k": 1}
    assert len(hook.decisions()) == 1


# ------------------------------------------------------------------ cost


def test_a_decided_launch_asks_only_pending(hook, driver):
    planner = CountingPlanner(2)
    n_asked = 0

    def pending():
        nonlocal n_asked
        n_asked += 1
        return True

    with shaped(planner, pending, hook):
        for _ in range(1000):
            launch(hook)
    assert n_asked == 1000
    assert len(planner.asked) == 1
    assert driver.asked == {"k": 1}
    assert driver.allowances == [("k", TWO)]


def test_the_number_of_decisions_is_bounded(hook, driver, monkeypatch):
    monkeypatch.setattr(shaping, "_MOST_DECISIONS", 10)
    for leave in range(1, 25):
        with shaped(Planner(SM90, leave), always, hook):
            for number in range(5):
                launch(hook, kernel=f"kernel {number}")
    assert len(hook.decisions()) <= 10
    assert len(hook._planners) <= 10
    with shaped(Planner(SM90, 2), always, hook):
        launch(hook)
    assert driver.carried[-1] == TWO
