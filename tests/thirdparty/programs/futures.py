"""A program with distributed's futures, actors, queues, locks and other primitives."""

import json

from distributed import (
    Client,
    Event,
    Lock,
    Queue,
    Semaphore,
    Variable,
    Worker,
    as_completed,
    get_client,
    get_worker,
    rejoin,
    secede,
    worker_client,
)


class Counter:
    """An actor."""

    def __init__(self) -> None:
        self.n = 0

    def add(self, amount: int) -> int:
        self.n += amount
        return self.n


def fibonacci(n: int) -> int:
    if n < 2:
        return n
    client = get_client()
    futures = [client.submit(fibonacci, n - 1), client.submit(fibonacci, n - 2)]
    secede()
    results = client.gather(futures)
    rejoin()
    return sum(results)


def with_worker_client(n: int) -> int:
    with worker_client() as client:
        return sum(client.gather(client.map(lambda x: x + n, range(5))))


def under_lock(n: int) -> int:
    with Lock("lock"), Semaphore(max_leases=1, name="one"):
        counted = Variable("counted")
        seen = counted.get() + n
        counted.set(seen)
        return seen


def relay() -> int:
    Event("go").wait()
    numbers = Queue("numbers")
    return sum(numbers.get() for _ in range(5))


def n_threads(dask_worker: Worker) -> int:
    return dask_worker.state.nthreads


def fail() -> None:
    raise ZeroDivisionError("on purpose")


if __name__ == "__main__":
    with Client(n_workers=2, threads_per_worker=2, dashboard_address=":0") as client:
        squares = client.map(lambda n: n**2, range(20))
        done = sorted(result for _, result in as_completed(squares, with_results=True))
        more = as_completed(client.map(str, range(3)))
        more.update(client.map(str, range(3, 6), pure=False))
        counter = client.submit(Counter, actor=True).result()
        counted = [counter.add(n).result() for n in range(5)]
        Variable("counted").set(0)
        locked = max(client.gather(client.map(under_lock, range(1, 6))))
        relayed = client.submit(relay)
        numbers = Queue("numbers")
        for n in range(5):
            numbers.put(n)
        Event("go").set()
        [big] = client.scatter([list(range(1000))], broadcast=True)
        client.publish_dataset(big=big)
        failed = client.submit(fail)
        error = failed.exception()
        dependent = client.submit(lambda _: 1, failed)
        result = {
            "done": done,
            "more": sorted(future.result() for future in more),
            "counted": counted,
            "locked": locked,
            "relayed": relayed.result(),
            "fibonacci": client.submit(fibonacci, 7).result(),
            "nested": client.submit(with_worker_client, 3).result(),
            "scattered": client.submit(sum, client.get_dataset("big")).result(),
            "error": repr(error),
            "dependent": repr(dependent.exception()),
            "threads": list(client.run(n_threads).values()),
            "worker": client.submit(lambda: get_worker().state.nthreads).result(),
        }
        retried = client.submit(fail, retries=1, pure=False)
        result["retried"] = repr(retried.exception())
        cancelled = client.submit(lambda: Event("never").wait())
        cancelled.cancel()
        result["cancelled"] = cancelled.cancelled()
        Event("never").set()
    print(json.dumps(result))
