"""A program with bags, text files, CSV, partitioned Parquet, and a data set of Arrow."""

import json
import pathlib
import tempfile

import dask.bag as db
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow.dataset
from distributed import Client

if __name__ == "__main__":
    generator = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "key": generator.integers(0, 9, 900),
            "name": generator.choice(["ä", "b", "c d"], 900),
            "value": np.arange(900) / 4,
            "when": pd.date_range("2026-01-01", periods=900, freq="h"),
        }
    )
    with (
        tempfile.TemporaryDirectory() as name,
        Client(n_workers=2, threads_per_worker=1, dashboard_address=":0"),
    ):
        folder = pathlib.Path(name)
        lazy = dd.from_pandas(frame, npartitions=6)
        lazy.shuffle("key").to_parquet(folder / "parts", partition_on=["name"], write_index=False)
        read = dd.read_parquet(folder / "parts")
        merged = read.merge(lazy.groupby("key").value.mean().reset_index(), on="key")
        arrow = pyarrow.dataset.dataset(folder / "parts", partitioning="hive").to_table()
        by_time = lazy.set_index("when").value.resample("2D").sum().compute()
        lazy.to_csv(folder / "rows-*.csv", index=False)
        from_csv = dd.read_csv(folder / "rows-*.csv", parse_dates=["when"])
        words = db.from_sequence(
            [f"{w} {i % 5}" for i, w in enumerate("abcab" * 40)], npartitions=5
        )
        words.to_textfiles(folder / "words-*.txt.gz")
        counts = db.read_text(folder / "words-*.txt.gz").map(str.split).flatten().frequencies()
        folded = words.map(str.split).foldby(0, lambda n, _: n + 1, 0, lambda a, b: a + b, 0)
        grouped = words.groupby(lambda word: word[0]).map(lambda pair: (pair[0], len(pair[1])))
        result = {
            "merged": merged.value_y.sum().compute(),
            "rows": len(arrow),
            "columns": sorted(arrow.column_names),
            "by name": read.groupby("name", observed=True)
            .value.sum()
            .compute()
            .sort_index()
            .tolist(),
            "by time": by_time.tolist(),
            "csv": from_csv.value.sum().compute(),
            "unique": sorted(from_csv.name.unique().compute()),
            "counts": sorted(counts.compute()),
            "folded": sorted(folded.compute()),
            "grouped": sorted(grouped.compute()),
        }
    print(json.dumps(result))
