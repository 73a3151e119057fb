"""The queries over the 2013 flights in SQL, as an independent check of the Dask answers.

The same queries for Dask are in :mod:`dask_gpurt.demo.flights_queries`. Both read the same parquet
files.
"""

from __future__ import annotations

#: Columns by which each answer is ordered; empty for answers of one row.
ORDERED_BY: dict[str, list[str]] = {
    "planes": ["manufacturer"],
    "weather": ["wind_class", "visib_class"],
    "airports": ["n_flights", "name"],
    "legs": ["carrier"],
    "sort": [],
    "index": ["day"],
    "distinct": ["carrier"],
}

#: A short title of each query.
TITLES: dict[str, str] = {
    "planes": "delay by manufacturer",
    "weather": "delay by wind and visibility",
    "airports": "flights by destination",
    "legs": "the same aircraft, later that day",
    "sort": "full sort by delay",
    "index": "index by hour, daily means",
    "distinct": "distinct aircraft and routes",
}

_TEXTS: dict[str, str] = {
    "planes": """
        SELECT manufacturer, count(*) AS n_flights,
               avg(dep_delay) AS dep_delay, avg(arr_delay) AS arr_delay
        FROM flights JOIN planes USING (tailnum)
        WHERE dep_delay IS NOT NULL AND arr_delay IS NOT NULL
        GROUP BY manufacturer
        ORDER BY manufacturer
    """,
    "weather": """
        SELECT CAST(floor(wind_speed / 5) AS BIGINT) AS wind_class,
               CAST(floor(visib / 5) AS BIGINT) AS visib_class,
               count(*) AS n_flights, avg(dep_delay) AS dep_delay
        FROM flights JOIN weather USING (origin, time_hour)
        WHERE dep_delay IS NOT NULL AND wind_speed IS NOT NULL
        GROUP BY ALL
        ORDER BY wind_class, visib_class
    """,
    "airports": """
        SELECT name, count(*) AS n_flights,
               sum(CASE WHEN dep_time IS NULL THEN 1 ELSE 0 END) AS n_cancelled,
               avg(arr_delay) AS arr_delay
        FROM flights JOIN airports ON dest = faa
        GROUP BY name
        ORDER BY n_flights DESC, name
    """,
    "legs": """
        SELECT later.carrier, count(*) AS n_pairs,
               avg(earlier.dep_delay) AS before, avg(later.dep_delay) AS after
        FROM flights earlier JOIN flights later USING (year, month, day, tailnum)
        WHERE earlier.hour < later.hour AND earlier.dep_delay > 30
          AND later.dep_delay IS NOT NULL
        GROUP BY later.carrier
        ORDER BY later.carrier
    """,
    # RANGE would give tied flights one common sum, while Dask adds them one after another. The
    # order of tied flights changes no sum.
    "sort": """
        WITH late AS (
            SELECT dep_delay,
                   sum(dep_delay) OVER (ORDER BY dep_delay DESC
                                        ROWS UNBOUNDED PRECEDING) AS so_far
            FROM flights
            WHERE dep_delay > 0)
        SELECT count(*) AS n_late,
               count(*) FILTER (
                   WHERE so_far <= (SELECT sum(dep_delay) FROM late) / 2) AS n_half,
               sum(dep_delay) AS total_delay
        FROM late
    """,
    "index": """
        SELECT date_trunc('day', time_hour) AS day, count(dep_delay) AS n_flights,
               avg(dep_delay) AS dep_delay, avg(arr_delay) AS arr_delay
        FROM flights
        GROUP BY 1
        ORDER BY 1
    """,
    "distinct": """
        SELECT carrier, name, count(DISTINCT tailnum) AS n_aircraft,
               count(DISTINCT (origin, dest)) AS n_routes
        FROM flights JOIN airlines USING (carrier)
        GROUP BY carrier, name
        ORDER BY carrier
    """,
}


def flights_sql(name: str) -> str:
    """Return the SQL text of one query.

    Parameters
    ----------
    name
        A key of :data:`TITLES`.

    Returns
    -------
    str
        One SELECT statement.
    """
    return _TEXTS[name]
