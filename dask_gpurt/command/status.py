"""``dask gpurt status``: print `dask_gpurt.status` of a running cluster as a table or JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dask.utils import format_bytes

from dask_gpurt import config
from dask_gpurt.command.connect import ask, connected, required_address
from dask_gpurt.command.json_text import to_json
from dask_gpurt.command.judge import verdict
from dask_gpurt.command.layout import aligned, table, terminal_width, wrapped
from dask_gpurt.command.run_report import device_note, times
from dask_gpurt.metrics import MEANING
from dask_gpurt.placement.explanation import REASONS
from dask_gpurt.tracing.amounts import name_text
from dask_gpurt.tracing.live_facts import LiveFacts


def show(
    scheduler: str | None,
    scheduler_file: Path | None,
    as_json: bool,
    *,
    placement: bool = False,
) -> int:
    """Print the status of a cluster, or of its placement alone.

    Returns
    -------
    int
        Always 0, whether the runtime is on or off.

    Raises
    ------
    ConnectError
        There is no such scheduler, or it does not answer.
    """
    address = required_address(scheduler, scheduler_file)
    with connected(address) as client:
        found = ask(client)
    shown: Any = found.get("placement") if placement else found
    if not placement:
        shown = {**found, "verdict": verdict.of_status(found)}
    if as_json:
        print(to_json(shown))
    else:
        width = terminal_width()
        print(placement_as_text(shown, width) if placement else as_text(shown, width))
    return 0


def placement_as_text(placed: dict[str, Any] | None, width: int | None = None) -> str:
    """Return the placement statistics as text; `placed` is None if stock Dask places tasks."""
    if placed is None:
        return "stock Dask chooses workers"
    counts, steals = placed["decisions"], placed["steals"]
    n_differing = placed["differ_from_stock"]
    lines = aligned(
        [
            ("policy", placed["policy"]),
            ("decisions", f"{sum(counts.values()):,}"),
            *((f"  {reason}", f"{count:,}, {REASONS[reason]}") for reason, count in counts.items()),
            ("other than stock", f"{n_differing:,}, {placed['saved_s']:.3f} s saved, estimated"),
            ("steals", f"{steals['allowed']:,} allowed, {steals['refused']:,} refused"),
        ],
        width=width,
    )
    if placed["failed"]:
        failed = f"failed {times(placed['failed'])}, see the scheduler's log; stock decided"
        lines += wrapped(failed, width)
    for one in placed["last_differing"]:
        head = f"{name_text(one['key'])}: {one['worker']}, stock {one['stock_worker']}"
        lines += ["", *wrapped(head, width, hanging="  ")]
        lines += wrapped(one["reason"], width, "  ")
        for candidate in one["candidates"]:
            terms = (name for name, term in candidate.items() if name.endswith("_s") and term)
            said = ", ".join(f"{name[:-2]} {candidate[name]:.4f} s" for name in terms)
            lines += wrapped(f"{candidate['worker']}: {said}", width, "  ", "    ")
    return "\n".join(lines)


def as_text(found: dict[str, Any], width: int | None = None) -> str:
    """Return the status as a table, wrapped at `width` if given."""
    state = "on" if found["active"] else f"off: {found['reason']}"
    rows = [("scheduler", found["scheduler"]), ("dask_gpurt", state)]
    if "version" in found:
        rows += [("version", found["version"]), ("host", found["host"])]
        rows += [("strict", "yes" if found["strict"] else "no")]
    rows += _topology(found.get("topology"))
    runs = found["runs"]
    rows += [("shuffles", f"{runs['gpurt']} with dask_gpurt, {runs['stock']} with stock Dask")]
    if (sent := found.get("broadcasts")) and sent["values"]:
        made = f"{sent['values']} values, {sent['copies']} copies"
        moved = f"{format_bytes(sent['nbytes'])} in {sent['seconds']:.1f} s"
        last = sent["recent"][-1]
        compared = "" if last["stock_s"] is None else f" (stock at least {last['stock_s']:.1f} s)"
        rows += [("broadcasts", f"{made}, {moved}; the last in {last['seconds']:.1f} s{compared}")]
    if (groups := found.get("collectives")) and groups["operations"]:
        rows += [("collectives", _collectives(groups))]
    if (cut := found.get("reductions")) and cut["sliced"] + cut["piecewise"]:
        said = f"{cut['sliced']} in {cut['slices']} slices, {cut['piecewise']} of whole values"
        said += f"; {cut['held']} begin where workers hold the chunks" if cut["held"] else ""
        rows += [("reductions", said)]
    lines = aligned(rows, width=width)
    totals = found["totals"]
    gone = found.get("departed", {}).get("workers", 0)
    lines += ["", "over all workers" + (f", and {gone} that left" if gone else "")]
    amounts = [(_amount(name, totals[name]), text) for name, text in MEANING.items()]
    lines += aligned(amounts, "  ", width)
    lines += ["", f"workers: {len(found['workers'])}"]
    workers = sorted(found["workers"].items())
    lines += aligned([_worker(address, said, found) for address, said in workers], "  ", width)
    if any(said and said.get("memory") for _, said in workers):
        text = "task outputs: bytes in each tier, and bytes moved since the worker started"
        lines += ["", *wrapped(text, width), *_memory(workers, width)]
    if busy := _lanes(workers, width):
        text = "recent work of lanes, and how much of the possible overlap was reached"
        lines += ["", *wrapped(text, width), *busy]
    if found["shuffles"]:
        text = "last shuffles with dask_gpurt (seconds are summed over workers)"
        lines += ["", *wrapped(text, width), *_shuffles(found["shuffles"], width)]
    if found["fallbacks"]:
        lines += ["", "left to stock Dask"]
        for one in found["fallbacks"]:
            text = f"{one['what']} ({times(one['count'])}): {one['why']}"
            lines += wrapped(text, width, "  ", "    ")
    if (judged := found.get("verdict")) and judged["text"]:
        lines += ["", "verdict", *verdict.as_lines(judged["text"], width)]
    return "\n".join(lines)


def _collectives(groups: dict[str, Any]) -> str:
    """Return the operations of groups of ranks that have ended."""
    n = groups["operations"].items()
    made = ", ".join(f"{count:,} {name}" + ("s" if count > 1 else "") for name, count in n)
    chosen = ", ".join(f"{name} {count:,}" for name, count in groups["algorithms"].items())
    moved = f"{format_bytes(groups['nbytes'])} in {groups['seconds']:.1f} s"
    return f"{made}; {moved}; {chosen}"


def _topology(topology: dict[str, Any] | None) -> list[tuple[str, str]]:
    """Return rows on the description of machines and on the probe."""
    if topology is None:
        return []
    probe = topology["probe"]
    file, undescribed = topology["file"], topology["undescribed"]
    if file == config.DISCOVERED:
        known = "reported by workers"
        known += f", {len(undescribed)} have not yet" if undescribed else ""
        known += "; a link has no known speed" if topology["is_speed_missing"] else ""
    elif file is not None:
        known = file
        if n_reported := topology["reported_hosts"]:
            known += f", and {n_reported} of them reported by workers"
        if undescribed:
            known += f", {len(undescribed)} workers are on none of its hosts and have not reported"
        known += "; a link has no known speed" if topology["is_speed_missing"] else ""
    else:
        known = "not described, links are learnt"
    rows = [("machines", f"{topology['hosts']} hosts, {known}")]
    text = probe["state"] + (f": {probe['reason']}" if probe["reason"] else "")
    if probe["pairs"]:
        slowest, fastest = (
            format_bytes(int(probe[f"{which}_nbytes_per_s"])) for which in ("slowest", "fastest")
        )
        text += f"; {probe['pairs']} pairs in {probe['seconds']:.1f} s, {slowest}/s to {fastest}/s"
    rows.append(("probe of links", text))
    return rows + [(f"  {about}", problem) for about, problem in probe["problems"].items()]


#: Heading and content of each column of the table of shuffles.
_COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "shuffle": lambda one: f"{one['id'][:8]}[{one['run']}]",
    "rows": lambda one: f"{one['rows']:,}",
    "data": lambda one: format_bytes(one["nbytes"]),
    "sent": lambda one: format_bytes(one["sent_nbytes"]),
    "on the wire": lambda one: format_bytes(one["wire_nbytes"]),
    "codec ratio": lambda one: _ratio(one),
    "partition": lambda one: f"{one['seconds']['partition']:.2f} s",
    "send": lambda one: f"{one['seconds']['send']:.2f} s",
    "receive": lambda one: f"{one['seconds']['receive']:.2f} s",
    "unpack": lambda one: f"{one['seconds']['unpack']:.2f} s",
    "busiest link": lambda one: _link(one["busiest_link"]),
    "skew": lambda one: f"{one['skew']:.2f}",
}


def _ratio(one: dict[str, Any]) -> str:
    """Return the compression ratio of bytes sent to other hosts."""
    return f"{one['raw_nbytes'] / one['wire_nbytes']:.2f}" if one["wire_nbytes"] else "-"


def _link(link: Sequence[Any] | None) -> str:
    if link is None:
        return "-"
    sender, receiver, nbytes, seconds = link
    ends = " > ".join(address.split("://")[-1] for address in (sender, receiver))
    return f"{ends} {format_bytes(int(nbytes / seconds))}/s" if seconds else ends


def _shuffles(shuffles: list[dict[str, Any]], width: int | None) -> list[str]:
    rows = [[content(one) for content in _COLUMNS.values()] for one in shuffles]
    lines = table(list(_COLUMNS), rows, width)
    lost = LiveFacts(shuffles=shuffles).lost
    for one in shuffles:
        if one["hot"] and one not in lost:
            hot = ", ".join(f"{name} ({rows:,} rows)" for name, rows in one["hot"])
            text = (
                f"{_COLUMNS['shuffle'](one)}: the fullest output partitions are {hot};"
                f" the mean is {one['mean_rows']:,.0f} rows"
            )
            lines += wrapped(text, width, "  ", "    ")
    return lines


def _memory(workers: list[tuple[str, Any]], width: int | None) -> list[str]:
    """Return a row per worker: bytes in each tier, bytes moved, tasks waiting for memory."""
    managed = [(address, said["memory"]) for address, said in workers if said and said["memory"]]
    names = list(dict.fromkeys(level["name"] for _, one in managed for level in one["levels"]))
    rows = []
    for address, one in managed:
        levels = {level["name"]: level for level in one["levels"]}
        cells = [_level(levels[name]) if name in levels else "-" for name in names]
        moved = [format_bytes(int(one["io"].get(f"{way}-bytes", 0))) for way in _MOVED.values()]
        rows.append([address, *cells, *moved, str(one["waiting"])])
    notes = ((address, device_note(one.get("device"))) for address, one in managed)
    return [
        *table(["worker", *names, *_MOVED, "tasks waiting"], rows, width),
        *(
            line
            for address, note in notes
            if note is not None
            for line in wrapped(f"{address}: {note}", width, "  ", "    ")
        ),
    ]


#: Counter in a worker's report for each heading.
_MOVED = {"written": "disk-write", "read": "disk-read"}


def _lanes(workers: list[tuple[str, Any]], width: int | None) -> list[str]:
    """Return a row per worker: recent work of its lanes, and how much of it overlapped."""
    rows = []
    for address, said in workers:
        lanes = (said or {}).get("lanes")
        if not lanes or not lanes["entries"]:
            continue
        parts = ", ".join(f"{name} {s:.2f} s" for name, s in sorted(lanes["seconds"].items()))
        share = "-" if lanes["efficiency"] is None else f"{max(0.0, lanes['efficiency']):.0%}"
        rows.append([address, f"{lanes['measured_s']:.2f} s", share, parts])
    return table(["worker", "period", "overlapped", "busy"], rows, width) if rows else []


def _level(level: dict[str, Any]) -> str:
    amount = format_bytes(level["used_nbytes"])
    if level["capacity_nbytes"]:
        amount += f" of {format_bytes(level['capacity_nbytes'])}"
    return amount + (" (cannot be written to)" if level["is_blocked"] else "")


def _worker(address: str, report: dict[str, Any] | None, found: dict[str, Any]) -> tuple[str, str]:
    if report:
        counters = report["counters"]
        return address, (
            f"{report['version']}, {format_bytes(counters['sent_nbytes'])} sent, "
            f"{format_bytes(counters['spilled_nbytes'])} spilled{_paths(report['paths'])}"
        )
    if address in found.get("silent", ()):
        return address, "does not answer"
    not_ready: dict[str, str] = found["not_ready"]
    return address, not_ready.get(address, "no report" if found["active"] else "not active")


def _paths(paths: list[dict[str, Any]]) -> str:
    """Return the number of peers by transport."""
    counted: Counter[str] = Counter()
    for one in paths:
        counted[one["path"]] += one["peers"]
    return "".join(f", {times} by {path}" for path, times in sorted(counted.items()))


def _amount(name: str, value: int) -> str:
    return format_bytes(value) if name.endswith("_nbytes") else f"{value:,}"
