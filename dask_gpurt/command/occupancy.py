"""``dask gpurt occupancy``: the resident blocks of a launch, and how to limit them.

All figures come from the table of `devices.occupancy.architectures`; no GPU is used.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from dask_gpurt.command.json_text import to_json
from dask_gpurt.devices.occupancy.architectures import GPUS, GpuModel, gpu_named
from dask_gpurt.devices.occupancy.planner import LaunchPlan, Refusal, plan
from dask_gpurt.devices.occupancy.resident_blocks import Launch, Limit, Occupancy, occupancy


class UnknownGpuError(LookupError):
    """The table has no GPU of this name."""


def show(
    gpu_name: str,
    threads: int,
    registers: int,
    static_nbytes: int,
    dynamic_nbytes: int,
    leave: int | None,
    as_json: bool,
) -> int:
    """Print the resident blocks of a launch, and the plan to leave `leave` of them.

    Returns
    -------
    int
        Always 0, with or without a plan.

    Raises
    ------
    UnknownGpuError
        The table does not have the GPU. The message lists those that it has.
    """
    gpu = gpu_named(gpu_name)
    if gpu is None:
        raise UnknownGpuError(f"unknown GPU {gpu_name!r}; known are {', '.join(GPUS)}")
    launch = Launch(threads, registers, static_nbytes, dynamic_nbytes)
    found = occupancy(gpu.architecture, launch)
    planned = None
    if leave is not None:
        planned = plan(gpu.architecture, launch, leave, pending=True)
    if as_json:
        print(to_json(_as_plain(gpu, launch, found, planned)))
    else:
        print(_as_text(gpu, launch, found, planned, leave))
    return 0


def _names(limits: frozenset[Limit]) -> list[str]:
    return sorted(limit.value for limit in limits)


def _as_plain(
    gpu: GpuModel, launch: Launch, found: Occupancy, planned: LaunchPlan | Refusal | None
) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "gpu": gpu.name,
        "architecture": gpu.architecture.name,
        "launch": asdict(launch),
        "blocks": found.blocks,
        "binding": _names(found.binding),
        "allowed": {limit.value: n for limit, n in found.allowed.items()},
    }
    if isinstance(planned, LaunchPlan):
        plain["plan"] = asdict(planned)
    elif planned is not None:
        plain["refusal"] = {
            "reason": planned.reason.name.lower().replace("_", "-"),
            "limits": _names(planned.limits),
            "text": str(planned),
        }
    return plain


def _as_text(
    gpu: GpuModel,
    launch: Launch,
    found: Occupancy,
    planned: LaunchPlan | Refusal | None,
    leave: int | None,
) -> str:
    shared = f"{launch.static_nbytes} + {launch.dynamic_nbytes} B of shared memory"
    allowed = ", ".join(f"{n} by {limit.value}" for limit, n in found.allowed.items())
    rows = [
        ("GPU", f"{gpu.name}, {gpu.architecture.name}"),
        ("block", f"{launch.threads} threads of {launch.registers} registers, {shared}"),
        ("would fit", allowed),
        ("resident", f"{found.blocks} on each multiprocessor ({', '.join(_names(found.binding))})"),
    ]
    if isinstance(planned, LaunchPlan):
        opt_in = ", which the kernel must be allowed first" if planned.needs_opt_in else ""
        rows += [
            (f"to leave {planned.blocks}", f"{planned.dynamic_nbytes} B dynamic{opt_in}"),
            ("then free", f"{planned.free_nbytes} B of shared memory"),
        ]
    elif planned is not None:
        rows.append((f"to leave {leave}", f"no: {planned}"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)
