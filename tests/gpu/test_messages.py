"""CuPy's arrays in messages of Dask, whenever the runtime is switched on."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.gpu.requirements import NO_NVIDIA, needs_gpu

pytestmark = needs_gpu

PROGRAM = """
import cupy, numpy as np
from distributed.protocol import deserialize, serialize
from dask_gpurt.plugins.memory import cupy_messages

host = np.arange(60).reshape(3, 20)[:, ::2]
{first}
cupy_messages.register()
for want in (host, host.T, host[:0]):
    header, frames = serialize(cupy.asarray(want), serializers=("dask",))
    got = deserialize(header, [bytes(frame) for frame in frames], deserializers=("dask",))
    assert type(got) is cupy.ndarray and got.dtype == want.dtype
    np.testing.assert_array_equal(cupy.asnumpy(got), want)
"""

#: What Dask may have done before the runtime came.
FIRST = {
    "nothing": "",
    "sent an array": "serialize(cupy.asarray(host), serializers=('dask',), on_error='message')",
    "looked for device values": "serialize(cupy.asarray(host), serializers=('cuda',))"
    " if __import__('importlib').util.find_spec('numba') else None",
}


@pytest.mark.parametrize("before", FIRST)
def test_arrays_are_sent_in_messages_of_dask(before):
    pytest.importorskip("distributed", reason="Dask is not installed")
    if NO_NVIDIA is None:
        pytest.importorskip("numba", reason="Dask needs Numba for CuPy's arrays on NVIDIA's GPUs")
    program = PROGRAM.format(first=FIRST[before])
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=False
    )
    assert ended.returncode == 0, ended.stderr
