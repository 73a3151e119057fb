"""Weak handlers look like the methods that they call, and let go of their owner."""

from __future__ import annotations

import asyncio
import inspect
import weakref

import pytest
from distributed.core import _expects_comm
from distributed.utils import has_keyword, iscoroutinefunction

from dask_gpurt.errors import TransportError
from dask_gpurt.plugins.weak_handlers import weak_handler


class Owner:
    async def plain(self, key, *, serializers=None):
        return key, serializers

    async def with_comm(self, comm, key):
        return comm, key


@pytest.mark.parametrize("name", ["plain", "with_comm"])
def test_handler_has_what_distributed_looks_at(name):
    method = getattr(Owner(), name)
    handler = weak_handler(method)
    for look in (_expects_comm, inspect.signature, iscoroutinefunction):
        assert look(handler) == look(method)
    assert has_keyword(handler, "serializers") == (name == "plain")
    assert handler.__name__ == name


def test_handler_passes_arguments_until_its_owner_is_gone():
    owner = Owner()
    handler, gone = weak_handler(owner.plain), weakref.ref(owner)
    assert not _expects_comm(handler)
    assert asyncio.run(handler(1, serializers=["dask"])) == (1, ["dask"])
    del owner
    assert gone() is None
    with pytest.raises(TransportError, match="plain has no answer: its owner is closed"):
        asyncio.run(handler(1))
