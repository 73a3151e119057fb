"""Programs over the CUDA stand-in that check each of its faults; as those of `cuda_calls`."""

from __future__ import annotations

import ctypes
import os
import sys

from tests.standins.cuda_calls import (
    LOST,
    PROGRAMS,
    Address,
    Handle,
    copy,
    filled,
    in_thread,
    is_done,
    made,
    program,
    recorded,
    stream,
)
from tests.standins.cuda_memory import check, cuda, get, put, use_device


@program
def nth_allocation_fails():
    use_device()
    put("fail_allocation", 2)
    address = Address()
    allocated = [cuda.cuMemAlloc_v2(ctypes.byref(address), 1) for _ in range(4)]
    assert allocated == [0, 2, 0, 0]
    put("fail_allocation", -1)
    assert [cuda.cuMemAlloc_v2(ctypes.byref(address), 1) for _ in range(2)] == [2, 2]


@program
def nth_event_never_fires_and_its_stream_goes_on():
    address, _ = filled(1)
    put("silent_event", 2)
    on = stream()
    events = [recorded(on) for _ in range(3)]
    check(copy(address, address, on))
    check(cuda.cuStreamSynchronize(on))
    assert [is_done(event) for event in events] == [True, False, True]


@program
def context_is_missing_in_a_thread():
    use_device()
    context = ctypes.c_void_p()
    check(cuda.cuCtxGetCurrent(ctypes.byref(context)))

    def set_here():
        check(cuda.cuCtxSetCurrent(context))
        return cuda.cuCtxSynchronize()

    put("no_context_in", -1)
    assert [set_here(), in_thread(set_here)] == [0, 201]
    put("no_context_in", cuda.standin_thread())
    assert [set_here(), in_thread(set_here)] == [201, 0]
    # A program can still push one.
    check(cuda.cuCtxPushCurrent_v2(context))
    check(cuda.cuCtxSynchronize())


@program
def handles_of_memory_are_refused():
    address, _ = filled(1)
    put("refuse_ipc", 1)
    assert cuda.cuIpcGetMemHandle(ctypes.byref(Handle()), Address(address)) == 801
    assert get("ipc_handles") == 0


@program
def lost_device_fails_every_later_call():
    address, data = filled(1)
    source, _ = filled(2)
    put("hold_copies", 1)
    on = stream()
    check(copy(address, source, on))
    event = recorded(on)
    put("lost", LOST)
    put("hold_copies", 0)
    late = [copy(address, source, on), cuda.cuStreamSynchronize(on), cuda.cuEventSynchronize(event)]
    late += [
        cuda.cuMemAlloc_v2(ctypes.byref(Address()), 1),
        cuda.cuInit(0),
        cuda.cuCtxSynchronize(),
    ]
    late += [cuda.cuEventQuery(event), cuda.cuStreamCreate(ctypes.byref(Address()), 0)]
    assert late == [LOST] * 8
    assert (data == 1).all()


@program
def environment_sets_faults():
    # `test_cuda_calls.py` starts this program with it.
    assert os.environ["STANDIN_CUDA_FAIL_ALLOCATION"] == "1"
    use_device()
    address = Address()
    assert [cuda.cuMemAlloc_v2(ctypes.byref(address), 1) for _ in range(2)] == [2, 0]


@program
def lenient_driver_looks_at_handles():
    use_device()
    put("lenient", 1)
    on, event = stream(), made(cuda.cuEventCreate, 0)
    calls = [
        lambda: cuda.cuEventRecord(event, on),
        lambda: cuda.cuStreamSynchronize(on),
        lambda: cuda.cuStreamSynchronize(None),
        lambda: cuda.cuMemAlloc_v2(ctypes.byref(Address()), 1),
    ]
    assert in_thread(lambda: [call() for call in calls]) == [0, 0, 201, 201]


if __name__ == "__main__":
    PROGRAMS[sys.argv[1]]()
