"""Rules that find what limits a program, from figures that the runtime keeps anyway.

The figures are those of `status` and `run`: summaries of shuffles, and sums over all workers. The
guide "A shuffle is slow" explains each rule under its identifier. Rules over a trace know more, and
use the same identifiers. Pure functions over numbers; `live_verdict` chooses among what they find.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dask_gpurt.tracing import advice
from dask_gpurt.tracing.amounts import count_text, nbytes_text, rate_text
from dask_gpurt.tracing.bottleneck import Bottleneck
from dask_gpurt.tracing.live_facts import LiveFacts

#: Most names of shuffles in a piece of evidence.
MOST_NAMES = 3
#: Share of a shuffle in which a worker was sending, from which on the network may limit it.
SENDING_SHARE = 0.5
#: Share of a link's bandwidth from which on it is full.
FULL_SHARE = 0.4
#: Share of the threads from which on they are busy.
BUSY_SHARE = 0.7
#: Rows of the fullest worker over the mean, from which on a shuffle is skewed.
SKEWED = 1.3
#: Seconds that a worker worked longer than the mean, from which on the evidence names it.
UNEVEN_S = 0.5
#: Bytes of a shuffle, as a share of the largest one's, from which on its skew matters.
LARGE_SHARE = 0.1
#: Partitions below this many bytes cost more by their number than by their size. The seconds are
#: the most that a task and its messages cost the scheduler and the workers.
SMALL_NBYTES = 1_000_000
MOST_PARTITION_S = 0.01
#: Fewer partitions than this for each thread are not too many, however small.
FEW_PARTITIONS = 8
#: Share of a period from which on a busy scheduler limits it, where threads worked less than this.
SCHEDULING_SHARE = 0.6
IDLE_SHARE = 0.5
#: Processors that a worker uses at a time, on average, if its threads wait for one lock.
ONE_AT_A_TIME = (0.7, 1.3)


def _name(one: Mapping[str, Any]) -> str:
    return f"shuffle {one['id'][:8]}[{one['run']}]"


def _worst(
    facts: LiveFacts, saves_s: Callable[[Mapping[str, Any]], float]
) -> tuple[Mapping[str, Any], float] | None:
    """Return the run that could save most, and the savings over all runs; None if none could."""
    found = [(s, one) for one in facts.counting if (s := saves_s(one)) > 0]
    if not found:
        return None
    return max(found, key=lambda pair: pair[0])[1], sum(s for s, _ in found)


def _workers(one: Mapping[str, Any]) -> int:
    return max(int(one["workers"]), 1)


def _computing_s(one: Mapping[str, Any]) -> float:
    """Return the seconds that each thread cut and joined partitions, on average."""
    seconds = one["seconds"]
    return float((seconds["partition"] + seconds["unpack"]) / max(one["threads"], 1))


def _slow_link(facts: LiveFacts) -> Bottleneck | None:
    def saves_s(one: Mapping[str, Any]) -> float:
        if one["longest_sender"] is None:
            return 0.0
        _, nbytes, sending_s, bandwidth = one["longest_sender"]
        lasted_s, on_processors_s = one["lasted_s"], one["cpu_s"] / max(one["threads"], 1)
        # Messages of a fast link take long, too, if processors have no time for them. There the
        # kernel does not know the bandwidth, because it never had enough to send.
        is_full = bandwidth > 0 and nbytes > FULL_SHARE * bandwidth * sending_s
        if sending_s < SENDING_SHARE * lasted_s or not is_full:
            return 0.0
        rest_s = max(_computing_s(one), on_processors_s, one["disk_wait_s"] / _workers(one))
        return float(min(sending_s, lasted_s - rest_s))

    if (found := _worst(facts, saves_s)) is None:
        return None
    one, saved_s = found
    sender, nbytes, seconds, bandwidth = one["longest_sender"]
    is_compressed = one["raw_nbytes"] > 1.1 * one["wire_nbytes"]
    change = "Use a faster network or transport, or send fewer bytes: drop columns before it"
    return Bottleneck(
        "slow-link",
        f"{sender} sent {nbytes_text(nbytes)} to other hosts at {rate_text(nbytes / seconds)}, in "
        f"{seconds:.1f} s of the {one['lasted_s']:.1f} s of {_name(one)}"
        f"; its link carries {rate_text(bandwidth)}",
        change + ("." if is_compressed else ", or compress them."),
        "" if is_compressed else "gpurt.shuffle.compression: lz4",
        saved_s,
    )


def _small_messages(facts: LiveFacts) -> Bottleneck | None:
    def saves_s(one: Mapping[str, Any]) -> float:
        enough = FEW_PARTITIONS * max(one["threads"], 1)
        numbers = one["partitions_in"], one["partitions_out"]
        n_many = sum(
            n - max(enough, one["nbytes"] / SMALL_NBYTES)
            for n in numbers
            if n > enough and one["nbytes"] < SMALL_NBYTES * n
        )
        # The rest of the run's time is the cost of tasks and messages.
        beyond_s = one["lasted_s"] - _computing_s(one)
        return float(min(beyond_s * n_many / max(sum(numbers), 1), MOST_PARTITION_S * n_many))

    if (found := _worst(facts, saves_s)) is None:
        return None
    one, saved_s = found
    n_in, n_out = one["partitions_in"], one["partitions_out"]
    message = one["sent_nbytes"] / max(one["messages"], 1)
    return Bottleneck(
        "small-messages",
        f"{_name(one)} moved {nbytes_text(one['nbytes'])} in {n_in:,} input and {n_out:,} output "
        f"partitions, and {one['messages']:,} messages of {nbytes_text(message)} on average",
        "Use larger chunks on both sides of the rechunk."
        if one["kind"] == "array"
        else advice.SMALL_PARTITIONS,
        "",
        saved_s,
    )


def _skew(facts: LiveFacts) -> Bottleneck | None:
    busy_s = facts.busy_s.values()
    uneven_s = max(busy_s) - sum(busy_s) / len(busy_s) if busy_s else 0.0

    most_nbytes = max((one["nbytes"] for one in facts.counting), default=0)

    def saves_s(one: Mapping[str, Any]) -> float:
        # A small shuffle beside large ones may be as skewed as it likes.
        if one["skew"] < SKEWED or one["nbytes"] < LARGE_SHARE * most_nbytes:
            return 0.0
        mean_s = float(one["seconds"]["unpack"]) / max(one["threads"], 1)
        return float(max(one["most_unpack_s"] - mean_s, uneven_s))

    found = _worst(facts, saves_s)
    if found is None:
        return None
    # The figures of workers include all shuffles, so they count once.
    one, _ = found
    worker = max(facts.busy_s, key=lambda address: facts.busy_s[address], default="")
    evidence = f"the fullest worker of {_name(one)} had {one['skew']:.1f} times the mean of rows"
    if one["hot"]:
        hot = ", ".join(f"{name} ({rows:,} rows)" for name, rows in one["hot"])
        evidence += f"; output partitions above the mean of {one['mean_rows']:,.0f} rows: {hot}"
    if uneven_s >= UNEVEN_S:
        mean_s = max(busy_s) - uneven_s
        evidence += f"; {worker} worked {max(busy_s):.1f} s, the mean is {mean_s:.1f} s"
    return Bottleneck(
        "skew",
        evidence,
        advice.HOT_KEYS if one["hot"] else advice.UNEVEN_PARTITIONS,
        "",
        saves_s(one),
    )


def _spill(facts: LiveFacts) -> Bottleneck | None:
    shards_s = sum(one["disk_wait_s"] for one in facts.shuffles) / facts.threads
    outputs_s = facts.spent["disk_s"] / facts.threads
    written = facts.spent["written_nbytes"]
    if not shards_s + outputs_s:
        return None
    return Bottleneck(
        "spill",
        f"{nbytes_text(written)} were written to disk; tasks and messages waited "
        f"{(shards_s + outputs_s) * facts.threads:.1f} s for the disk, over "
        f"{count_text(facts.threads, 'thread')}",
        *advice.of_spill(shards_s > outputs_s, facts.shuffle_memory),
        shards_s + outputs_s,
    )


def _memory_wait(facts: LiveFacts) -> Bottleneck | None:
    waited_s = facts.spent["room_s"]
    if not waited_s:
        return None
    return Bottleneck(
        "memory-wait",
        f"tasks waited {waited_s:.1f} s for memory, over {count_text(facts.threads, 'thread')}",
        advice.MEMORY_WAIT,
        "",
        waited_s / facts.threads,
    )


def _back_pressure(facts: LiveFacts) -> Bottleneck | None:
    def saves_s(one: Mapping[str, Any]) -> float:
        return float(one["seconds"]["held_back"] / max(one["threads"], 1))

    if (found := _worst(facts, saves_s)) is None:
        return None
    one, saved_s = found
    return Bottleneck(
        "back-pressure",
        f"tasks of {_name(one)} waited {one['seconds']['held_back']:.1f} s for slow peers, over "
        f"{count_text(one['threads'], 'thread')}",
        advice.SLOW_RECEIVERS,
        "",
        saved_s,
    )


def _slow_worker(facts: LiveFacts) -> Bottleneck | None:
    def saves_s(address: str) -> float:
        return facts.busy_s[address] * (1 - 1 / facts.slowness.get(address, 1.0))

    worker = max(facts.busy_s, key=saves_s, default="")
    if not worker or not saves_s(worker):
        return None
    return Bottleneck(
        "slow-worker",
        f"{worker} takes {facts.slowness[worker]:.1f} times as long as others for the same tasks, "
        f"and worked {facts.busy_s[worker]:.1f} s on each thread",
        advice.SLOW_WORKER,
        "",
        saves_s(worker),
    )


def _processors(facts: LiveFacts) -> Bottleneck | None:
    if facts.wall_s is None or not facts.n_threads or facts.wall_s <= 0:
        return None
    n, cores = facts.n_threads, facts.n_cores
    working_s = facts.working_s / n
    share = working_s / facts.wall_s
    if share < BUSY_SHARE:
        return None
    evidence = f"{count_text(n, 'thread')} worked {min(share, 1):.0%} of {facts.wall_s:.1f} s"
    on_processor = facts.spent["cpu_s"] / working_s / max(len(facts.busy_s), 1)
    each = n / max(len(facts.busy_s), 1)
    low, high = ONE_AT_A_TIME
    if each >= 2 and low <= on_processor <= high and cores > len(facts.busy_s):
        return Bottleneck(
            "processors",
            f"{evidence}, but only {on_processor:.1f} at a time on each worker: they wait for "
            "Python's interpreter lock",
            "Start more workers with fewer threads each, and give object columns a dtype, such as "
            "strings.",
            "",
            min(working_s * (1 - len(facts.busy_s) / min(n, cores)), facts.spent["noncpu_s"] / n),
        )
    if cores > n:
        return Bottleneck(
            "processors",
            f"{evidence}, on hosts with {cores} processors",
            f"Start more workers or threads: {cores} threads fit the hosts.",
            "",
            working_s * (1 - n / cores),
        )
    return None


def _scheduler_bound(facts: LiveFacts) -> Bottleneck | None:
    if not facts.wall_s:
        return None
    # Tiny tasks spend most of their seconds on their way to a thread and back: no work of theirs.
    running_s = facts.spent["cpu_s"] + facts.spent["noncpu_s"]
    busy_s, share = facts.spent["scheduler_s"], running_s / facts.threads / facts.wall_s
    if busy_s < SCHEDULING_SHARE * facts.wall_s or share >= IDLE_SHARE:
        return None
    return Bottleneck(
        "scheduler-bound",
        f"the scheduler's event loop was busy {min(busy_s / facts.wall_s, 1):.0%} of "
        f"{facts.wall_s:.1f} s, and {count_text(facts.threads, 'thread')} worked {share:.0%}",
        "Make fewer, larger tasks: those of 0.1 s and more hide the scheduler's work. Keep large "
        "values out of the graph.",
        "",
        min(busy_s, facts.wall_s * (1 - share)),
    )


def _restarts(facts: LiveFacts) -> Bottleneck | None:
    if not (lost := facts.lost):
        return None
    seconds = sum(one["lasted_s"] for one in lost)
    names = ", ".join(_name(one) for one in lost[:MOST_NAMES])
    return Bottleneck(
        "restarts",
        f"{count_text(len(lost), 'attempt')} at shuffles did not count: {names}, {seconds:.1f} s",
        advice.RESTARTS,
        "",
        seconds,
    )


def _stock_shuffle(facts: LiveFacts) -> Bottleneck | None:
    if not facts.fallbacks:
        return None
    most = max(facts.fallbacks, key=lambda one: int(one["count"]))
    n = sum(one["count"] for one in facts.fallbacks)
    total = n + facts.runs["gpurt"]
    return Bottleneck(
        "stock-shuffle",
        f"{n} of {count_text(total, 'shuffle')} ran on stock Dask, mostly: {most['what']}",
        advice.of_fallback(str(most["why"])),
    )


def _no_shuffle(facts: LiveFacts) -> Bottleneck | None:
    if facts.runs["gpurt"] or facts.runs["stock"] or not facts.spent["task_s"]:
        return None
    if facts.method in ("tasks", "disk"):
        return Bottleneck(
            "no-shuffle",
            f"no shuffle moved data between workers directly: Dask is set to shuffle by "
            f"{facts.method!r}",
            "Remove that setting, or use Dask's default.",
            "dataframe.shuffle.method: p2p",
        )
    return Bottleneck(
        "no-shuffle",
        f"no shuffle moved data between workers directly; tasks took {facts.spent['task_s']:.1f} "
        f"s, and workers fetched inputs for {facts.spent['fetch_s']:.1f} s",
        "Look at the task stream of Dask's dashboard: the time is in the tasks themselves.",
    )


#: Rules by identifier, in the order of the guide.
RULES: dict[str, Callable[[LiveFacts], Bottleneck | None]] = {
    "slow-link": _slow_link,
    "small-messages": _small_messages,
    "skew": _skew,
    "spill": _spill,
    "memory-wait": _memory_wait,
    "back-pressure": _back_pressure,
    "slow-worker": _slow_worker,
    "processors": _processors,
    "scheduler-bound": _scheduler_bound,
    "restarts": _restarts,
    "stock-shuffle": _stock_shuffle,
    "no-shuffle": _no_shuffle,
}
