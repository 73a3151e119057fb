"""Partition numbers in device memory are counted there."""

from __future__ import annotations

from typing import Any

import pytest

from dask_gpurt.frames.partition_sizes import partition_sizes
from tests.gpu.requirements import needs_gpu

pytestmark = needs_gpu


class Series:
    """A column of partition numbers on a device, as cuDF has one."""

    def __init__(self, values: Any) -> None:
        self.values = values

    @property
    def __cuda_array_interface__(self):
        return self.values.__cuda_array_interface__

    def to_numpy(self):
        raise AssertionError("the numbers were copied to the host")


@pytest.mark.parametrize("dtype", ["i4", "u8"])
def test_numbers_on_a_device_are_counted_there(dtype):
    import cupy

    assert partition_sizes(Series(cupy.array([2, 0, 2, 5], dtype))) == [1, 0, 2, 0, 0, 1]


def test_rows_without_a_partition_do_not_count_on_a_device():
    import cupy

    assert partition_sizes(Series(cupy.array([-1, 1, -1]))) == [0, 1]
    assert partition_sizes(Series(cupy.array([1.0]))) is None
