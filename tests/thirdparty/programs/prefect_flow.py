"""A program with prefect-dask: a flow whose tasks run on a cluster and use its clients."""

import json

import dask.dataframe as dd
import pandas as pd
from prefect import flow, task
from prefect_dask import DaskTaskRunner, get_dask_client


@task
def square(number: int) -> int:
    return number**2


@task
def total(numbers: list[int]) -> int:
    return sum(numbers)


@task(retries=2)
def fails_at_first(number: int) -> int:
    from prefect.runtime import task_run

    if task_run.run_count < 2:
        raise ValueError("at first")
    return number


@task
def shuffle_in_a_task() -> dict[str, float]:
    frame = pd.DataFrame({"key": [i % 7 for i in range(200)], "value": range(200)})
    with get_dask_client(timeout="60s"):
        shuffled = dd.from_pandas(frame, npartitions=4).shuffle("key")
        return {str(k): float(v) for k, v in shuffled.groupby("key").value.sum().compute().items()}


@flow(
    task_runner=DaskTaskRunner(
        cluster_kwargs={"n_workers": 2, "threads_per_worker": 2, "dashboard_address": ":0"}
    )
)
def everything() -> dict[str, object]:
    squares = square.map(list(range(10)))
    sums = total.submit(squares)
    late = fails_at_first.submit(5)
    groups = shuffle_in_a_task.submit()
    return {"sum": sums.result(), "late": late.result(), "groups": groups.result()}


if __name__ == "__main__":
    print(json.dumps(everything(), sort_keys=True))
