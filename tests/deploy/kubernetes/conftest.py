"""A node with the operator, for the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.deploy.kubernetes.lab import Node, started


# Not for the session: an operator that has just seen a cluster end has missed the next one, twice
# in runs of all tests. Its library reconnects after two minutes, and a client waits for one.
@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with started(tmp_path_factory.mktemp("node")) as node:
        yield node
