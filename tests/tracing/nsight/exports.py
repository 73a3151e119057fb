"""Exports of Nsight Systems for tests, with any of the tables and columns that versions have."""

from __future__ import annotations

import sqlite3
from pathlib import Path

#: Columns of each table, as the newest version that we know has them.
TABLES = {
    "META_DATA_EXPORT": "name TEXT NOT NULL, value TEXT",
    "StringIds": "id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL",
    "PROCESSES": "globalPid INTEGER, pid INTEGER, name TEXT",
    "ThreadNames": "nameId INTEGER NOT NULL, priority INTEGER, globalTid INTEGER",
    "TARGET_INFO_SESSION_START_TIME": "utcEpochNs INTEGER, utcTime TEXT, localTime TEXT",
    "TARGET_INFO_SYSTEM_ENV": (
        "globalVid INTEGER, devStateName TEXT NOT NULL, name TEXT NOT NULL,"
        " nameEnum INTEGER NOT NULL, value TEXT NOT NULL"
    ),
    "TARGET_INFO_GPU": (
        "vmId INTEGER NOT NULL, id INTEGER NOT NULL, name TEXT, busLocation TEXT, uuid TEXT,"
        " cuDevice INTEGER"
    ),
    "TARGET_INFO_CUDA_DEVICE": (
        "gpuId INTEGER, cudaId INTEGER, pid INTEGER, uuid TEXT, numMultiprocessors INTEGER"
    ),
    "CUPTI_ACTIVITY_KIND_KERNEL": (
        "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,"
        " contextId INTEGER NOT NULL, greenContextId INTEGER, streamId INTEGER NOT NULL,"
        " correlationId INTEGER, globalPid INTEGER, demangledName INTEGER NOT NULL,"
        " shortName INTEGER NOT NULL, mangledName INTEGER, launchType INTEGER,"
        " registersPerThread INTEGER, gridX INTEGER, gridY INTEGER, gridZ INTEGER,"
        " blockX INTEGER, blockY INTEGER, blockZ INTEGER, graphNodeId INTEGER"
    ),
    "CUPTI_ACTIVITY_KIND_MEMCPY": (
        "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,"
        " contextId INTEGER NOT NULL, greenContextId INTEGER, streamId INTEGER NOT NULL,"
        " correlationId INTEGER, globalPid INTEGER, bytes INTEGER NOT NULL,"
        " copyKind INTEGER NOT NULL, deprecatedSrcId INTEGER, srcKind INTEGER, dstKind INTEGER,"
        " srcDeviceId INTEGER, dstDeviceId INTEGER, migrationCause INTEGER, graphNodeId INTEGER,"
        " virtualAddress INTEGER, copyCount INTEGER"
    ),
    "CUPTI_ACTIVITY_KIND_MEMSET": (
        "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,"
        " contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER,"
        " globalPid INTEGER, value INTEGER NOT NULL, bytes INTEGER NOT NULL, memKind INTEGER"
    ),
    "NVTX_EVENTS": (
        "start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER,"
        " category INTEGER, color INTEGER, text TEXT, globalTid INTEGER, endGlobalTid INTEGER,"
        " textId INTEGER, domainId INTEGER, jsonText TEXT"
    ),
}
PID, OTHER_PID = 4711, 4712
BEGAN_NS = 1_800_000_000_000_000_000


def global_id(pid: int, thread: int = 0) -> int:
    """Return the identifier of a process or a thread, with the host's number above."""
    return 1 << 48 | pid << 24 | thread


def _copy(start: int, nbytes: int, kind: int, source: int | None, target: int | None):
    return {
        **{"start": start, "end": start + 100, "deviceId": 0, "contextId": 1, "streamId": 13},
        **{"globalPid": global_id(PID), "bytes": nbytes, "copyKind": kind},
        **{"srcKind": source, "dstKind": target},
    }


def _kernel(start: int, length: int, name: int, pid: int = PID):
    return {
        **{"start": start, "end": start + length, "deviceId": 0, "contextId": 1, "streamId": 7},
        **{"globalPid": global_id(pid), "demangledName": name + 1, "shortName": name},
        **{"registersPerThread": 32, "gridX": 1, "gridY": 1, "gridZ": 1},
    }


def _range(start: int, end: int | None, kind: int, **about):
    return {"start": start, "end": end, "eventType": kind, "globalTid": global_id(PID, 99), **about}


#: Rows of each table. Times are in nanoseconds since the session began.
ROWS: dict[str, list[dict]] = {
    "META_DATA_EXPORT": [
        {"name": "EXPORT_PRODUCT_VERSION", "value": "2024.6.2.225"},
        {"name": "EXPORT_SCHEMA_VERSION", "value": "3.16.1"},
    ],
    "StringIds": [
        {"id": 1, "value": "join"},
        {"id": 2, "value": "join<int>(int*)"},
        {"id": 3, "value": "scan"},
        {"id": 4, "value": "scan<int>(int*)"},
        {"id": 5, "value": "communication: pack"},
        {"id": 6, "value": "dask worker"},
    ],
    "PROCESSES": [
        {"globalPid": global_id(PID), "pid": PID, "name": "/usr/bin/python3"},
        {"globalPid": None, "pid": None, "name": "unknown"},
    ],
    "ThreadNames": [{"nameId": 6, "priority": 10, "globalTid": global_id(PID, 99)}],
    "TARGET_INFO_SESSION_START_TIME": [{"utcEpochNs": BEGAN_NS, "utcTime": "", "localTime": ""}],
    "TARGET_INFO_SYSTEM_ENV": [
        {"devStateName": "Local", "name": "Hostname", "nameEnum": 619, "value": "node1"},
        {"devStateName": "Local", "name": "Other", "nameEnum": 1, "value": b"\xff\xfe"},
    ],
    "TARGET_INFO_GPU": [
        {"vmId": 1, "id": 3, "name": "A100", "cuDevice": 0},
        {"vmId": 1, "id": 0, "name": "H200", "cuDevice": 1},
    ],
    "TARGET_INFO_CUDA_DEVICE": [{"gpuId": 0, "cudaId": 0, "pid": PID}],
    "CUPTI_ACTIVITY_KIND_KERNEL": [
        _kernel(1000, 50, 1),
        _kernel(1100, 70, 1),
        _kernel(1200, 30, 3),
        _kernel(1300, 1000, 3, OTHER_PID),
    ],
    "CUPTI_ACTIVITY_KIND_MEMCPY": [
        _copy(2000, 1 << 20, 1, 0, 2),
        _copy(2200, 1 << 21, 1, 1, 2),
        _copy(2400, 1 << 22, 2, 2, 1),
        _copy(2600, 1 << 23, 8, 2, 2),
        _copy(2800, 1 << 24, 10, 2, 2),
        _copy(3000, 1 << 25, 11, 4, 4),
        _copy(3200, 1 << 26, 2, None, None),
        _copy(3400, 1 << 27, 99, None, None),
    ],
    "CUPTI_ACTIVITY_KIND_MEMSET": [
        {
            **{"start": 4000, "end": 4010, "deviceId": 0, "contextId": 1, "streamId": 7},
            **{"globalPid": global_id(PID), "value": 0, "bytes": 1 << 28},
        }
    ],
    "NVTX_EVENTS": [
        _range(10, None, 75, text="dask_gpurt", domainId=1),
        _range(20, 5000, 59, textId=5, domainId=1),
        _range(30, 40, 60, text="a range of the program", domainId=0),
        _range(50, None, 34, text="a mark", domainId=0),
        _range(60, None, 59, text="open", domainId=0),
        _range(70, 80, 33, text="a category", domainId=0),
    ],
}


def write_export(
    path: Path,
    without: tuple[str, ...] = (),
    rows: dict[str, list[dict]] = ROWS,
    renamed: dict[str, str] | None = None,
    page_nbytes: int = 4096,
) -> Path:
    """Write an export.

    Parameters
    ----------
    without
        Names of tables, and of columns as "table.column", that the file lacks.
    renamed
        Names of tables in the file, by the names here.
    page_nbytes
        Size of the pages of the database.
    """
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA page_size = {page_nbytes}")
    for table, ddl in TABLES.items():
        if table in without:
            continue
        columns = [
            column.strip()
            for column in ddl.split(",")
            if f"{table}.{column.split()[0]}" not in without
        ]
        names = {column.split()[0] for column in columns}
        name = (renamed or {}).get(table, table)
        connection.execute(f"CREATE TABLE {name} ({', '.join(columns)})")
        for row in rows.get(table, []):
            kept = {key: value for key, value in row.items() if key in names}
            # Columns that only describe, and that no row here has.
            for column in columns:
                if "NOT NULL" in column:
                    kept.setdefault(column.split()[0], 0)
            marks = ", ".join("?" * len(kept))
            # Bytes that are no UTF-8 are text for Nsight Systems.
            marks = (
                marks
                if not any(isinstance(one, bytes) for one in kept.values())
                else ", ".join(
                    "CAST(? AS TEXT)" if isinstance(one, bytes) else "?" for one in kept.values()
                )
            )
            quoted = ", ".join(f'"{key}"' for key in kept)
            connection.execute(f"INSERT INTO {name} ({quoted}) VALUES ({marks})", [*kept.values()])
    connection.commit()
    connection.close()
    return path
