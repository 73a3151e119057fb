"""What to do with copies: decided in `memory.decisions.residency`, done by `memory.carrier`."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(frozen=True)
class Put:
    """Copy a value from one level into a tier further down."""

    key: Hashable
    serial: int
    source: int
    target: int


@dataclass(frozen=True)
class Load:
    """Bring a value back to its home."""

    key: Hashable
    serial: int
    source: int
    target: int


@dataclass(frozen=True)
class Drop:
    """Let go of one copy. It is counted as gone already."""

    key: Hashable
    serial: int
    level: int


Move = Put | Load | Drop
