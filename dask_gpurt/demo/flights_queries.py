"""Queries over the 2013 flights, as a user of :mod:`dask.dataframe` would write them.

They join on keys of several tables and a table with itself, sort fully, index by time and count
distinct values. These plans make Dask move rows between workers. Nothing here refers to this
runtime. The same queries in SQL are in :mod:`dask_gpurt.demo.flights_sql`.
"""

# Dask's DataFrames have no type hints, and almost every line here uses them.
# mypy: disable-error-code="no-untyped-call, no-any-return, attr-defined"

from __future__ import annotations

from collections.abc import Callable

import dask
import pandas as pd

from dask_gpurt.demo.flights_data import FlightTables


def planes(tables: FlightTables) -> pd.DataFrame:
    """Average the delays by the manufacturer of the aircraft."""
    flights = tables.flights.dropna(subset=["dep_delay", "arr_delay"])
    makers = tables.planes[["tailnum", "manufacturer"]]
    joined = flights.merge(makers, on="tailnum", broadcast=False)
    delays = joined.groupby("manufacturer").agg(
        n_flights=("dep_delay", "count"),
        dep_delay=("dep_delay", "mean"),
        arr_delay=("arr_delay", "mean"),
    )
    return delays.reset_index().compute().sort_values("manufacturer").reset_index(drop=True)


def weather(tables: FlightTables) -> pd.DataFrame:
    """Average the departure delays by classes of wind and visibility."""
    hours = tables.weather.dropna(subset=["wind_speed"])
    hours = hours.assign(
        # A wind of 5 to 10 miles an hour is class 1; a visibility of 5 to 10 miles is class 1.
        wind_class=(hours.wind_speed // 5).astype("int64"),
        visib_class=(hours.visib // 5).astype("int64"),
    )
    flights = tables.flights.dropna(subset=["dep_delay"])
    joined = flights.merge(hours, on=["origin", "time_hour"])
    delays = joined.groupby(["wind_class", "visib_class"]).agg(
        n_flights=("dep_delay", "count"), dep_delay=("dep_delay", "mean")
    )
    return (
        delays.reset_index()
        .compute()
        .sort_values(["wind_class", "visib_class"])
        .reset_index(drop=True)
    )


def airports(tables: FlightTables) -> pd.DataFrame:
    """Count flights and cancellations by the name of the destination."""
    names = tables.airports[["faa", "name"]]
    joined = tables.flights.merge(names, left_on="dest", right_on="faa")
    joined = joined.assign(cancelled=joined.dep_time.isna().astype("int64"))
    counts = joined.groupby("name").agg(
        n_flights=("flight", "count"),
        n_cancelled=("cancelled", "sum"),
        arr_delay=("arr_delay", "mean"),
    )
    return (
        counts.reset_index()
        .compute()
        .sort_values(["n_flights", "name"], ascending=[False, True])
        .reset_index(drop=True)
    )


def legs(tables: FlightTables) -> pd.DataFrame:
    """Compare the delays of two departures of one aircraft on one day, by carrier."""
    flights = tables.flights.dropna(subset=["dep_delay", "tailnum"])
    flights = flights[["year", "month", "day", "tailnum", "carrier", "hour", "dep_delay"]]
    pairs = flights.merge(
        flights, on=["year", "month", "day", "tailnum"], suffixes=("_before", "_after")
    )
    pairs = pairs[(pairs.hour_before < pairs.hour_after) & (pairs.dep_delay_before > 30)]
    delays = pairs.groupby("carrier_after").agg(
        n_pairs=("dep_delay_after", "count"),
        before=("dep_delay_before", "mean"),
        after=("dep_delay_after", "mean"),
    )
    return (
        delays.reset_index()
        .rename(columns={"carrier_after": "carrier"})
        .compute()
        .sort_values("carrier")
        .reset_index(drop=True)
    )


def sort(tables: FlightTables) -> pd.DataFrame:
    """Count how many of the most delayed departures account for half of all delay."""
    late = tables.flights[tables.flights.dep_delay > 0]
    late = late.sort_values("dep_delay", ascending=False)
    so_far = late.dep_delay.cumsum()
    total = late.dep_delay.sum()
    n_late, n_half, total_delay = dask.compute(
        late.dep_delay.count(), (so_far <= total / 2).sum(), total
    )
    return pd.DataFrame({"n_late": [n_late], "n_half": [n_half], "total_delay": [total_delay]})


def index(tables: FlightTables) -> pd.DataFrame:
    """Index the flights by hour, then average the delays of every day."""
    flights = tables.flights[["time_hour", "dep_delay", "arr_delay"]]
    daily = flights.set_index("time_hour").resample("1D")
    means = daily.agg({"dep_delay": ["count", "mean"], "arr_delay": ["mean"]}).compute()
    means.columns = ["n_flights", "dep_delay", "arr_delay"]
    return means.rename_axis("day").reset_index()


def distinct(tables: FlightTables) -> pd.DataFrame:
    """Count the different aircraft and routes of each carrier."""
    flights = tables.flights
    aircraft = flights[["carrier", "tailnum"]].dropna().drop_duplicates(split_out=4)
    routes = flights[["carrier", "origin", "dest"]].drop_duplicates(split_out=4)
    counts = aircraft.groupby("carrier").size().rename("n_aircraft").reset_index()
    counts = counts.merge(
        routes.groupby("carrier").size().rename("n_routes").reset_index(), on="carrier"
    )
    named = tables.airlines.merge(counts, on="carrier")
    columns = ["carrier", "name", "n_aircraft", "n_routes"]
    return named[columns].compute().sort_values("carrier").reset_index(drop=True)


#: Each query computes its answer from the tables and returns it with the columns of the SQL.
QUERIES: dict[str, Callable[[FlightTables], pd.DataFrame]] = {
    "planes": planes,
    "weather": weather,
    "airports": airports,
    "legs": legs,
    "sort": sort,
    "index": index,
    "distinct": distinct,
}
