"""JSON as its standard has it, so that every parser takes what commands print."""

from __future__ import annotations

import json
import math
from typing import Any


def to_json(value: Any) -> str:
    """Plain values as text; numbers that are not finite, which JSON does not have, as null."""
    return json.dumps(_finite(value), indent=2, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
