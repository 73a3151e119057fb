"""``dask gpurt compare``: is the runtime worth it for a program?

The unmodified program runs on stock Dask and with the runtime, in turns (`turns`). What it prints
is compared (`outputs`), then times, bytes, and where the time went (`verdict`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

from dask.utils import format_bytes
from distributed.comm.addressing import get_address_host_port

from dask_gpurt.command.connect import ConnectError, connected
from dask_gpurt.command.json_text import to_json
from dask_gpurt.command.judge import verdict
from dask_gpurt.command.judge.outputs import Difference, difference
from dask_gpurt.command.judge.turns import Program, Turn
from dask_gpurt.command.layout import table, terminal_width, wrapped
from dask_gpurt.command.run_report import most_memory_nbytes
from dask_gpurt.command.script import INTERRUPTED, find_module, find_script
from dask_gpurt.tracing.amounts import count_text

#: Exit statuses: the runtime changes what the program does; the program cannot be compared.
_CHANGED, _NOT_COMPARED = 1, 2
#: A program that fetched inputs between workers for less than this share has no large transfers.
FETCHING_SHARE = 0.05
#: Times are known to a millisecond, so shorter runs are not compared.
_LEAST_S = 0.01
_STOCK, _ENABLED = "stock Dask", "dask_gpurt"


@dataclass
class Pairs:
    """The turns so far; each pair has one on either side.

    Attributes
    ----------
    problem
        Why the comparison ended, if it did not end as planned.
    notes
        Sentences for a reader of the result.
    """

    stock: list[Turn] = field(default_factory=list)
    enabled: list[Turn] = field(default_factory=list)
    problem: str = ""
    code: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def complete(self) -> list[tuple[Turn, Turn]]:
        return [*zip(self.stock, self.enabled, strict=False)]


def compare(
    script: str,
    args: Sequence[str],
    options: Sequence[str],
    *,
    is_module: bool,
    repeats: int,
    limit_s: float,
    as_json: bool,
) -> int:
    """Run a program in turns, and print the comparison.

    Parameters
    ----------
    options
        Options of `dask gpurt run`, for both sides.
    limit_s
        No turn begins that is expected to end later, and none continues then.

    Returns
    -------
    int
        Exit status of the command.

    Raises
    ------
    ScriptError
        There is no such script.
    """
    # Only for the error, here and not in a turn.
    (find_module if is_module else find_script)(script, [*args])
    command = [*(["-m"] if is_module else []), script, *args]
    stdin = _standard_input()
    pairs = Pairs()
    with tempfile.TemporaryDirectory(prefix="gpurt-compare-") as directory, _ends_on_sigterm():
        program = Program(options, command, stdin, Path(directory))
        try:
            _take_turns(program, pairs, repeats, time.monotonic() + limit_s)
        except KeyboardInterrupt:
            pairs.problem, pairs.code = "interrupted", INTERRUPTED
    found = summary(script, pairs)
    print(to_json(found) if as_json else as_text(found, terminal_width()))
    is_changed = bool(found.get("output", {}).get("diff"))
    return pairs.code or (_CHANGED if is_changed else 0)


def _standard_input() -> bytes:
    """Return what each turn reads: nothing from a terminal, otherwise all that there is."""
    if sys.stdin is None or sys.stdin.closed or sys.stdin.isatty():
        return b""
    if stat.S_ISFIFO(os.fstat(sys.stdin.fileno()).st_mode):
        _tell("reading standard input to its end")
    return sys.stdin.buffer.read()


@contextlib.contextmanager
def _ends_on_sigterm() -> Iterator[None]:
    """End the program of a turn, too, if this process is told to end."""

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _take_turns(program: Program, pairs: Pairs, repeats: int, until_s: float) -> None:
    for number in range(repeats):
        began_s = time.monotonic()
        # Alternating, because the first turn of a pair may warm files up for the second.
        for is_stock in (True, False) if number % 2 == 0 else (False, True):
            name = _STOCK if is_stock else _ENABLED
            _tell(f"pair {number + 1} of {repeats}: {name} ...")
            try:
                turn = program.run(stock=is_stock, timeout_s=max(until_s - time.monotonic(), 1.0))
            finally:
                # Also after a turn that fails, or is interrupted.
                if not is_stock:
                    _restore(pairs)
            _tell(f"pair {number + 1} of {repeats}: {name}: {turn.seconds:.2f} s")
            if not _goes_on(pairs, turn, is_stock):
                return
            (pairs.stock if is_stock else pairs.enabled).append(turn)
        took_s = time.monotonic() - began_s
        if number + 1 < repeats and time.monotonic() + took_s > until_s:
            pairs.notes.append(f"{number + 1} of {repeats} pairs, because of the limit on the time")
            return


def _tell(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(f"dask gpurt compare: {text}", file=sys.stderr, flush=True)


def _goes_on(pairs: Pairs, turn: Turn, is_stock: bool) -> bool:
    """Return whether there is something to compare after a turn; if not, say why."""
    if turn.code == 0:
        if is_stock and any(turn.schedulers.values()):
            pairs.problem = (
                "the cluster switches dask_gpurt on by itself, so there is no stock side: set "
                "gpurt.enabled to false where its scheduler starts"
            )
            pairs.code = _NOT_COMPARED
        elif not turn.report:
            pairs.problem = (
                f"its turn on {_STOCK if is_stock else _ENABLED} left no measurements: a program "
                "that ends with `os._exit`, or becomes another one, cannot be measured"
            )
            pairs.code = _NOT_COMPARED
        return not pairs.problem
    name = _STOCK if is_stock else _ENABLED
    said = "\n".join(turn.error)
    if turn.code is None:
        if pairs.complete:
            pairs.notes.append(f"a turn on {name} was ended by the limit on the time")
            return False
        pairs.problem = f"it did not end in time on {name}; --minutes allows more"
        pairs.code = _NOT_COMPARED
    elif turn.code in (INTERRUPTED, -2):
        raise KeyboardInterrupt
    elif is_stock and not pairs.enabled:
        pairs.problem = f"it fails on stock Dask with exit status {turn.code}:\n{said}"
        pairs.code = _NOT_COMPARED
    elif is_stock:
        pairs.problem = f"it fails at times on stock Dask, with exit status {turn.code}:\n{said}"
        pairs.code = _NOT_COMPARED
    else:
        pairs.problem = (
            f"IT FAILS WITH DASK_GPURT ALONE, with exit status {turn.code}:\n{said}\n"
            "Please report this, with the program and a `dask gpurt support-bundle`."
        )
        pairs.code = _CHANGED
    return False


def _restore(pairs: Pairs) -> None:
    """Switch the runtime off on clusters that outlive the program and had it off before."""
    import dask_gpurt

    for address, was_on in pairs.stock[0].schedulers.items():
        # Nothing listens if the program had started it.
        if was_on or not _listens(address):
            continue
        try:
            with connected(address) as client:
                if dask_gpurt.status(client)["active"]:
                    dask_gpurt.disable(client)
        except ConnectError:
            note = f"dask_gpurt may still be on at {address}, which could not be asked"
            if note not in pairs.notes:
                pairs.notes.append(note)


def _listens(address: str) -> bool:
    """Return whether anything listens at the address of a scheduler."""
    try:
        host, port = get_address_host_port(address)
        with socket.create_connection((host, port), timeout=1.0):
            return True
    except (OSError, ValueError):
        return False


def summary(program: str, pairs: Pairs) -> dict[str, Any]:
    """Return the comparison as plain values."""
    complete = pairs.complete
    found: dict[str, Any] = {
        "program": program,
        "problem": pairs.problem or None,
        "notes": pairs.notes,
        "pairs": [{"stock_s": a.seconds, "enabled_s": b.seconds} for a, b in complete],
    }
    if not complete:
        return found
    output = _output(pairs)
    found |= {
        "stock": _side([a for a, _ in complete]),
        "enabled": _side([b for _, b in complete]),
        "ratio": _ratio(complete),
        "output": {"kind": output.kind, "diff": output.diff},
        "expects_gain": _expects_gain([b for _, b in complete]),
    }
    return found


def _ratio(complete: Sequence[tuple[Turn, Turn]]) -> dict[str, float] | None:
    """Return how many times as fast the runtime was; None if a run was too short to tell."""
    sides = [[one.seconds for one in side] for side in zip(*complete, strict=True)]
    if min(map(min, sides)) < _LEAST_S:
        return None
    ratios = [stock / enabled for stock, enabled in zip(*sides, strict=True)]
    stock, enabled = map(median, sides)
    return {"median": stock / enabled, "least": min(ratios), "most": max(ratios)}


def _output(pairs: Pairs) -> Difference:
    """Return how outputs differ, unless those of stock Dask differ as much among themselves."""
    (first, enabled), *others = pairs.complete
    found = difference(first.output, enabled.output)
    if found.diff and not others:
        pairs.notes.append("more --repeats show whether it prints something else each time")
    for again, _ in others:
        own = difference(first.output, again.output)
        if found.diff and own.diff:
            pairs.notes.append("it prints something else each time, on stock Dask as well")
            return Difference(found.kind)
    return found


def _side(turns: Sequence[Turn]) -> dict[str, Any]:
    seconds = sorted(turn.seconds for turn in turns)
    # The turn in the middle stands for all.
    typical = sorted(turns, key=lambda turn: turn.seconds)[len(turns) // 2].report
    return {
        "median_s": median(seconds),
        "least_s": seconds[0],
        "most_s": seconds[-1],
        "spent": typical["spent"],
        "peak_nbytes": most_memory_nbytes(typical),
        "runs": typical["runs"],
        "verdict": typical["verdict"],
        "clusters": len(typical["clusters"]),
        "threads": [one["threads"] for one in typical["workers"].values()],
    }


def _expects_gain(turns: Sequence[Turn]) -> bool:
    """Return whether anything in the program is a shuffle, a spill or a large transfer."""
    for turn in turns:
        report = turn.report
        threads = sum(one["threads"] for one in report["workers"].values()) or 1
        spent = report["spent"]
        if any(report["runs"].values()) or spent["written_nbytes"]:
            return True
        if spent["fetch_s"] / threads > FETCHING_SHARE * turn.seconds:
            return True
    return False


_ROWS = {
    "shuffle messages": "moved_nbytes",
    "written to disk": "written_nbytes",
    "tasks": "task_s",
    "tasks on a processor": "cpu_s",
    "waiting for disk": "disk_s",
    "fetching inputs": "fetch_s",
}


def as_text(found: dict[str, Any], width: int | None = None) -> str:
    """Return the comparison for a terminal; a failure of the runtime alone comes first."""
    size = ""
    if "enabled" in found and (threads := found["enabled"]["threads"]):
        n_threads = count_text(sum(threads), "thread")
        size = f", {count_text(len(threads), 'worker')} with {n_threads} in all"
    lines = [f"dask gpurt compare: {found['program']}{size}"]
    if found["problem"] is not None:
        lines += [f"  {line}" for line in found["problem"].splitlines()]
    if "stock" in found:
        lines += _times(found, width)
        lines += ["", *_conclusions(found, width)]
    return "\n".join([*lines, *(f"  note: {note}" for note in found["notes"])])


def _times(found: dict[str, Any], width: int | None) -> list[str]:
    sides = [found["stock"], found["enabled"]]
    rows = [["median", *(f"{side['median_s']:.2f} s" for side in sides)]]
    rows += [["range", *(f"{one['least_s']:.2f} to {one['most_s']:.2f} s" for one in sides)]]
    for text, name in _ROWS.items():
        amounts = [side["spent"][name] for side in sides]
        if any(amounts):
            is_size = name.endswith("_nbytes")
            rows.append(
                [text, *(format_bytes(int(n)) if is_size else f"{n:.1f} s" for n in amounts)]
            )
    peaks = [side["peak_nbytes"] for side in sides]
    if all(peaks):
        rows.append(["peak process memory", *map(format_bytes, peaks)])
    return table(["", _STOCK, _ENABLED], rows, width)


def _speedup(ratio: dict[str, float] | None, n_pairs: int) -> str:
    if ratio is None:
        return f"too short to compare: a run took less than {_LEAST_S * 1000:.0f} ms"
    spread = f"{ratio['least']:.2f} to {ratio['most']:.2f} over {count_text(n_pairs, 'pair')}"
    if n_pairs == 1:
        spread = "one pair, so the spread is unknown"
    said = f"{ratio['median']:.2f} times as fast with dask_gpurt ({spread})"
    if n_pairs > 1 and ratio["least"] <= 1 <= ratio["most"]:
        said += ": no difference beyond the spread"
    return said


def _conclusions(found: dict[str, Any], width: int | None) -> list[str]:
    output, runs = found["output"], found["enabled"]["runs"]
    lines = wrapped(_speedup(found["ratio"], len(found["pairs"])), width, "  ")
    lines += wrapped(f"output: {output['kind']}", width, "  ")
    lines += [f"    {line}" for line in output["diff"]]
    if not found["enabled"]["clusters"]:
        text = "nothing ran on a cluster: the program uses another scheduler, such as threads"
        return [*lines, *wrapped(text, width, "  ")]
    if not found["expects_gain"]:
        text = (
            "nothing in it is a shuffle, spilled data or a large transfer between workers: no "
            "gain is to be expected"
        )
        return [*lines, *wrapped(text, width, "  ")]
    shuffles = f"{runs['gpurt']} with dask_gpurt, {runs['stock']} left to stock Dask"
    lines += wrapped(f"shuffles: {shuffles}; what limits it with dask_gpurt:", width, "  ")
    return [*lines, *verdict.as_lines(found["enabled"]["verdict"]["text"], width, "    ")]
