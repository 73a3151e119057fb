"""A helper that returns findings of `dask gpurt doctor` by their names."""

from __future__ import annotations

from typing import Any

from tests.command.conftest import Outcome


def found(outcome: Outcome, what: str) -> list[dict[str, Any]]:
    assert "Traceback" not in outcome.err
    return [one for one in outcome.json["findings"] if one["what"] == what]
