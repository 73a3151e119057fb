"""Helpers for tests of settings: the defaults, and the keys of settings and of their schema."""

from __future__ import annotations

from dask_gpurt.config import (
    CollectiveSettings,
    MemorySettings,
    PlacementSettings,
    Settings,
    ShuffleSettings,
    TopologySettings,
    TraceSettings,
)

MIB = 1 << 20
GIB = 1 << 30

DEFAULTS = Settings(
    enabled=False,
    strict=False,
    shuffle=ShuffleSettings(
        transport="auto",
        compression="auto",
        memory=0.3,
        device=0.3,
        message_nbytes=8 * MIB,
        in_flight="auto",
        overlap=True,
        routing="auto",
    ),
    memory=MemorySettings(
        enabled=True,
        policy="next-use",
        directory=None,
        disk_limit_nbytes=None,
        compression="none",
        compressed_nbytes=None,
        device=0.6,
        replace_dask_cuda=False,
    ),
    collectives=CollectiveSettings(enabled=True, order="stock"),
    placement=PlacementSettings(enabled=True, policy="auto"),
    topology=TopologySettings(file="auto", text=None, probe="auto"),
    trace=TraceSettings(limit_nbytes=GIB),
)


def leaves(section, prefix=""):
    found = {}
    for name, value in section.items():
        if isinstance(value, dict):
            found |= leaves(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def schema_leaves(section, prefix=""):
    found = {}
    for name, entry in section["properties"].items():
        if "properties" in entry:
            found |= schema_leaves(entry, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = entry
    return found
