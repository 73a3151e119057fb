"""Spark: threads of one JVM (`local`), or two executor processes (`local-cluster`).

As "Tuning Spark" and "Performance Tuning" of Spark SQL advise: as many shuffle partitions as there
are outputs, memory for all of the data, Kryo, and adaptive execution, which is on by default. Both
works stay in Spark's own operators: no row goes to Python.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pyspark
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from benchmarks.peers.answers import SAMPLED, WEIGHTS, of_shuffle
from benchmarks.peers.child import AbsentError


class OnSpark:
    def __init__(self, master: str, folder: str, n_partitions: int) -> None:
        home = os.environ.get("JAVA_HOME")
        if not (Path(home, "bin/java").exists() if home else shutil.which("java")):
            raise AbsentError("it needs Java 17 or later: install a JRE, or set JAVA_HOME")
        self._folder, self._n_partitions = folder, n_partitions
        self._settings = {
            "spark.master": master,
            "spark.driver.memory": "4g",
            "spark.executor.memory": "2g",
            "spark.sql.shuffle.partitions": str(n_partitions),
            "spark.serializer": "org.apache.spark.serializer.KryoSerializer",
            "spark.ui.enabled": "false",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
        }
        builder: Any = SparkSession.builder
        self._spark = builder.config(map=self._settings).getOrCreate()
        self._spark.sparkContext.setLogLevel("ERROR")

    def about(self) -> dict[str, Any]:
        java = self._spark.sparkContext._jvm.System.getProperty("java.version")
        versions = {"pyspark": pyspark.__version__, "java": java}
        return {"versions": versions, "settings": self._settings}

    def shuffle(self) -> dict[str, Any]:
        shuffled = self._spark.read.parquet(self._folder).repartition(self._n_partitions, "key")
        found = shuffled.groupBy(F.spark_partition_id().alias("partition")).agg(
            F.count("key").alias("rows"),
            *(F.sum(name).alias(name) for name in ("key", "n", "x", "y")),
            F.collect_set(F.when(F.col("key") % SAMPLED == 0, F.col("key"))).alias("keys"),
        )
        return of_shuffle(row.asDict() for row in found.collect())

    def aggregation(self) -> dict[str, Any]:
        groups = self._spark.read.parquet(self._folder).groupBy("n")
        found = groups.agg(F.sum("x").alias("s"), F.mean("y").alias("m"), F.count("y").alias("c"))
        (row,) = found.agg(
            F.count("n").alias("groups"),
            F.sum("c").alias("rows"),
            F.sum("s").alias("sum"),
            F.sum("m").alias("mean"),
            F.sum(F.col("s") * (F.col("n") % WEIGHTS)).alias("weighted"),
        ).collect()
        found_in_all: dict[str, Any] = row.asDict()
        return found_in_all

    def close(self) -> None:
        self._spark.stop()


def open_session(option: str, folder: str, n_partitions: int) -> OnSpark:
    return OnSpark(option, folder, n_partitions)
