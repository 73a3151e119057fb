"""The 22 TPC-H queries for Dask, by number.

The queries themselves are in :mod:`dask_gpurt.demo.tpch_queries_1_11` and
:mod:`dask_gpurt.demo.tpch_queries_12_22`, their SQL and titles in
:mod:`dask_gpurt.demo.tpch_sql`.
"""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd

from dask_gpurt.demo import tpch_queries_1_11 as first
from dask_gpurt.demo import tpch_queries_12_22 as second
from dask_gpurt.demo.tpch_data import TpchTables

Query = Callable[[TpchTables], pd.DataFrame]

#: Each query computes its answer from the tables and returns it with the columns of the SQL.
QUERIES: dict[int, Query] = {
    1: first.q1,
    2: first.q2,
    3: first.q3,
    4: first.q4,
    5: first.q5,
    6: first.q6,
    7: first.q7,
    8: first.q8,
    9: first.q9,
    10: first.q10,
    11: first.q11,
    12: second.q12,
    13: second.q13,
    14: second.q14,
    15: second.q15,
    16: second.q16,
    17: second.q17,
    18: second.q18,
    19: second.q19,
    20: second.q20,
    21: second.q21,
    22: second.q22,
}
