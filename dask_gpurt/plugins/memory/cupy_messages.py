"""Messages with CuPy's arrays where CuPy is built for AMD's GPUs.

Dask receives such an array through RMM or Numba, which allocate on NVIDIA's GPUs alone. On AMD's,
no array could reach another process. There, CuPy itself allocates for the functions here. They are
registered with Dask when it first looks for those of CuPy; on NVIDIA's GPUs, Dask's own stay.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from distributed.protocol.cuda import cuda_deserialize, cuda_serialize
from distributed.protocol.serialize import dask_deserialize, dask_serialize


def register() -> None:
    """Let Dask send and receive CuPy's arrays on any GPU."""
    for dispatch in (dask_serialize, dask_deserialize, cuda_serialize, cuda_deserialize):
        dispatch.register_lazy("cupy")(_look_up)
    if "distributed.protocol.cupy" in sys.modules:
        # Dask has looked before, and does not look again.
        _replace()


def _look_up() -> None:
    from dask_gpurt.frames.device import cupy_

    # Dask's own functions need a library that may be missing, or useless, on AMD's GPUs.
    with contextlib.suppress(ImportError) if cupy_.is_for_amd() else contextlib.nullcontext():
        import distributed.protocol.cupy  # noqa: F401
    _replace()


def _replace() -> None:
    from dask_gpurt.frames.device import cupy_

    if cupy_.is_for_amd():
        dask_serialize.register(cupy_.Array)(_serialize)
        dask_deserialize.register(cupy_.Array)(_deserialize)


def _serialize(array: Any) -> tuple[dict[str, Any], list[memoryview]]:
    from dask_gpurt.frames.device import cupy_

    (dtype, shape, is_transposed), memory = cupy_.take_apart(array)
    # Plain values: no code of ours unpickles what a peer sends.
    header = {"dtype": dtype.str, "shape": list(shape), "is_transposed": bool(is_transposed)}
    return header, [cupy_.to_host(memory).data]


def _deserialize(header: dict[str, Any], frames: Sequence[Any]) -> Any:
    from dask_gpurt.frames.device import cupy_

    (frame,) = frames
    found = (np.dtype(header["dtype"]), tuple(header["shape"]), header["is_transposed"])
    return cupy_.put_together(found, cupy_.from_host(frame))
