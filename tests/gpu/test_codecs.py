"""nvCOMP on a real device: the suite of the codec port, and payloads that fail to decode."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from dask_gpurt.codecs import nvcomp
from dask_gpurt.codecs.nvcomp import NVCOMP_CODECS
from tests.conformance.codec_suite import CodecSuite


def why_not() -> str | None:
    for name in ("nvidia", "nvidia.nvcomp"):
        if importlib.util.find_spec(name) is None:
            return "nvCOMP is not installed (the extra nvcomp)"
    try:
        nvcomp._library().as_array(np.zeros(1, np.uint8))
    except RuntimeError as error:
        return f"no GPU: {error}"
    return None


WHY_NOT = why_not()
needs_nvcomp = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))


class NvcompSuite(CodecSuite):
    # nvCOMP 5.3 leaves some bytes of its header as they were in memory.
    sets_every_byte = False


@needs_nvcomp
class TestLz4(NvcompSuite):
    codec = NVCOMP_CODECS[128]
    compressible = ("constant", "small range", "text")


@needs_nvcomp
class TestZstd(NvcompSuite):
    codec = NVCOMP_CODECS[129]
    compressible = ("constant", "small range", "text", "days")


@needs_nvcomp
@pytest.mark.parametrize("codec", NVCOMP_CODECS.values(), ids=lambda codec: codec.name)
@pytest.mark.parametrize("nbytes", [(64 << 10) - 1, 64 << 10, (64 << 10) + 1, 8 << 20])
def test_sizes_around_a_chunk_are_decoded(codec, nbytes):
    raw = (np.arange(nbytes) // 7).astype(np.uint8)
    payload = codec.encode(raw, 1)
    assert payload is not None
    out = np.empty_like(raw)
    codec.decode_into(np.concatenate(payload), out, 1)
    np.testing.assert_array_equal(out, raw)
