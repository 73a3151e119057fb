"""Moves of copies: decided by `memory.decisions.residency`, carried out by `memory.carrier`."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(frozen=True)
class Put:
    """An order to copy a value from one level into a tier further down."""

    key: Hashable
    serial: int
    source: int
    target: int


@dataclass(frozen=True)
class Load:
    """An order to bring a value back to its top level."""

    key: Hashable
    serial: int
    source: int
    target: int


@dataclass(frozen=True)
class Drop:
    """An order to free one copy. The level has stopped counting its bytes already."""

    key: Hashable
    serial: int
    level: int


Move = Put | Load | Drop
