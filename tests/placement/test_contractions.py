"""Outputs of contractions are assigned to hosts so that few operands cross hosts."""

from __future__ import annotations

from collections import Counter
from itertools import product
from math import isqrt

from hypothesis import assume, given
from hypothesis import strategies as st

from dask_gpurt.placement.contractions import MAX_OVERLOAD, ContractionPlan, Operand, Side, grid

HOSTS = list("abcdefgh")
#: So many rows and columns that every host of any grid gets some.
MANY = 1e6


def shape(n_hosts, rows_nbytes=1, columns_nbytes=1):
    """Return the shape of a grid that depends only on transferred bytes."""
    return grid(n_hosts, Side(MANY, rows_nbytes), Side(MANY, columns_nbytes))


def plan_for(hosts):
    return ContractionPlan(hosts, shape(len(hosts)))


def operands(kind, number, depth=3):
    """Return the operands that all outputs of a row or column need."""
    return [Operand((kind, number, k), 1) for k in range(depth)]


def assign_all(plan, outputs):
    return {(i, j): plan.assign(operands("a", i), operands("b", j)) for i, j in outputs}


def test_two_hosts_form_a_row_unless_first_operands_are_larger():
    assert shape(2) == (1, 2)
    assert shape(2, 1, 2) == (1, 2)
    assert shape(2, 2, 1) == (2, 1)


@given(st.integers(1, 64), st.floats(1, 100), st.floats(1, 100))
def test_no_other_grid_sends_less(n_hosts, rows_nbytes, columns_nbytes):
    def sent(n_rows, n_columns):
        return (n_columns - 1) * rows_nbytes + (n_rows - 1) * columns_nbytes

    found = shape(n_hosts, rows_nbytes, columns_nbytes)
    assert found[0] * found[1] == n_hosts
    others = [(n, n_hosts // n) for n in range(1, n_hosts + 1) if not n_hosts % n]
    assert sent(*found) == min(sent(*one) for one in others)


def test_balanced_grid_is_preferred_to_one_that_sends_less():
    assert grid(4, Side(6, 1), Side(6, 1)) == (2, 2)
    # In a grid of (3, 2), each host makes one row and three columns. In (2, 3), shares differ.
    assert grid(6, Side(3, 3), Side(6, 1)) == (3, 2)
    assert grid(16, Side(14, 1), Side(14, 1)) == (2, 8)
    # In any grid, some hosts would get two rows of outputs and others one.
    assert grid(16, Side(7, 1), Side(7, 1)) is None


@given(st.integers(1, 64), st.integers(1, 40), st.integers(1, 40))
def test_no_host_makes_far_more_than_its_share(n_hosts, n_rows, n_columns):
    found = grid(n_hosts, Side(n_rows, 1), Side(n_columns, 1))
    assume(found is not None)
    hosts = [str(number) for number in range(n_hosts)]
    outputs = product(range(n_rows), range(n_columns))
    made = Counter(assign_all(ContractionPlan(hosts, found), outputs).values())
    assert max(made.values()) <= MAX_OVERLOAD * n_rows * n_columns / n_hosts


def test_square_number_of_hosts_forms_a_square_grid():
    for edge in range(1, 6):
        assert shape(edge**2) == (edge, edge)


@given(st.sampled_from([2, 3, 4, 6, 8]), st.permutations(list(product(range(8), range(8)))))
def test_each_operand_is_needed_in_one_row_or_column_of_hosts(n_hosts, outputs):
    hosts = HOSTS[:n_hosts]
    found = assign_all(plan_for(hosts), outputs)
    n_rows, n_columns = shape(n_hosts)
    assert all(len({found[i, j] for j in range(8)}) <= n_columns for i in range(8))
    assert all(len({found[i, j] for i in range(8)}) <= n_rows for j in range(8))
    counts = Counter(found.values())
    assert set(counts) == set(hosts)
    # 8 rows on 3 hosts are 3, 3 and 2.
    assert max(counts.values()) <= -(-8 // n_rows) * -(-8 // n_columns)


def test_the_first_outputs_of_a_row_are_made_on_different_hosts():
    found = assign_all(plan_for(HOSTS[:2]), product(range(4), range(4)))
    assert [found[0, j] for j in range(4)] == ["a", "b", "a", "b"]
    assert all(found[i, j] == found[0, j] for i in range(4) for j in range(4))


def test_column_goes_to_its_holder_unless_that_host_is_ahead():
    plan = plan_for(HOSTS[:2])
    here = [Operand(("b", j), 1, ("b",)) for j in range(2)]
    assert plan.assign(operands("a", 0), here[:1]) == "b"
    assert plan.assign(operands("a", 0), here[1:]) == "a"


def test_operands_are_spread_evenly_over_hosts_that_use_them():
    plan = plan_for(HOSTS[:4])
    assert plan.host_of_operand(("a", 0, 0)) is None
    found = assign_all(plan, product(range(4), range(4)))
    made = Counter()
    for kind, number, k in product("ab", range(4), range(3)):
        maker = plan.host_of_operand((kind, number, k))
        users = {host for (i, j), host in found.items() if (i if kind == "a" else j) == number}
        assert maker in users
        made[maker] += 1
    assert set(made.values()) == {2 * 4 * 3 // 4}


def test_assigned_output_is_found_by_any_two_operands():
    plan = plan_for(HOSTS[:4])
    assert plan.host_of_product(("a", 0, 0), ("b", 0, 0)) is None
    found = assign_all(plan, product(range(3), range(3)))
    for (i, j), k in product(found, range(3)):
        assert plan.host_of_product(("a", i, k), ("b", j, 2 - k)) == found[i, j]


def test_output_over_several_operand_rows_is_made_on_one_host():
    """A result that adds up several outputs has operands of several rows."""
    plan = plan_for(HOSTS[:2])
    assign_all(plan, product(range(2), range(2)))
    both = [*operands("b", 0), *operands("b", 1)]
    assert plan.assign(operands("a", 5), both) == plan.host_of_product(("a", 5, 0), ("b", 0, 0))


def test_traffic_of_a_square_product_grows_with_the_grid_edge():
    n = 16
    for n_hosts in (4, 16):
        hosts = [str(number) for number in range(n_hosts)]
        found = assign_all(plan_for(hosts), product(range(n), range(n)))
        needed = {("a", i, host) for (i, _), host in found.items()}
        needed |= {("b", j, host) for (_, j), host in found.items()}
        assert len(needed) == 2 * n * isqrt(n_hosts)
