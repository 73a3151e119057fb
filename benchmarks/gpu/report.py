"""Rows of the GPU benchmark: measured values and ratios, with their units and targets."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Row:
    """One line of the results.

    Attributes
    ----------
    value, unit
        The measured value; None if the row has only a ratio.
    ratio, ratio_of
        A ratio, and its two terms in words, such as "this / that".
    target
        The wanted value, in words.
    skipped
        The reason why there is no result.
    details
        Other measured values.
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
        """Return the row as a line of text."""
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
        """Return the row as one line of JSON."""
        # Values may be NumPy numbers, which JSON does not know.
        return json.dumps(asdict(self), default=lambda number: number.item())


def parse_row(text: str) -> Row | None:
    """Return the row that a process printed as JSON, or None if the line is no row."""
    try:
        return Row(**json.loads(text))
    except (ValueError, TypeError):
        return None


#: Takes the rows of a section. A section reports each row at once, so that a later failure does
#: not lose it.
Report = Callable[[Row], None]
