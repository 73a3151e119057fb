"""Tests of the options that UCX gets: what becomes of them where it takes no device memory."""

from __future__ import annotations

import pytest

from dask_gpurt.transport.ucx.context import without_devices


@pytest.mark.parametrize(
    ("transports", "expected"),
    [
        ("all", "^cuda"),
        ("^posix,sysv", "^posix,sysv,cuda"),
        ("tcp,cuda_copy,cuda_ipc,self,gdr_copy", "tcp,self"),
        ("cuda", "^cuda"),
        ("tcp,all", "^cuda"),
    ],
)
def test_transports_of_cuda_are_left_out(transports, expected):
    assert without_devices(transports) == expected
