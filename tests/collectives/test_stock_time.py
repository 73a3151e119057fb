"""The time of stock Dask's copies agrees with a simulation of its rounds and waves."""

from __future__ import annotations

import pytest

from dask_gpurt.collectives.stock_time import card_seconds, fetch_units, replicate_units


@pytest.mark.parametrize(("n_away", "units"), [(0, 0), (1, 2), (2, 2), (3, 4), (8, 4), (9, 6)])
def test_replicate_takes_two_values_a_round(n_away, units):
    # One round makes three holders of each.
    assert replicate_units(n_away) == units


@pytest.mark.parametrize(
    ("n_away", "units"), [(0, 0), (1, 1), (7, 7), (10, 10), (11, 11), (21, 11), (22, 12)]
)
def test_one_worker_serves_ten_and_then_all_serve(n_away, units):
    assert fetch_units(n_away) == units


def test_a_chain_of_hosts_tells_the_time_of_one_card():
    assert card_seconds(1.0, n_hosts=1, n_slices=10) is None
    assert card_seconds(1.0, n_hosts=2, n_slices=10) == 1.0
    assert card_seconds(1.2, n_hosts=4, n_slices=10) == pytest.approx(1.0)
