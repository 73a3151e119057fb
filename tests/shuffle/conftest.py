"""A fixture with a store of shards for each test."""

from __future__ import annotations

import pytest

from tests.shuffle.shard_rig import Rig


@pytest.fixture
def rig(tmp_path):
    """A store with room for all shards."""
    return Rig(tmp_path)
