"""Reads an export of Nsight Systems into a `Trace`: kernels, copies, and ranges of programs.

A process of the trace is a GPU as one program used it, or a program for its ranges. A stream is a
lane. Kernels are work whose path is their name; copies have paths as in the ledger. Calls of the
CUDA runtime and samples of the call stack are not read.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Sequence
from dataclasses import replace

from dask_gpurt.errors import TraceFileError
from dask_gpurt.tracing.events import DEVICE, Instant, LaneWork, Trace, TraceProcess
from dask_gpurt.tracing.nsight.export import Export

#: Most kernels that are work of their own. With more, the longest are, and sums have them all.
MAX_KERNELS = 100_000

#: Copies, by their number in CUPTI: the path, and the side whose memory decides how fast it is.
_COPIES = {
    1: ("host to device", "source"),
    2: ("device to host", "target"),
    3: ("host to device", "source"),
    4: ("device to host", "target"),
    5: ("device", ""),
    6: ("device", ""),
    7: ("device", ""),
    8: ("device", ""),
    9: ("host", "source"),
    10: ("device to device", ""),
    11: ("host to device", "managed"),
    12: ("device to host", "managed"),
    13: ("device to device", "managed"),
}
#: Kinds of memory, by their number in CUPTI.
_MEMORY = {
    0: "pageable",
    1: "pinned",
    2: "device",
    3: "array",
    4: "managed",
    5: "device",
    6: "managed",
}
_MARK, _PUSHED, _STARTED, _DOMAIN = 34, 59, 60, 75
#: The domain of our own ranges, whose names are those of our lanes.
_OURS = "dask_gpurt"

_COPY_COLUMNS = {
    "deviceId": 0,
    "streamId": 0,
    "globalPid": 0,
    "bytes": 0,
    "copyKind": 0,
    "srcKind": -1,
    "dstKind": -1,
}


def copy_path(kind: int, source: int, target: int) -> tuple[str, str]:
    """Return the path and the way of a copy.

    Parameters
    ----------
    kind, source, target
        Numbers of CUPTI: of the copy, and of the memory it reads and writes; -1 if unknown.
    """
    path, side = _COPIES.get(kind, ("copy", ""))
    if side == "managed":
        return path, side
    memory = {"source": source, "target": target}.get(side, -1)
    return path, _MEMORY.get(memory, "")


def lane_and_path(name: str) -> tuple[str, str]:
    """Return the lane and the path in the name of a range of ours."""
    lane, colon, path = name.partition(": ")
    return (lane, path) if colon else ("ranges", name)


def pid_of(global_id: int) -> int:
    """Return the process in an identifier of a process or of a thread."""
    return (global_id >> 24) & 0xFFFFFF


def read_nsys(path: str | os.PathLike[str]) -> Trace:
    """Read an export of Nsight Systems of any version.

    Returns
    -------
    Trace
        Its time 0 is the begin of the session. `about` has the pid of each process under "pids",
        sums of kernels under "kernels", and names of threads under "threads".

    Raises
    ------
    TraceFileError
        The file is missing, damaged, or no export.
    """
    with contextlib.closing(Export(path)) as export:
        try:
            return _ExportReader(export).read()
        except (AttributeError, OverflowError, TypeError, ValueError) as error:
            # SQLite takes texts for numbers.
            raise TraceFileError(f"{path} is damaged: {error!r}") from error


class _ExportReader:
    """Turns the tables of one export into a trace."""

    def __init__(self, export: Export) -> None:
        self._export = export
        self._strings = dict(export.rows("StringIds", ("id", "value"), {}))
        rows = export.rows("TARGET_INFO_SYSTEM_ENV", ("name", "value"), {})
        self._host = next((text for name, text in rows if name == "Hostname"), "")
        self._processes: dict[tuple[int, int], int] = {}
        self._pids: dict[str, int] = {}
        self._trace = Trace([])

    def read(self) -> Trace:
        trace = self._trace
        for (began_ns,) in self._export.rows("TARGET_INFO_SESSION_START_TIME", ("utcEpochNs",), {}):
            trace.began_utc_s = began_ns / 1e9
        self._programs = self._program_names()
        self._gpus = self._gpu_names()
        self._read_kernels()
        self._read_copies()
        self._read_memsets()
        self._read_ranges()
        trace.work.sort(key=lambda work: work.start_s)
        trace.instants.sort(key=lambda instant: instant.at_s)
        ends_s = itertools.chain(
            (work.end_s for work in trace.work), (one.at_s for one in trace.instants)
        )
        trace.wall_s = max(ends_s, default=0.0)
        trace.about |= {"pids": self._pids, "threads": self._thread_names(), **self._versions()}
        return trace

    def _versions(self) -> dict[str, str]:
        # The table had another name before 2022.
        return {
            name: text
            for table in ("EXPORT_META_DATA", "META_DATA_EXPORT")
            for name, text in self._export.rows(table, ("name",), {"value": ""})
            if name in ("EXPORT_PRODUCT_VERSION", "EXPORT_SCHEMA_VERSION")
        }

    def _program_names(self) -> dict[int, str]:
        rows = self._export.rows("PROCESSES", ("globalPid", "name"), {})
        return {pid_of(global_id): name for global_id, name in rows}

    def _thread_names(self) -> dict[str, str]:
        rows = self._export.rows("ThreadNames", ("globalTid", "nameId"), {})
        return {
            f"{pid_of(thread)}/{thread & 0xFFFFFF}": self._strings.get(name, "")
            for thread, name in rows
        }

    def _gpu_names(self) -> dict[tuple[int | None, int], str]:
        """Return names of GPUs, by process and number; the process is None if all number alike."""
        columns = self._export.columns("TARGET_INFO_GPU")
        number = "cuDevice" if "cuDevice" in columns else "id"
        rows = self._export.rows("TARGET_INFO_GPU", (number, "name"), {})
        names: dict[tuple[int | None, int], str] = {(None, id_): name for id_, name in rows}
        # Programs that see a part of the GPUs number them anew.
        by_id = dict(self._export.rows("TARGET_INFO_GPU", ("id", "name"), {}))
        rows = self._export.rows("TARGET_INFO_CUDA_DEVICE", ("cudaId", "gpuId"), {"pid": -1})
        for cuda_id, gpu_id, pid in rows:
            if gpu_id in by_id:
                names[(None if pid < 0 else pid, cuda_id)] = by_id[gpu_id]
        return names

    def _process(self, global_id: int, device: int = -1) -> int:
        """Return the index of a GPU as a program used it, or of a program."""
        pid = pid_of(global_id)
        index = self._processes.get((pid, device))
        if index is None:
            program = f"{self._programs.get(pid, '').rpartition('/')[2] or 'process'} {pid}"
            address, name = f"nsys://{self._host}/{pid}", program
            if device >= 0:
                gpu = self._gpus.get((pid, device)) or self._gpus.get((None, device), "GPU")
                address, name = f"{address}/{device}", f"{gpu} {device} of {program}"
            index = self._processes[pid, device] = len(self._trace.processes)
            self._trace.processes.append(TraceProcess(address, name, self._host, DEVICE))
            self._pids[address] = pid
        return index

    def _add(
        self,
        device: Sequence[int],
        path: str,
        start_ns: int,
        end_ns: int,
        nbytes: int = 0,
        way: str = "",
    ) -> None:
        """Add work of a stream. The device has its number, its stream and its process."""
        number, stream, global_pid = device
        self._trace.work.append(
            LaneWork(
                process=self._process(global_pid, number),
                lane=f"stream {stream}",
                path=path,
                nbytes=nbytes,
                start_s=start_ns / 1e9,
                end_s=end_ns / 1e9,
                way=way,
            )
        )

    def _read_kernels(self) -> None:
        table = "CUPTI_ACTIVITY_KIND_KERNEL"
        optional = {
            **{"deviceId": 0, "streamId": 0, "globalPid": 0},
            **{"shortName": -1, "demangledName": -1, "mangledName": -1},
        }
        rows = self._export.rows(table, ("start", "end"), optional, 'ORDER BY "end" - "start" DESC')
        sums: dict[tuple[int, str], list[int]] = {}
        dropped: dict[int, int] = {}
        for number, (start_ns, end_ns, *device, short, demangled, mangled) in enumerate(rows):
            known = (self._strings.get(one) for one in (short, demangled, mangled))
            name = next((text for text in known if text), "a kernel")
            process = self._process(device[2], device[0])
            sum_ = sums.setdefault((process, name), [0, 0])
            sum_[0] += 1
            sum_[1] += end_ns - start_ns
            if number < MAX_KERNELS:
                self._add(device, name, start_ns, end_ns)
            else:
                dropped[process] = dropped.get(process, 0) + 1
        for process, n in dropped.items():
            known_process = self._trace.processes[process]
            self._trace.processes[process] = replace(known_process, n_dropped=n)
        self._trace.about["kernels"] = [
            [self._trace.processes[process].address, name, n, busy_ns / 1e9]
            for (process, name), (n, busy_ns) in sorted(sums.items(), key=lambda one: -one[1][1])
        ]

    def _read_copies(self) -> None:
        rows = self._export.rows("CUPTI_ACTIVITY_KIND_MEMCPY", ("start", "end"), _COPY_COLUMNS)
        for start_ns, end_ns, *device, nbytes, kind, source, target in rows:
            path, way = copy_path(kind, source, target)
            self._add(device, path, start_ns, end_ns, nbytes, way)

    def _read_memsets(self) -> None:
        optional = {"deviceId": 0, "streamId": 0, "globalPid": 0, "bytes": 0}
        rows = self._export.rows("CUPTI_ACTIVITY_KIND_MEMSET", ("start", "end"), optional)
        for start_ns, end_ns, *device, nbytes in rows:
            self._add(device, "memset", start_ns, end_ns, nbytes)

    def _read_ranges(self) -> None:
        optional = {
            **{"end": -1, "eventType": _PUSHED, "globalTid": 0},
            **{"text": "", "textId": -1, "domainId": 0},
        }
        rows = list(self._export.rows("NVTX_EVENTS", ("start",), optional))
        last_ns = max((max(row[0] or 0, row[1]) for row in rows), default=0)
        domains = {
            (pid_of(row[3]), row[6]): row[4] or self._strings.get(row[5], "")
            for row in rows
            if row[2] == _DOMAIN
        }
        for start_ns, end_ns, kind, thread, text, text_id, domain_id in rows:
            name = text or self._strings.get(text_id, "a range")
            if kind == _MARK:
                process = self._process(thread)
                self._trace.instants.append(Instant(process, name, start_ns / 1e9))
            elif kind in (_PUSHED, _STARTED):
                domain = domains.get((pid_of(thread), domain_id), "")
                lane, path = lane_and_path(name) if domain == _OURS else (domain or "ranges", name)
                self._trace.work.append(
                    LaneWork(
                        process=self._process(thread),
                        lane=lane,
                        path=path,
                        nbytes=0,
                        start_s=start_ns / 1e9,
                        # An open range went on when the session ended.
                        end_s=(end_ns if end_ns >= start_ns else last_ns) / 1e9,
                        thread=thread & 0xFFFFFF,
                    )
                )
