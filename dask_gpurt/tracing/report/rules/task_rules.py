"""Rules that look for bottlenecks in tasks: workers, partitions, memory, scheduler and client.

A rule returns a `Bottleneck` or None. What it says a change could save is at most the time that
the critical path spent there.
"""

from __future__ import annotations

from dask_gpurt.tracing import advice
from dask_gpurt.tracing.amounts import count_text, seconds_text, share_text
from dask_gpurt.tracing.bottleneck import Bottleneck
from dask_gpurt.tracing.report.idle_gaps import NOTHING_LEFT
from dask_gpurt.tracing.report.rules.findings import Findings
from dask_gpurt.tracing.report.task_rows import TaskRow
from dask_gpurt.tracing.report.task_stories import CLIENT, COMPUTING, MEMORY, SCHEDULER
from dask_gpurt.tracing.report.worker_rows import WorkerRow

#: Workers and tasks this much above the others stand out.
_UNEVEN, _SLOW_WORKER, _LONG_TASK = 1.3, 1.5, 3.0
#: Tasks that are shorter cost the scheduler more than they are worth.
_SHORT_TASK_S = 0.05
#: Tasks of a thread: with fewer, one long task cannot be evened out; with more, they are many.
_FEW, _MANY = 1.0, 20
#: The scheduler, the client and idle threads matter from this share of the time on.
_MUCH = 0.2
#: Threads are idle if they run tasks in less than this share of the time.
_IDLE_SHARE = 0.5


def slow_worker(found: Findings) -> Bottleneck | None:
    """One worker takes longer for the same tasks than others do."""
    path_s = found.path.computing_by(found.columns.tasks.process)
    worst: tuple[float, WorkerRow] | None = None
    for row in found.workers:
        if len(found.workers) > 1 and row.slowness >= _SLOW_WORKER:
            saves_s = path_s.get(row.process, 0.0) * (1 - 1 / row.slowness)
            if worst is None or saves_s > worst[0]:
                worst = saves_s, row
    if worst is None or not found.is_worth(worst[0]):
        return None
    saves_s, row = worst
    return Bottleneck(
        "slow-worker",
        f"{row.name} on {row.host} took {row.slowness:.1f} times as long as others for the same "
        f"tasks; the critical path computed {seconds_text(path_s[row.process])} there",
        advice.SLOW_WORKER,
        "",
        saves_s,
    )


def skew(found: Findings) -> Bottleneck | None:
    """One task or one worker had much more to do than others."""
    candidates = [one for one in (_long_task(found), _full_worker(found)) if one is not None]
    return max(candidates, key=lambda one: one.saves_s or 0.0, default=None)


def _long_task(found: Findings) -> Bottleneck | None:
    tasks = found.columns.tasks
    by_task: dict[int, float] = {}
    for one in found.path.segments:
        if one.kind == COMPUTING:
            by_task[one.task] = by_task.get(one.task, 0.0) + one.end_s - one.start_s
    if not by_task:
        return None
    rows = {row.prefix: row for row in found.tasks}
    slowness = {row.process: row.slowness for row in found.workers}

    def saves_s(i: int) -> float:
        row = rows[tasks.prefixes[tasks.prefix[i]]]
        # A slow worker takes long for all of its tasks.
        usual_s = row.median_s * max(slowness.get(int(tasks.process[i]), 1.0), 1.0)
        is_long = row.n_tasks > 2 and by_task[i] >= _LONG_TASK * usual_s
        return by_task[i] - usual_s if is_long else 0.0

    longest = max(by_task, key=saves_s)
    if not found.is_worth(saves_s(longest)):
        return None
    row = rows[tasks.prefixes[tasks.prefix[longest]]]
    return Bottleneck(
        "skew",
        f"one of {row.n_tasks:,} tasks {row.prefix} computed {seconds_text(by_task[longest])} on "
        f"{found.columns.places.names[tasks.process[longest]]}; their median is "
        f"{seconds_text(row.median_s)}",
        advice.HOT_KEYS,
        "",
        saves_s(longest),
    )


def _full_worker(found: Findings) -> Bottleneck | None:
    if len(found.workers) < 2:
        return None
    row = found.workers[0]
    if row.skew < _UNEVEN or row.slowness >= _SLOW_WORKER:
        return None
    path_s = found.path.computing_by(found.columns.tasks.process).get(row.process, 0.0)
    uneven_s = row.busy_share * found.wall_s * (1 - 1 / row.skew)
    # Where nothing waited for a thread, other workers could not have helped.
    saves_s = min(path_s, uneven_s, found.path.crowded_s)
    if not found.is_worth(saves_s):
        return None
    return Bottleneck(
        "skew",
        f"{row.name} was {row.skew:.1f} times as busy as the mean worker: "
        f"{count_text(row.n_tasks, 'task')} in {seconds_text(row.task_s)}",
        advice.UNEVEN_PARTITIONS,
        "",
        saves_s,
    )


def few_partitions(found: Findings) -> Bottleneck | None:
    """Fewer tasks of a prefix than threads, and the path computes them."""
    tasks = found.columns.tasks
    path_s = found.path.computing_by(tasks.prefix)
    worst: tuple[float, TaskRow] | None = None
    numbers = {prefix: number for number, prefix in enumerate(tasks.prefixes)}
    for row in found.tasks:
        spent_s = path_s.get(numbers[row.prefix], 0.0)
        if row.n_tasks < _FEW * found.n_threads and spent_s:
            saves_s = spent_s * (1 - row.n_tasks / found.n_threads)
            if worst is None or saves_s > worst[0]:
                worst = saves_s, row
    # If threads were busy, other tasks ran beside these.
    if worst is None or not found.is_worth(worst[0]) or found.busy_share > _IDLE_SHARE:
        return None
    saves_s, row = worst
    return Bottleneck(
        "few-partitions",
        f"{count_text(row.n_tasks, 'task')} {row.prefix} for {found.n_threads:,} threads; the "
        f"longest took {seconds_text(row.longest_s)}",
        "Make at least as many partitions as there are threads, with `repartition`, a smaller "
        "`blocksize`, or a larger `npartitions`. For a single last step, use `split_out`.",
        "",
        saves_s,
    )


def _scheduler(found: Findings) -> tuple[float, bool]:
    """Return the seconds that the path waited for the scheduler, and whether tasks are tiny."""
    spent_s = found.path.seconds(SCHEDULER)
    n = sum(row.n_tasks for row in found.tasks)
    mean_s = sum(row.task_s for row in found.tasks) / n if n else 0.0
    is_tiny = mean_s < _SHORT_TASK_S and n >= _MANY * max(found.n_threads, 1)
    return (spent_s if spent_s >= _MUCH * found.wall_s else 0.0), is_tiny


def too_many_partitions(found: Findings) -> Bottleneck | None:
    """So many short tasks that the scheduler is what they wait for."""
    saves_s, is_tiny = _scheduler(found)
    if not is_tiny or not found.is_worth(saves_s):
        return None
    row = max(found.tasks, key=lambda row: row.n_tasks)
    return Bottleneck(
        "too-many-partitions",
        f"{count_text(row.n_tasks, 'task')} {row.prefix} ran {seconds_text(row.mean_s)} on "
        f"average, and the critical path waited {seconds_text(saves_s)} for the scheduler",
        "Make fewer, larger partitions: tasks of 0.1 s and more hide the scheduler's work.",
        "",
        saves_s,
    )


def scheduler_bound(found: Findings) -> Bottleneck | None:
    """The scheduler takes long to assign tasks and to notice that they ended."""
    saves_s, is_tiny = _scheduler(found)
    if is_tiny or not found.is_worth(saves_s):
        return None
    n = sum(row.n_tasks for row in found.tasks)
    return Bottleneck(
        "scheduler-bound",
        f"the critical path waited {seconds_text(saves_s)} for the scheduler, with "
        f"{count_text(n, 'task')} in {seconds_text(found.wall_s)}",
        "Keep large values out of the graph, submit fewer tasks at once, and give the scheduler "
        "a processor of its own.",
        "",
        saves_s,
    )


def client_bound(found: Findings) -> Bottleneck | None:
    """Nothing was submitted for a large part of the time."""
    saves_s = found.path.seconds(CLIENT)
    if saves_s < _MUCH * found.wall_s or not found.is_worth(saves_s) or not found.tasks:
        return None
    longest = max(
        (one for one in found.path.segments if one.kind == CLIENT),
        key=lambda one: one.end_s - one.start_s,
    )
    return Bottleneck(
        "client-bound",
        f"for {seconds_text(saves_s)} the critical path waited for the client; the longest "
        f"wait, {seconds_text(longest.end_s - longest.start_s)}, began at "
        f"{seconds_text(longest.start_s)}",
        "Submit the next work before the results of the last are there: give several results to "
        "one `dask.compute`, or use `persist` and futures.",
        "",
        saves_s,
    )


def idle_threads(found: Findings) -> Bottleneck | None:
    """Threads had nothing to run, because a chain of tasks ran one after the other."""
    path_s = found.path.seconds(COMPUTING)
    ideal_s = found.busy_share * found.wall_s
    saves_s = min(path_s, found.wall_s - ideal_s) * (1 - found.busy_share)
    if found.busy_share >= _IDLE_SHARE or path_s < found.wall_s / 2 or not found.is_worth(saves_s):
        return None
    causes = [cause for cause, _ in found.gaps.by_cause() if cause != NOTHING_LEFT][:1]
    waited = f", and waited most for {causes[0]}" if causes else ""
    return Bottleneck(
        "idle-threads",
        f"{found.n_threads:,} threads ran tasks in {share_text(found.busy_share)} of the time"
        f"{waited}; the critical path computed {seconds_text(path_s)}, one task after another",
        "Divide the long tasks of the path, or run independent work beside them.",
        "",
        saves_s,
    )


def memory_wait(found: Findings) -> Bottleneck | None:
    """Tasks had their inputs and a free thread, and waited for room for their outputs."""
    saves_s = found.path.seconds(MEMORY)
    if not found.is_worth(saves_s):
        return None
    return Bottleneck(
        "memory-wait",
        f"the critical path waited {seconds_text(saves_s)} for memory, while threads were free",
        advice.MEMORY_WAIT,
        "",
        saves_s,
    )


def restarts(found: Findings) -> Bottleneck | None:
    """A shuffle began again, or workers were lost."""
    instants = found.columns.trace.instants
    again = [one for one in instants if "restart" in one.name.lower()]
    lost = [one for one in instants if "lost" in one.name.lower()]
    if not again and not lost:
        return None
    named = ", ".join(f"{one.name} at {seconds_text(one.at_s)}" for one in (*again, *lost)[:3])
    return Bottleneck(
        "restarts",
        f"{count_text(len(again), 'restart')} and {count_text(len(lost), 'lost worker')}: {named}",
        advice.RESTARTS,
    )


TASK_RULES = (
    slow_worker,
    skew,
    few_partitions,
    too_many_partitions,
    scheduler_bound,
    client_bound,
    idle_threads,
    memory_wait,
    restarts,
)
