"""The comparison of answers accepts the differences that two engines may have, and no others."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from dask_gpurt.demo.answers import first_difference


@pytest.fixture
def answer() -> pd.DataFrame:
    return pd.DataFrame(
        {
            "name": ["b", "a", "c", "d"],
            "total": [3.0, 2.5, 2.5, 1.0],
            "count": [1, 2, 3, 4],
            "day": pd.to_datetime(["2013-01-01", "2013-01-02", None, "2013-01-04"]),
        }
    )


def test_an_answer_equals_itself(answer: pd.DataFrame) -> None:
    assert first_difference(answer, answer.copy(), ["total"], exact_dtypes=True) is None


def test_tied_rows_may_swap(answer: pd.DataFrame) -> None:
    swapped = answer.iloc[[0, 2, 1, 3]]
    assert first_difference(swapped, answer, ["total"]) is None
    assert "in order, row 1: 'name'" in str(first_difference(swapped, answer, ["total", "name"]))


def test_row_order_counts_only_for_ordered_queries(answer: pd.DataFrame) -> None:
    turned = answer.iloc[::-1]
    assert first_difference(turned, answer) is None
    assert "in order, row 0: 'total' is 1.0, expected 3.0" in str(
        first_difference(turned, answer, ["total"])
    )


def test_sums_in_another_order_are_equal(answer: pd.DataFrame) -> None:
    assert first_difference(answer.assign(total=answer.total * (1 + 1e-13)), answer) is None
    assert first_difference(answer.assign(total=answer.total * (1 + 1e-6)), answer) is not None


def test_a_wrong_value_is_named(answer: pd.DataFrame) -> None:
    wrong = answer.assign(count=[1, 2, 3, 5])
    assert first_difference(wrong, answer) == "row 3 once sorted: 'count' is 5, expected 4"


def test_a_wrong_text_is_cut(answer: pd.DataFrame) -> None:
    wrong = answer.assign(name=["b", "a", "c", "x" * 1000])
    difference = first_difference(wrong, answer)
    assert difference is not None and len(difference) < 200


@pytest.mark.parametrize("rows", [[0, 1, 2], [0, 1, 2, 3, 3]])
def test_a_missing_or_doubled_row_is_named(answer: pd.DataFrame, rows: list[int]) -> None:
    assert first_difference(answer.iloc[rows], answer) == f"{len(rows)} rows, expected 4"


def test_a_row_twice_in_place_of_another_is_found(answer: pd.DataFrame) -> None:
    assert first_difference(answer.iloc[[0, 1, 1, 3]], answer) is not None


@pytest.mark.parametrize("column", ["count", "day"])
def test_a_changed_kind_of_dtype_is_named(answer: pd.DataFrame, column: str) -> None:
    changed = answer.assign(**{column: answer[column].astype(str)})
    assert f"column {column!r} holds text" in str(first_difference(changed, answer))


def test_integers_may_become_floats_unless_dtypes_must_match(answer: pd.DataFrame) -> None:
    floats = answer.assign(count=answer["count"].astype("float64"))
    assert first_difference(floats, answer) is None
    assert "holds float64, expected int64" in str(
        first_difference(floats, answer, exact_dtypes=True)
    )


def test_text_dtypes_of_pandas_and_arrow_are_one_kind(answer: pd.DataFrame) -> None:
    for dtype in ("string[pyarrow]", "object", "category"):
        assert first_difference(answer.assign(name=answer.name.astype(dtype)), answer) is None


def test_a_missing_value_differs_from_any_other(answer: pd.DataFrame) -> None:
    for column in ("name", "total", "day"):
        holed = answer.copy()
        holed.loc[3, column] = None
        assert first_difference(holed, answer) is not None
        assert first_difference(holed, holed.copy()) is None


def test_missing_values_of_all_sorts_are_equal() -> None:
    masked = pd.DataFrame({"x": pd.array([1, None], dtype="Int64")})
    assert first_difference(masked, pd.DataFrame({"x": [1.0, np.nan]})) is None


def test_columns_must_be_the_same(answer: pd.DataFrame) -> None:
    assert "columns are" in str(first_difference(answer[["name"]], answer))


def test_empty_answers_are_equal() -> None:
    assert first_difference(pd.DataFrame({"x": []}), pd.DataFrame({"x": ["a"]}).head(0)) is None
