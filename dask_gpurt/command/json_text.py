"""Strictly standard JSON, so that every parser accepts the output of commands."""

from __future__ import annotations

import json
import math
from typing import Any


def to_json(value: Any) -> str:
    """Return plain values as JSON. Non-finite numbers, which JSON lacks, become null."""
    return json.dumps(_finite(value), indent=2, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
