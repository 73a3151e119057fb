"""Times of workers become times of the scheduler, within a bound that holds."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.tracing.clocks import ClockExchange, clock_later_s, fit, shifts
from tests.tracing.clock_model import DelayedLink, SkewedClock

SKEWED = SkewedClock(5.0, 50e-6)


def worst_error_s(clock, found, begin_s, end_s):
    steps = [begin_s + (end_s - begin_s) * k / 100 for k in range(101)]
    return max(abs(found.to_scheduler(clock.read(one)) - one) for one in steps)


@pytest.mark.parametrize("seconds", [1.0, 30.0, 600.0])
@pytest.mark.parametrize("jitter_s", [0.0, 0.5e-3, 5e-3])
def test_error_over_unequal_delays_is_at_most_two_ms(seconds, jitter_s):
    rng = random.Random(1)
    exchanges = DelayedLink(1e-3, 3e-3, jitter_s).rounds(SKEWED, 1000.0, 1000.0 + seconds, rng)
    found = fit(exchanges)
    # Half of the difference of the delays cannot be known. The drift is.
    assert worst_error_s(SKEWED, found, 1000.0, 1000.0 + seconds) <= 2e-3
    assert found.error_s >= worst_error_s(SKEWED, found, 1000.0, 1000.0 + seconds)


@given(
    st.floats(-1e6, 1e6),
    st.floats(-1e-4, 1e-4),
    st.floats(1e-5, 1e-2),
    st.floats(1e-5, 1e-2),
    st.floats(1.0, 1000.0),
    st.integers(0, 2**32),
)
def test_the_bound_holds(offset_s, drift, there_s, back_s, seconds, seed):
    clock = SkewedClock(offset_s, drift)
    link = DelayedLink(there_s, back_s, 1e-4)
    found = fit(link.rounds(clock, 0.0, seconds, random.Random(seed)))
    # The slack is for rounding, drift within rounds, and offsets of a million seconds.
    assert worst_error_s(clock, found, 0.0, seconds) <= found.error_s * 1.05 + 2e-5


def test_one_slow_round_changes_little():
    rng = random.Random(2)
    link = DelayedLink(1e-4, 1e-4)
    exchanges = link.rounds(SKEWED, 0.0, 60.0, rng)
    exchanges[3] = DelayedLink(0.3, 0.001).exchange(SKEWED, 15.0, rng)
    assert worst_error_s(SKEWED, fit(exchanges), 0.0, 60.0) < 1e-4


def test_without_exchanges_there_is_no_fit():
    with pytest.raises(ValueError, match="no exchange"):
        fit([])


def test_two_close_exchanges_show_no_drift():
    close = [ClockExchange(0.0, 5.0, 5.0, 0.001), ClockExchange(0.1, 5.1004, 5.1004, 0.101)]
    assert abs(fit(close).drift) < 1e-4


def test_shifts_respect_the_order_of_messages():
    # 1 is 3 ms late as seen by 0; 2 hears from 1 alone.
    limits = {(0, 1): (0.003, 0.010), (1, 2): (-0.002, -0.001)}
    found = shifts(limits, [0.0, 1e-3, 1e-3])
    assert found[0] == 0.0
    for (a, b), (low, high) in limits.items():
        assert low - 1e-5 <= found[b] - found[a] <= high + 1e-5


def test_nothing_moves_where_all_is_in_order():
    assert shifts({(0, 1): (-1.0, 1.0), (1, 2): (-1.0, 1.0)}, [0.0, 1.0, 1.0]) == [0.0] * 3


def test_the_less_certain_clock_moves_more():
    found = shifts({(1, 2): (0.011, 1.0)}, [0.0, 1e-3, 1e-2])
    assert found[2] == pytest.approx(0.010) and found[1] == pytest.approx(-0.001)


def test_shifts_end_where_messages_contradict_each_other():
    found = shifts({(0, 1): (0.002, 1.0), (1, 0): (0.002, 1.0)}, [0.0, 1e-3])
    assert all(abs(one) < 0.01 for one in found)


def test_the_quickest_comparison_of_clocks_counts():
    # Each comparison reads the clock twice; one of them takes no time.
    ours = iter(range(0, 10**6, 7))
    assert clock_later_s(lambda: float(next(ours)), lambda: 0.0, 3) == 3.5
    times = iter([0.0, 9.0, *[50.0] * 30])
    assert clock_later_s(lambda: next(times), lambda: 20.0, 3) == 30.0


def test_contradictions_around_a_circle_do_not_take_all_rounds(monkeypatch):
    """No shifts meet these limits, and many processes have many limits."""
    limits = dict.fromkeys(((1, 2), (2, 3), (3, 1)), (0.001, 1.0))
    rounds = 0

    class Counted(dict):
        def items(self):
            nonlocal rounds
            rounds += 1
            return super().items()

    found = shifts(Counted(limits), [0.0, 1e-3, 1e-3, 1e-3])
    assert rounds < 100
    assert max(map(abs, found)) < 1e-2
