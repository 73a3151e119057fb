"""Rows of the GPU benchmark: what was measured, and what it is a ratio of."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Row:
    """One line of the result.

    Attributes
    ----------
    value, unit
        What was measured; None if the row is a ratio alone.
    ratio, ratio_of
        A number, and "this / that" in words.
    target
        What the ratio should be, in words.
    skipped
        Why there is no result.
    details
        Everything else that was measured on the way.
    """

    name: str
    value: float | None = None
    unit: str = ""
    ratio: float | None = None
    ratio_of: str = ""
    target: str = ""
    skipped: str = ""
    details: dict[str, Any] = field(default_factory=dict)

    def line(self) -> str:
        if self.skipped:
            return f"{self.name:40} skipped: {self.skipped}"
        text = f"{self.name:40}"
        if self.value is not None:
            text += f" {self.value:10.4g} {self.unit}"
        if self.ratio is not None:
            text += f"  {self.ratio:6.3f} = {self.ratio_of}"
        if self.target:
            text += f" (wanted: {self.target})"
        return text

    def to_json(self) -> str:
        # Numbers of NumPy's get into details easily.
        return json.dumps(asdict(self), default=lambda number: number.item())


def row_of(text: str) -> Row | None:
    """A row that another process printed; None for anything else that it printed."""
    try:
        return Row(**json.loads(text))
    except (ValueError, TypeError):
        return None


#: A section says its rows one by one, so that none is lost with what comes after it.
Say = Callable[[Row], None]
