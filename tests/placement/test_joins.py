"""Join costs computed once for all candidates equal those computed for each."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.placement.joins import Join
from dask_gpurt.topology.model import LOCAL, Path
from tests.placement import reference
from tests.placement.machines import by_pair, deterministic

WORKERS = "abcdef"
nbytes = st.floats(0, 1e9)


@st.composite
def places(draw):
    """Strategy for asymmetric paths that are as wide as both of their ends."""
    one = st.lists(st.floats(0.1, 10), min_size=len(WORKERS), max_size=len(WORKERS))
    sends, receives, late = (dict(zip(WORKERS, draw(one), strict=True)) for _ in range(3))

    def path(source, target):
        if source == target:
            return LOCAL
        return Path(late[target], 1e6 * sends[source] * receives[target], "any")

    return by_pair(path)


@deterministic
@given(places(), st.dictionaries(st.sampled_from(WORKERS), nbytes, min_size=1), nbytes)
def test_join_cost_of_every_candidate_is_right(found, others, output):
    join = Join(others, found)
    for address in WORKERS:
        expected_s = reference.join_s(address, output, others, found)
        assert join.seconds(address, output) == expected_s
        # Earlier questions do not change the answer.
        assert Join(others, found).seconds(address, output) == expected_s


@deterministic
@given(places(), st.sampled_from(WORKERS), nbytes, nbytes)
def test_join_of_data_on_one_worker_costs_nothing(found, address, one, other):
    assert Join({address: one}, found).seconds(address, other) == 0.0
