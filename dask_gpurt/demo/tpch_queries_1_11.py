"""TPC-H queries 1 to 11, as a user of :mod:`dask.dataframe` would write them.

They use filters, merges and groupbys with Dask's defaults. Nothing is persisted, repartitioned or
tuned, and nothing refers to this runtime. Small final results are sorted in pandas. The other half
is :mod:`dask_gpurt.demo.tpch_queries_12_22`; use both through :mod:`dask_gpurt.demo.tpch_queries`.
"""

# Dask's DataFrames have no type hints, and almost every line here uses them.
# mypy: disable-error-code="no-untyped-call, no-any-return"

from __future__ import annotations

import pandas as pd

from dask_gpurt.demo.tpch_data import TpchTables


def q1(tables: TpchTables) -> pd.DataFrame:
    """Sum up the lines shipped until a date, by return flag and status."""
    lines = tables.lineitem
    lines = lines[lines.l_shipdate <= pd.Timestamp("1998-09-02")]
    lines = lines.assign(disc_price=lines.l_extendedprice * (1 - lines.l_discount))
    lines = lines.assign(charge=lines.disc_price * (1 + lines.l_tax))
    summary = lines.groupby(["l_returnflag", "l_linestatus"]).agg(
        sum_qty=("l_quantity", "sum"),
        sum_base_price=("l_extendedprice", "sum"),
        sum_disc_price=("disc_price", "sum"),
        sum_charge=("charge", "sum"),
        avg_qty=("l_quantity", "mean"),
        avg_price=("l_extendedprice", "mean"),
        avg_disc=("l_discount", "mean"),
        count_order=("l_orderkey", "count"),
    )
    return (
        summary.reset_index()
        .compute()
        .sort_values(["l_returnflag", "l_linestatus"])
        .reset_index(drop=True)
    )


def q2(tables: TpchTables) -> pd.DataFrame:
    """Find the European suppliers that sell certain parts at the lowest cost."""
    part = tables.part
    part = part[(part.p_size == 15) & part.p_type.str.endswith("BRASS")]
    europe = tables.region[tables.region.r_name == "EUROPE"]
    suppliers = tables.nation.merge(europe, left_on="n_regionkey", right_on="r_regionkey")
    suppliers = tables.supplier.merge(suppliers, left_on="s_nationkey", right_on="n_nationkey")
    offers = tables.partsupp.merge(suppliers, left_on="ps_suppkey", right_on="s_suppkey")
    offers = part.merge(offers, left_on="p_partkey", right_on="ps_partkey")
    lowest = offers.groupby("p_partkey")["ps_supplycost"].min().reset_index()
    best = offers.merge(lowest, on=["p_partkey", "ps_supplycost"])
    columns = [
        "s_acctbal",
        "s_name",
        "n_name",
        "p_partkey",
        "p_mfgr",
        "s_address",
        "s_phone",
        "s_comment",
    ]
    return (
        best[columns]
        .compute()
        .sort_values(
            ["s_acctbal", "n_name", "s_name", "p_partkey"], ascending=[False, True, True, True]
        )
        .head(100)
        .reset_index(drop=True)
    )


def q3(tables: TpchTables) -> pd.DataFrame:
    """Find the ten unshipped orders of one market segment with the highest value."""
    day = pd.Timestamp("1995-03-15")
    customer = tables.customer[tables.customer.c_mktsegment == "BUILDING"]
    orders = tables.orders[tables.orders.o_orderdate < day]
    lines = tables.lineitem[tables.lineitem.l_shipdate > day]
    joined = customer.merge(orders, left_on="c_custkey", right_on="o_custkey")
    joined = joined.merge(lines, left_on="o_orderkey", right_on="l_orderkey")
    joined = joined.assign(revenue=joined.l_extendedprice * (1 - joined.l_discount))
    totals = joined.groupby(["l_orderkey", "o_orderdate", "o_shippriority"])["revenue"].sum()
    return (
        totals.reset_index()
        .compute()
        .sort_values(["revenue", "o_orderdate"], ascending=[False, True])
        .head(10)
        .reset_index(drop=True)[["l_orderkey", "revenue", "o_orderdate", "o_shippriority"]]
    )


def q4(tables: TpchTables) -> pd.DataFrame:
    """Count the orders of a quarter with at least one late line, by priority."""
    orders = tables.orders
    orders = orders[
        (orders.o_orderdate >= pd.Timestamp("1993-07-01"))
        & (orders.o_orderdate < pd.Timestamp("1993-10-01"))
    ]
    late = tables.lineitem[tables.lineitem.l_commitdate < tables.lineitem.l_receiptdate]
    hit = orders.merge(late, left_on="o_orderkey", right_on="l_orderkey", how="leftsemi")
    counts = hit.groupby("o_orderpriority")["o_orderkey"].count().rename("order_count")
    return counts.reset_index().compute().sort_values("o_orderpriority").reset_index(drop=True)


def q5(tables: TpchTables) -> pd.DataFrame:
    """Sum up what Asian customers bought from suppliers of their own nation in a year."""
    orders = tables.orders
    orders = orders[
        (orders.o_orderdate >= pd.Timestamp("1994-01-01"))
        & (orders.o_orderdate < pd.Timestamp("1995-01-01"))
    ]
    asia = tables.region[tables.region.r_name == "ASIA"]
    nations = tables.nation.merge(asia, left_on="n_regionkey", right_on="r_regionkey")
    customer = tables.customer.merge(nations, left_on="c_nationkey", right_on="n_nationkey")
    joined = customer.merge(orders, left_on="c_custkey", right_on="o_custkey")
    joined = joined.merge(tables.lineitem, left_on="o_orderkey", right_on="l_orderkey")
    joined = joined.merge(
        tables.supplier,
        left_on=["l_suppkey", "c_nationkey"],
        right_on=["s_suppkey", "s_nationkey"],
    )
    joined = joined.assign(revenue=joined.l_extendedprice * (1 - joined.l_discount))
    totals = joined.groupby("n_name")["revenue"].sum().reset_index()
    return totals.compute().sort_values("revenue", ascending=False).reset_index(drop=True)


def q6(tables: TpchTables) -> pd.DataFrame:
    """Sum up the revenue lost to certain discounts in a year."""
    lines = tables.lineitem
    lines = lines[
        (lines.l_shipdate >= pd.Timestamp("1994-01-01"))
        & (lines.l_shipdate < pd.Timestamp("1995-01-01"))
        & lines.l_discount.between(0.05, 0.07)
        & (lines.l_quantity < 24)
    ]
    revenue = (lines.l_extendedprice * lines.l_discount).sum().compute()
    return pd.DataFrame({"revenue": [revenue]})


def q7(tables: TpchTables) -> pd.DataFrame:
    """Sum up the trade between France and Germany by direction and year."""
    lines = tables.lineitem
    lines = lines[
        (lines.l_shipdate >= pd.Timestamp("1995-01-01"))
        & (lines.l_shipdate <= pd.Timestamp("1996-12-31"))
    ]
    nation = tables.nation[tables.nation.n_name.isin(["FRANCE", "GERMANY"])]
    sellers = nation.rename(columns={"n_nationkey": "supp_key", "n_name": "supp_nation"})
    buyers = nation.rename(columns={"n_nationkey": "cust_key", "n_name": "cust_nation"})
    supplier = tables.supplier.merge(sellers, left_on="s_nationkey", right_on="supp_key")
    customer = tables.customer.merge(buyers, left_on="c_nationkey", right_on="cust_key")
    orders = tables.orders.merge(customer, left_on="o_custkey", right_on="c_custkey")
    joined = lines.merge(supplier, left_on="l_suppkey", right_on="s_suppkey")
    joined = joined.merge(orders, left_on="l_orderkey", right_on="o_orderkey")
    joined = joined[joined.supp_nation != joined.cust_nation]
    joined = joined.assign(
        l_year=joined.l_shipdate.dt.year,
        revenue=joined.l_extendedprice * (1 - joined.l_discount),
    )
    keys = ["supp_nation", "cust_nation", "l_year"]
    totals = joined.groupby(keys)["revenue"].sum().reset_index()
    return totals.compute().sort_values(keys).reset_index(drop=True)


def q8(tables: TpchTables) -> pd.DataFrame:
    """Compute Brazil's share of the American market for one type of part, by year."""
    part = tables.part[tables.part.p_type == "ECONOMY ANODIZED STEEL"]
    orders = tables.orders
    orders = orders[
        (orders.o_orderdate >= pd.Timestamp("1995-01-01"))
        & (orders.o_orderdate <= pd.Timestamp("1996-12-31"))
    ]
    america = tables.region[tables.region.r_name == "AMERICA"]
    nations = tables.nation.merge(america, left_on="n_regionkey", right_on="r_regionkey")
    customer = tables.customer.merge(nations, left_on="c_nationkey", right_on="n_nationkey")
    sellers = tables.nation.rename(columns={"n_nationkey": "supp_key", "n_name": "seller"})
    supplier = tables.supplier.merge(
        sellers[["supp_key", "seller"]], left_on="s_nationkey", right_on="supp_key"
    )
    joined = part.merge(tables.lineitem, left_on="p_partkey", right_on="l_partkey")
    joined = joined.merge(orders, left_on="l_orderkey", right_on="o_orderkey")
    joined = joined.merge(customer, left_on="o_custkey", right_on="c_custkey")
    joined = joined.merge(supplier, left_on="l_suppkey", right_on="s_suppkey")
    volume = joined.l_extendedprice * (1 - joined.l_discount)
    joined = joined.assign(
        o_year=joined.o_orderdate.dt.year,
        volume=volume,
        brazil=volume.where(joined.seller == "BRAZIL", 0.0),
    )
    years = joined.groupby("o_year")[["volume", "brazil"]].sum().compute().sort_index()
    return (years.brazil / years.volume).rename("mkt_share").reset_index()


def q9(tables: TpchTables) -> pd.DataFrame:
    """Compute the profit on parts with "green" in their name, by nation and year."""
    part = tables.part[tables.part.p_name.str.contains("green")]
    supplier = tables.supplier.merge(
        tables.nation, left_on="s_nationkey", right_on="n_nationkey"
    ).rename(columns={"n_name": "nation"})
    joined = part.merge(tables.lineitem, left_on="p_partkey", right_on="l_partkey")
    joined = joined.merge(supplier, left_on="l_suppkey", right_on="s_suppkey")
    joined = joined.merge(
        tables.partsupp,
        left_on=["l_suppkey", "l_partkey"],
        right_on=["ps_suppkey", "ps_partkey"],
    )
    joined = joined.merge(tables.orders, left_on="l_orderkey", right_on="o_orderkey")
    price = joined.l_extendedprice * (1 - joined.l_discount)
    joined = joined.assign(
        o_year=joined.o_orderdate.dt.year,
        sum_profit=price - joined.ps_supplycost * joined.l_quantity,
    )
    totals = joined.groupby(["nation", "o_year"])["sum_profit"].sum().reset_index()
    return (
        totals.compute()
        .sort_values(["nation", "o_year"], ascending=[True, False])
        .reset_index(drop=True)
    )


def q10(tables: TpchTables) -> pd.DataFrame:
    """Find the twenty customers who returned most in a quarter."""
    orders = tables.orders
    orders = orders[
        (orders.o_orderdate >= pd.Timestamp("1993-10-01"))
        & (orders.o_orderdate < pd.Timestamp("1994-01-01"))
    ]
    returned = tables.lineitem[tables.lineitem.l_returnflag == "R"]
    joined = tables.customer.merge(orders, left_on="c_custkey", right_on="o_custkey")
    joined = joined.merge(returned, left_on="o_orderkey", right_on="l_orderkey")
    joined = joined.merge(tables.nation, left_on="c_nationkey", right_on="n_nationkey")
    joined = joined.assign(revenue=joined.l_extendedprice * (1 - joined.l_discount))
    keys = ["c_custkey", "c_name", "c_acctbal", "c_phone", "n_name", "c_address", "c_comment"]
    totals = joined.groupby(keys)["revenue"].sum().reset_index()
    columns = [
        "c_custkey",
        "c_name",
        "revenue",
        "c_acctbal",
        "n_name",
        "c_address",
        "c_phone",
        "c_comment",
    ]
    return (
        totals.compute()
        .sort_values("revenue", ascending=False)
        .head(20)
        .reset_index(drop=True)[columns]
    )


def q11(tables: TpchTables) -> pd.DataFrame:
    """Find the parts that make up a notable share of the stock in Germany."""
    nation = tables.nation[tables.nation.n_name == "GERMANY"]
    supplier = tables.supplier.merge(nation, left_on="s_nationkey", right_on="n_nationkey")
    stock = tables.partsupp.merge(supplier, left_on="ps_suppkey", right_on="s_suppkey")
    stock = stock.assign(value=stock.ps_supplycost * stock.ps_availqty)
    threshold = stock.value.sum() * (0.0001 / tables.scale)
    values = stock.groupby("ps_partkey")["value"].sum().reset_index()
    values = values[values.value > threshold]
    return values.compute().sort_values("value", ascending=False).reset_index(drop=True)
