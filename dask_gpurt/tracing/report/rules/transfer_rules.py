"""Rules that look for bottlenecks in what moved: links, messages, copies and disks.

A rule returns a `Bottleneck` or None. What it says a change could save is at most the time that
the critical path spent there.
"""

from __future__ import annotations

import statistics

import numpy as np

from dask_gpurt.tracing import advice
from dask_gpurt.tracing.amounts import (
    count_text,
    nbytes_text,
    rate_text,
    seconds_text,
    share_text,
)
from dask_gpurt.tracing.bottleneck import Bottleneck
from dask_gpurt.tracing.lane_names import FETCH
from dask_gpurt.tracing.report.event_columns import MESSAGE
from dask_gpurt.tracing.report.host_rows import HostRow
from dask_gpurt.tracing.report.rules.findings import Findings
from dask_gpurt.tracing.report.task_stories import COMPUTING, DISK, MEMORY, PEER
from dask_gpurt.tracing.report.transfer_rows import PAGEABLE, TransferRow

#: A link is slow if it carries less than this share of what others do, or of what it can.
_SLOW = 0.6
#: A link that is not known to be slow matters from this share of the time on.
_MUCH = 0.2
#: The usual ratio of a fast codec, and the bytes a second that a worker encodes with it.
_RATIO, _ENCODING = 2.0, 500e6
#: A message costs its ends about this much, whatever its size.
_MESSAGE_S = 0.5e-3
#: Messages are small below this mean size, where that cost is more than the work with the bytes.
_SMALL_NBYTES = 128e3
#: Copies from memory that cannot move are at least this much faster.
_PINNED_SPEEDUP = 2.0

_COMPRESS = "gpurt.shuffle.compression: lz4"


def slow_link(found: Findings) -> Bottleneck | None:
    """One link between hosts carries less than others, or less than it can, or all that it can."""
    # All pairs of a slow host are slow. The host's own link is the cause, and has the true rate.
    candidates = [one for row in found.hosts if (one := _slow_host(found, row)) is not None] or [
        one
        for row in found.links.values()
        # There may be many links, and only few of them are on the path.
        if found.is_worth(found.network_s.get(row.link, 0.0))
        and (one := _slow_link(found, row)) is not None
    ]
    return max(candidates, key=lambda one: one.saves_s or 0.0, default=None)


def _slow_host(found: Findings, row: HostRow) -> Bottleneck | None:
    """The link of one host carries less than those of others, so all of its pairs are slow."""
    on_path_s = sum(found.network_s.get(link, 0.0) for link in row.links)
    if not found.is_worth(on_path_s):
        return None
    pairs = found.links.values()
    others = [one.rate for one in pairs if row.host not in (one.source, one.target)]
    usual = statistics.median(others) if others else 0.0
    own = [found.links[link].rate for link in row.links if link in found.links]
    if len(own) < 2 or row.rate >= _SLOW * usual or max(own) >= _SLOW * usual:
        return None
    saves_s = min(on_path_s, row.busy_s) * (1 - row.rate / usual)
    if not found.is_worth(saves_s):
        return None
    return Bottleneck(
        "slow-link",
        f"the link {row.name} carried {rate_text(row.rate)} while it was busy "
        f"({nbytes_text(row.nbytes)} in {seconds_text(row.busy_s)}), between other hosts went "
        f"{rate_text(usual)}; the critical path waited {seconds_text(on_path_s)} for it",
        "Find out what limits the link of this host: its card, its cable, a switch, or other "
        "traffic.",
        _COMPRESS if _compression(found) not in ("lz4", "zstd") else "",
        saves_s,
    )


def _slow_link(found: Findings, row: TransferRow) -> Bottleneck | None:
    on_path_s = min(found.network_s[row.link], row.busy_s)
    if row.mean_nbytes < _SMALL_NBYTES:
        # The number of small messages costs this time, whatever the link can carry.
        on_path_s = max(on_path_s - row.n_transfers / row.n_processes * _MESSAGE_S, 0.0)
    others = [one.rate for link, one in found.links.items() if link != row.link]
    usual = statistics.median(others) if others else 0.0
    said = (
        f"{row.link} carried {rate_text(row.rate)} while it was busy "
        f"({nbytes_text(row.nbytes)} in {seconds_text(row.busy_s)})"
    )
    if row.rate < _SLOW * usual:
        saves_s = on_path_s * (1 - row.rate / usual)
        said += f"; {count_text(len(others), 'other link')} carried {rate_text(usual)}"
        change = "Find out what limits this link: its card, its cable, a switch, or other traffic."
    elif row.share is not None and row.share < _SLOW:
        saves_s = on_path_s * (1 - row.share)
        said += f", {share_text(row.share)} of what it can carry"
        change = "Find out what else uses this link, or use a faster transport on it."
    elif found.is_worth(on_path_s) and on_path_s >= _MUCH * found.wall_s:
        saves_s = on_path_s
        said += "" if row.share is None else f", {share_text(row.share)} of what it can carry"
        change = "Use a faster network, or send fewer bytes: drop columns before they move."
    else:
        return None
    if not found.is_worth(saves_s):
        return None
    setting = ""
    if row.kind == FETCH:
        change += " Placement that knows the links keeps tasks away from slow ones."
        setting = "gpurt.placement.policy: data-aware"
    elif _compression(found) not in ("lz4", "zstd"):
        change += " Until then, compress what it carries."
        setting = _COMPRESS
    said += f"; the critical path waited {seconds_text(on_path_s)} for it"
    return Bottleneck("slow-link", said, change, setting, saves_s)


def _compression(found: Findings) -> str | None:
    chosen = found.setting("gpurt.shuffle.compression")
    return None if chosen is None else str(chosen)


def compression(found: Findings) -> Bottleneck | None:
    """Compression is off, and links are slower than a codec."""
    rows = [row for row in found.transfers if row.is_network and row.kind == MESSAGE and row.rate]
    if _compression(found) != "none" or not rows:
        return None
    saved = []
    for row in rows:
        on_path_s = min(found.network_s.get(row.link, 0.0), row.busy_s)
        # Encoding runs beside sending, so the slower of both counts.
        rate = min(row.rate * _RATIO, _ENCODING * row.n_processes)
        saved.append((on_path_s * max(1 - row.rate / rate, 0.0), row))
    saves_s = sum(seconds for seconds, _ in saved)
    if not found.is_worth(saves_s):
        return None
    _, row = max(saved, key=lambda pair: pair[0])
    return Bottleneck(
        "compression",
        f"compression is off, and {row.link} carried only {rate_text(row.rate)}; with half of the "
        f"bytes, the critical path would be {seconds_text(saves_s)} shorter",
        "Let the runtime compress what gets smaller, where that is faster than the link.",
        "gpurt.shuffle.compression: auto",
        saves_s,
    )


def small_messages(found: Findings) -> Bottleneck | None:
    """Many small messages: their number costs more than their bytes."""
    rows = [row for row in found.transfers if row.is_network and row.kind == MESSAGE]
    n, nbytes = sum(row.n_transfers for row in rows), sum(row.nbytes for row in rows)
    if not n or nbytes / n >= _SMALL_NBYTES:
        return None
    hops = found.columns.hops
    sent = (hops.kind == hops.kinds.index(MESSAGE)) & (hops.source != hops.target)
    most = int(np.bincount(hops.sender[sent]).max())
    on_path_s = sum(found.network_s.get(link, 0.0) for link in {row.link for row in rows})
    saves_s = min(on_path_s + found.path.seconds(PEER), most * _MESSAGE_S)
    if not found.is_worth(saves_s):
        return None
    return Bottleneck(
        "small-messages",
        f"{n:,} messages between hosts had {nbytes_text(nbytes / n)} on average; one worker sent "
        f"{most:,} of them",
        advice.SMALL_PARTITIONS,
        "gpurt.shuffle.routing: two-level" if _workers_of_a_host(found) >= 4 else "",
        saves_s,
    )


def _workers_of_a_host(found: Findings) -> float:
    return len(found.workers) / max(len({one.host for one in found.workers}), 1)


def back_pressure(found: Findings) -> Bottleneck | None:
    """Tasks waited because receivers answered late, though the bytes had arrived."""
    saves_s = found.path.seconds(PEER)
    if not found.is_worth(saves_s):
        return None
    hops = found.columns.hops
    late_s = np.bincount(hops.receiver, (hops.end_s - hops.wire_end_s).clip(min=0))
    said = f"the critical path waited {seconds_text(saves_s)} until receivers had room"
    if late_s.any():
        slowest = int(late_s.argmax())
        said += (
            f"; {found.columns.places.names[slowest]} answered latest, "
            f"{seconds_text(float(late_s[slowest]))} after its messages had arrived, in total"
        )
    return Bottleneck(
        "back-pressure",
        said,
        advice.SLOW_RECEIVERS,
        advice.more_for_shards(found.shuffle_memory) if _written(found) else "",
        saves_s,
    )


def _written(found: Findings) -> float:
    """Return the bytes that went to disk."""
    return sum(row.nbytes for row in found.transfers if _is_to_disk(row))


def _is_to_disk(row: TransferRow) -> bool:
    return not row.is_hop and (row.target == "disk" or row.kind == "spill")


def _is_disk(row: TransferRow) -> bool:
    return _is_to_disk(row) or (not row.is_hop and "disk" in (row.source, row.target))


def spill(found: Findings) -> Bottleneck | None:
    """Data went to disk, and tasks or messages waited for it."""
    rows = [row for row in found.transfers if _is_disk(row)]
    if not (written := _written(found)):
        return None
    busy_s = sum(row.longest_busy_s for row in rows)
    path = found.path
    waited_s = path.seconds(DISK) + path.seconds(MEMORY) + path.seconds(PEER)
    saves_s = min(waited_s, busy_s)
    if not found.is_worth(saves_s):
        return None
    is_shards = any(row.kind == "spill" for row in rows)
    read = sum(row.nbytes for row in rows if not _is_to_disk(row))
    return Bottleneck(
        "spill",
        f"{nbytes_text(written)} were written to disk and {nbytes_text(read)} read back; the "
        f"busiest worker spent {seconds_text(busy_s)} with that, and the critical path waited "
        f"{seconds_text(waited_s)} for disks and memory",
        *advice.of_spill(is_shards, found.shuffle_memory),
        saves_s,
    )


def pageable_copies(found: Findings) -> Bottleneck | None:
    """Copies to or from a device used memory that the system may move."""
    rows = [row for row in found.transfers if row.way.lower() == PAGEABLE]
    if not rows:
        return None
    pinned = [row.rate for row in found.transfers if row.way.lower() == "pinned" and row.rate]
    nbytes, busy_s = sum(row.nbytes for row in rows), sum(row.busy_s for row in rows)
    rate = nbytes / busy_s if busy_s else 0.0
    speedup = max(statistics.median(pinned) / rate if pinned and rate else 0.0, _PINNED_SPEEDUP)
    longest_s = sum(row.longest_busy_s for row in rows)
    saves_s = min(longest_s, found.path.seconds(COMPUTING)) * (1 - 1 / speedup)
    if not found.is_worth(saves_s):
        return None
    said = f"{nbytes_text(nbytes)} were copied {rows[0].link} from pageable memory at "
    said += rate_text(rate)
    if pinned:
        said += f", and pinned copies ran at {rate_text(statistics.median(pinned))}"
    return Bottleneck(
        "pageable-copies",
        said,
        "Copy from pinned memory: let CuPy or RMM allocate the host's side of copies.",
        "",
        saves_s,
    )


TRANSFER_RULES = (
    slow_link,
    compression,
    small_messages,
    back_pressure,
    spill,
    pageable_copies,
)
