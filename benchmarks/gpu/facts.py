"""Section that describes the device, from CuPy and, where it is installed, from NVML."""

from __future__ import annotations

import contextlib
from typing import Any

from benchmarks.gpu.report import Report, Row
from dask_gpurt.devices.cuda.driver import CupyDriver, why_no_cuda


def skip_reason() -> str:
    """Return why the section cannot run; empty if it can."""
    return why_no_cuda() or ""


def run(report: Report) -> None:
    """Report one row with the facts."""
    import cupy

    driver = CupyDriver()
    runtime = cupy.cuda.runtime
    properties = runtime.getDeviceProperties(driver.number)
    details: dict[str, Any] = {
        "device": driver.name,
        "memory_nbytes": driver.total_nbytes,
        "capability": [properties["major"], properties["minor"]],
        "multiprocessors": properties["multiProcessorCount"],
        "cuda_driver": runtime.driverGetVersion(),
        "cuda_runtime": runtime.runtimeGetVersion(),
        "pool": driver.pool,
        "bus": runtime.deviceGetPCIBusId(driver.number),
    }
    details |= nvml_facts(details["bus"])
    report(Row("device", driver.total_nbytes / 2**30, "GiB", details=details))


def nvml_facts(bus: str) -> dict[str, Any]:
    """Return the driver's version and the link to the host; empty if NVML does not answer."""
    try:
        import pynvml
    except ImportError:
        return {}
    facts: dict[str, Any] = {}
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByPciBusId(bus)
        facts["driver"] = pynvml.nvmlSystemGetDriverVersion()
        facts["pcie_generation"] = pynvml.nvmlDeviceGetCurrPcieLinkGeneration(handle)
        facts["pcie_width"] = pynvml.nvmlDeviceGetCurrPcieLinkWidth(handle)
    return facts
