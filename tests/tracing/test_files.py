"""Files give back the trace that was written, or say what is wrong with them."""

from __future__ import annotations

import pytest
from hypothesis import given

from dask_gpurt.tracing.files import ENDINGS, read, write
from tests.tracing.traces import traces

@pytest.mark.parametrize("ending", ENDINGS)
@given(trace=traces())
def test_a_file_gives_back_the_trace(tmp_path_factory, ending, trace):
    path = tmp_path_factory.getbasetemp() / f"trace{ending}"
    write(trace, path)
    assert read(path) == trace
