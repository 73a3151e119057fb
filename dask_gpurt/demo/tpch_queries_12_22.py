"""TPC-H queries 12 to 22, as a user of :mod:`dask.dataframe` would write them.

The same rules apply as in :mod:`dask_gpurt.demo.tpch_queries_1_11`. A groupby has ``split_out`` if
it has almost as many groups as rows, as Dask's documentation advises.
"""

# Dask's DataFrames have no type hints, and almost every line here uses them.
# mypy: disable-error-code="no-untyped-call, no-any-return"

from __future__ import annotations

import pandas as pd

from dask_gpurt.demo.tpch_data import TpchTables


def q12(tables: TpchTables) -> pd.DataFrame:
    """Count the late lines of urgent and of other orders, by shipping mode."""
    lines = tables.lineitem
    lines = lines[
        lines.l_shipmode.isin(["MAIL", "SHIP"])
        & (lines.l_commitdate < lines.l_receiptdate)
        & (lines.l_shipdate < lines.l_commitdate)
        & (lines.l_receiptdate >= pd.Timestamp("1994-01-01"))
        & (lines.l_receiptdate < pd.Timestamp("1995-01-01"))
    ]
    joined = lines.merge(tables.orders, left_on="l_orderkey", right_on="o_orderkey")
    urgent = joined.o_orderpriority.isin(["1-URGENT", "2-HIGH"])
    joined = joined.assign(
        high_line_count=urgent.astype("int64"), low_line_count=(~urgent).astype("int64")
    )
    counts = joined.groupby("l_shipmode")[["high_line_count", "low_line_count"]].sum()
    return counts.reset_index().compute().sort_values("l_shipmode").reset_index(drop=True)


def q13(tables: TpchTables) -> pd.DataFrame:
    """Count customers by how many ordinary orders they placed."""
    orders = tables.orders
    orders = orders[~orders.o_comment.str.contains("special.*requests")]
    joined = tables.customer.merge(orders, left_on="c_custkey", right_on="o_custkey", how="left")
    per_customer = joined.groupby("c_custkey")["o_orderkey"].count().rename("c_count")
    custdist = per_customer.reset_index().groupby("c_count").size().rename("custdist")
    return (
        custdist.reset_index()
        .compute()
        .sort_values(["custdist", "c_count"], ascending=[False, False])
        .reset_index(drop=True)
    )


def q14(tables: TpchTables) -> pd.DataFrame:
    """Compute the share of promoted parts in a month's revenue."""
    lines = tables.lineitem
    lines = lines[
        (lines.l_shipdate >= pd.Timestamp("1995-09-01"))
        & (lines.l_shipdate < pd.Timestamp("1995-10-01"))
    ]
    joined = lines.merge(tables.part, left_on="l_partkey", right_on="p_partkey")
    revenue = joined.l_extendedprice * (1 - joined.l_discount)
    promoted = revenue.where(joined.p_type.str.startswith("PROMO"), 0.0)
    share = (100.0 * promoted.sum() / revenue.sum()).compute()
    return pd.DataFrame({"promo_revenue": [share]})


def q15(tables: TpchTables) -> pd.DataFrame:
    """Find the supplier with the highest revenue in a quarter."""
    lines = tables.lineitem
    lines = lines[
        (lines.l_shipdate >= pd.Timestamp("1996-01-01"))
        & (lines.l_shipdate < pd.Timestamp("1996-04-01"))
    ]
    lines = lines.assign(total_revenue=lines.l_extendedprice * (1 - lines.l_discount))
    revenue = lines.groupby("l_suppkey")["total_revenue"].sum().reset_index()
    top = revenue[revenue.total_revenue == revenue.total_revenue.max()]
    joined = tables.supplier.merge(top, left_on="s_suppkey", right_on="l_suppkey")
    columns = ["s_suppkey", "s_name", "s_address", "s_phone", "total_revenue"]
    return joined[columns].compute().sort_values("s_suppkey").reset_index(drop=True)


def q16(tables: TpchTables) -> pd.DataFrame:
    """Count the suppliers without complaints that sell certain parts, by kind of part."""
    part = tables.part
    part = part[
        (part.p_brand != "Brand#45")
        & ~part.p_type.str.startswith("MEDIUM POLISHED")
        & part.p_size.isin([49, 14, 23, 45, 19, 3, 36, 9])
    ]
    supplier = tables.supplier
    disliked = supplier[supplier.s_comment.str.contains("Customer.*Complaints")]
    keys = disliked.s_suppkey.compute().tolist()
    offers = tables.partsupp[~tables.partsupp.ps_suppkey.isin(keys)]
    joined = part.merge(offers, left_on="p_partkey", right_on="ps_partkey")
    counts = joined.groupby(["p_brand", "p_type", "p_size"])["ps_suppkey"].nunique()
    return (
        counts.rename("supplier_cnt")
        .reset_index()
        .compute()
        .sort_values(
            ["supplier_cnt", "p_brand", "p_type", "p_size"], ascending=[False, True, True, True]
        )
        .reset_index(drop=True)
    )


def q17(tables: TpchTables) -> pd.DataFrame:
    """Compute the yearly revenue lost if small orders of certain parts were refused."""
    part = tables.part
    part = part[(part.p_brand == "Brand#23") & (part.p_container == "MED BOX")]
    joined = part.merge(tables.lineitem, left_on="p_partkey", right_on="l_partkey")
    average = joined.groupby("p_partkey")["l_quantity"].mean().rename("avg_quantity")
    joined = joined.merge(average.reset_index(), on="p_partkey")
    small = joined[joined.l_quantity < 0.2 * joined.avg_quantity]
    # SQL's sum over no rows is null, not zero.
    total = small.l_extendedprice.sum(min_count=1).compute()
    return pd.DataFrame({"avg_yearly": [total / 7.0]})


def q18(tables: TpchTables) -> pd.DataFrame:
    """List the most expensive orders with a total quantity above 300."""
    lines = tables.lineitem
    quantity = lines.groupby("l_orderkey")["l_quantity"].sum(split_out=True).reset_index()
    large = quantity[quantity.l_quantity > 300][["l_orderkey"]]
    orders = tables.orders.merge(large, left_on="o_orderkey", right_on="l_orderkey", how="leftsemi")
    joined = orders.merge(lines, left_on="o_orderkey", right_on="l_orderkey")
    joined = joined.merge(tables.customer, left_on="o_custkey", right_on="c_custkey")
    keys = ["c_name", "c_custkey", "o_orderkey", "o_orderdate", "o_totalprice"]
    totals = joined.groupby(keys)["l_quantity"].sum().rename("sum_quantity").reset_index()
    return (
        totals.compute()
        .sort_values(["o_totalprice", "o_orderdate"], ascending=[False, True])
        .head(100)
        .reset_index(drop=True)
    )


def q19(tables: TpchTables) -> pd.DataFrame:
    """Sum up the revenue of three kinds of parts delivered in person by air."""
    lines = tables.lineitem
    lines = lines[
        lines.l_shipmode.isin(["AIR", "AIR REG"]) & (lines.l_shipinstruct == "DELIVER IN PERSON")
    ]
    joined = tables.part.merge(lines, left_on="p_partkey", right_on="l_partkey")
    small = (
        (joined.p_brand == "Brand#12")
        & joined.p_container.isin(["SM CASE", "SM BOX", "SM PACK", "SM PKG"])
        & joined.l_quantity.between(1, 11)
        & joined.p_size.between(1, 5)
    )
    medium = (
        (joined.p_brand == "Brand#23")
        & joined.p_container.isin(["MED BAG", "MED BOX", "MED PKG", "MED PACK"])
        & joined.l_quantity.between(10, 20)
        & joined.p_size.between(1, 10)
    )
    large = (
        (joined.p_brand == "Brand#34")
        & joined.p_container.isin(["LG CASE", "LG BOX", "LG PACK", "LG PKG"])
        & joined.l_quantity.between(20, 30)
        & joined.p_size.between(1, 15)
    )
    hit = joined[small | medium | large]
    revenue = (hit.l_extendedprice * (1 - hit.l_discount)).sum(min_count=1).compute()
    return pd.DataFrame({"revenue": [revenue]})


def q20(tables: TpchTables) -> pd.DataFrame:
    """List the Canadian suppliers with more of some parts in stock than they need."""
    lines = tables.lineitem
    lines = lines[
        (lines.l_shipdate >= pd.Timestamp("1994-01-01"))
        & (lines.l_shipdate < pd.Timestamp("1995-01-01"))
    ]
    shipped = lines.groupby(["l_partkey", "l_suppkey"])["l_quantity"].sum(split_out=True)
    forest = tables.part[tables.part.p_name.str.startswith("forest")]
    stock = tables.partsupp.merge(
        forest, left_on="ps_partkey", right_on="p_partkey", how="leftsemi"
    )
    stock = stock.merge(
        shipped.reset_index(),
        left_on=["ps_partkey", "ps_suppkey"],
        right_on=["l_partkey", "l_suppkey"],
    )
    plenty = stock[stock.ps_availqty > 0.5 * stock.l_quantity][["ps_suppkey"]]
    canada = tables.nation[tables.nation.n_name == "CANADA"]
    supplier = tables.supplier.merge(canada, left_on="s_nationkey", right_on="n_nationkey")
    hit = supplier.merge(plenty.drop_duplicates(), left_on="s_suppkey", right_on="ps_suppkey")
    return hit[["s_name", "s_address"]].compute().sort_values("s_name").reset_index(drop=True)


def q21(tables: TpchTables) -> pd.DataFrame:
    """Find the Saudi suppliers who alone kept orders of several suppliers waiting."""
    lines = tables.lineitem
    late = lines[lines.l_receiptdate > lines.l_commitdate]
    involved = lines.groupby("l_orderkey")["l_suppkey"].nunique().rename("n_involved")
    to_blame = late.groupby("l_orderkey")["l_suppkey"].nunique().rename("n_to_blame")
    nation = tables.nation[tables.nation.n_name == "SAUDI ARABIA"]
    supplier = tables.supplier.merge(nation, left_on="s_nationkey", right_on="n_nationkey")
    orders = tables.orders[tables.orders.o_orderstatus == "F"]
    joined = late.merge(supplier, left_on="l_suppkey", right_on="s_suppkey")
    joined = joined.merge(orders, left_on="l_orderkey", right_on="o_orderkey")
    joined = joined.merge(involved.reset_index(), on="l_orderkey")
    joined = joined.merge(to_blame.reset_index(), on="l_orderkey")
    joined = joined[(joined.n_involved > 1) & (joined.n_to_blame == 1)]
    waits = joined.groupby("s_name").size().rename("numwait").reset_index()
    return (
        waits.compute()
        .sort_values(["numwait", "s_name"], ascending=[False, True])
        .head(100)
        .reset_index(drop=True)
    )


def q22(tables: TpchTables) -> pd.DataFrame:
    """Count the well-off customers without orders, by country code."""
    customer = tables.customer
    customer = customer.assign(cntrycode=customer.c_phone.str.slice(0, 2))
    customer = customer[customer.cntrycode.isin(["13", "31", "23", "29", "30", "18", "17"])]
    average = customer[customer.c_acctbal > 0.0].c_acctbal.mean().compute()
    customer = customer[customer.c_acctbal > average]
    buyers = tables.orders[["o_custkey"]].drop_duplicates()
    joined = customer.merge(buyers, left_on="c_custkey", right_on="o_custkey", how="left")
    idle = joined[joined.o_custkey.isna()]
    totals = idle.groupby("cntrycode").agg(
        numcust=("c_acctbal", "count"), totacctbal=("c_acctbal", "sum")
    )
    return totals.reset_index().compute().sort_values("cntrycode").reset_index(drop=True)
