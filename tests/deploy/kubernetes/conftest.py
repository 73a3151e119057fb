"""A node with the operator, for all tests here that one process runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.deploy.kubernetes.lab import Node, started


@pytest.fixture(scope="session")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with started(tmp_path_factory.mktemp("node")) as node:
        yield node
