"""Section that measures nvCOMP's codecs on typical columns: rates and compression ratios."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.gpu.report import Report, Row
from benchmarks.gpu.timing import medians_s
from dask_gpurt.devices.cuda.driver import why_no_cuda

N_VALUES = 8 << 20
REPEATS = 5
ALGORITHMS = ("LZ4", "Snappy", "Zstd", "Cascaded", "Bitcomp", "ANS", "GDeflate")


def skip_reason() -> str:
    """Return why the section cannot run; empty if it can."""
    if (reason := why_no_cuda()) is not None:
        return reason
    try:
        # cuDF cannot be imported after nvCOMP.
        import cudf  # noqa: F401
    except ImportError:
        pass
    try:
        from nvidia import nvcomp  # noqa: F401
    except ImportError as error:
        return f"nvCOMP cannot be imported: {error}"
    return ""


def columns() -> dict[str, np.ndarray]:
    """Return columns like those in shuffles, by name."""
    rng = np.random.default_rng(7)
    return {
        "int64 sequential": np.arange(N_VALUES, dtype=np.int64),
        "int64 key of a million": rng.integers(0, 1_000_000, N_VALUES),
        "float64 price": np.round(rng.uniform(1, 1000, N_VALUES), 2),
        "float64 uniform": rng.random(N_VALUES),
    }


def run(report: Report) -> None:
    """Measure each codec on each column."""
    for name, column in columns().items():
        for algorithm in ALGORITHMS:
            try:
                report(measure(algorithm, name, column))
            except Exception as error:
                # The other codecs may still take this column.
                report(Row(f"{algorithm}, {name}", skipped=repr(error)))


def measure(algorithm: str, name: str, column: np.ndarray) -> Row:
    """Encode and decode a column, and compare the result with it."""
    import cupy
    from nvidia import nvcomp

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        raw = cupy.asarray(column.view(np.uint8))
        stream.synchronize()
        codec = nvcomp.Codec(algorithm=algorithm, cuda_stream=stream.ptr)
        source = nvcomp.as_array(raw, cuda_stream=stream.ptr)
        results: dict[str, Any] = {}

        def encode() -> None:
            results["encoded"] = codec.encode(source)
            stream.synchronize()

        def decode() -> None:
            results["decoded"] = codec.decode(results["encoded"])
            stream.synchronize()

        took_s = medians_s({"encode": encode, "decode": decode}, REPEATS)
        decoded = cupy.asarray(results["decoded"]).view(cupy.uint8)
        is_same = bool((decoded == raw).all())
    encoded_nbytes = int(results["encoded"].buffer_size)
    rates = {step: column.nbytes / s / 1e9 for step, s in took_s.items()}
    return Row(
        f"{algorithm}, {name}",
        rates["decode"],
        "GB/s decoded",
        column.nbytes / encoded_nbytes,
        "bytes / bytes encoded",
        details={"is_same": is_same, "gb_per_s": rates, "encoded_nbytes": encoded_nbytes},
    )
