"""Programs over the CUDA stand-in that check what CUDA documents; each in a process of its own.

`test_cuda_calls.py` runs them: ``python -m tests.standins.cuda_calls NAME``.
"""

from __future__ import annotations

import ctypes
import itertools
import subprocess
import sys
import threading
from collections.abc import Callable

import numpy as np

from tests.standins import build
from tests.standins.cuda_memory import allocate, check, cuda, get, put, use_device

NON_BLOCKING, NO_TIMING = 1, 2
LOST = 719
NBYTES = 10_000

#: The programs by name.
PROGRAMS: dict[str, Callable[[], None]] = {}

Address = ctypes.c_size_t


class Handle(ctypes.Structure):
    """A handle of memory, which CUDA's functions take by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


cuda.cuIpcOpenMemHandle_v2.argtypes = [ctypes.POINTER(Address), Handle, ctypes.c_uint]
cuda.cuEventElapsedTime.argtypes = [ctypes.POINTER(ctypes.c_float), *[ctypes.c_void_p] * 2]
cuda.cuMemcpyAsync.argtypes = [Address, Address, Address, ctypes.c_void_p]
cuda.cuMemcpy.argtypes = [Address, Address, Address]


def program(function: Callable[[], None]) -> Callable[[], None]:
    PROGRAMS[function.__name__] = function
    return function


def made(create: Callable[..., int], *arguments: object) -> ctypes.c_void_p:
    """Return a stream or an event."""
    handle = ctypes.c_void_p()
    check(create(ctypes.byref(handle), *arguments))
    return handle


def stream(flags: int = NON_BLOCKING, priority: int = 0) -> ctypes.c_void_p:
    return made(cuda.cuStreamCreateWithPriority, flags, priority)


def recorded(on: ctypes.c_void_p | None, flags: int = 0) -> ctypes.c_void_p:
    event = made(cuda.cuEventCreate, flags)
    check(cuda.cuEventRecord(event, on))
    return event


def filled(value: int) -> tuple[int, np.ndarray]:
    address, data = allocate(NBYTES)
    data[:] = value
    return address, data


def copy(to: int, source: int, on: ctypes.c_void_p | None = None) -> int:
    return cuda.cuMemcpyAsync(to, source, NBYTES, on)


def in_thread(function: Callable[[], object]) -> object:
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def is_done(event: ctypes.c_void_p) -> bool:
    return {0: True, 600: False}[cuda.cuEventQuery(event)]


@program
def calls_before_initialization_are_refused():
    device = ctypes.c_int()
    assert cuda.cuDeviceGet(ctypes.byref(device), 0) == 3
    check(cuda.cuInit(0))
    check(cuda.cuDeviceGet(ctypes.byref(device), 0))
    assert cuda.cuDeviceGet(ctypes.byref(device), 1) == 101


@program
def calls_without_a_context_are_refused():
    check(cuda.cuInit(0))
    address, handle = Address(), ctypes.c_void_p()
    assert cuda.cuMemAlloc_v2(ctypes.byref(address), 1) == 201
    assert cuda.cuStreamCreate(ctypes.byref(handle), 0) == 201
    assert cuda.cuEventCreate(ctypes.byref(handle), 0) == 201
    use_device()
    to, _ = filled(1)
    on = stream()
    assert [copy(to, to, on), cuda.cuStreamSynchronize(on)] == [0, 0]
    # A context is current in one thread alone.
    assert in_thread(lambda: [copy(to, to, on), cuda.cuStreamSynchronize(on)]) == [201, 201]
    assert get("refused_without_context") == 5


@program
def threads_have_stacks_of_contexts():
    use_device()
    context, found = ctypes.c_void_p(), ctypes.c_void_p()
    check(cuda.cuCtxGetCurrent(ctypes.byref(context)))

    def push_and_pop():
        check(cuda.cuCtxPushCurrent_v2(context))
        first = cuda.cuCtxSynchronize()
        check(cuda.cuCtxPopCurrent_v2(ctypes.byref(found)))
        return first, found.value, cuda.cuCtxSynchronize(), cuda.cuCtxPopCurrent_v2(None)

    assert in_thread(push_and_pop) == (0, context.value, 201, 201)


@program
def memory_is_aligned_and_unlike_the_hosts():
    places = [allocate(nbytes) for nbytes in (1, 255, 256, 257, 5000)]
    assert all(address % 256 == 0 for address, _ in places)
    ranges = sorted((address, address + len(data)) for address, data in places)
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(ranges))
    address = places[-1][0]
    base, nbytes, kind = Address(), Address(), ctypes.c_uint()
    check(
        cuda.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(nbytes), Address(address + 9))
    )
    assert base.value == address and nbytes.value >= 5000
    check(cuda.cuPointerGetAttribute(ctypes.byref(kind), 2, Address(address + 9)))
    assert kind.value == 2
    # The driver does not know memory of the host that nobody registered.
    assert cuda.cuPointerGetAttribute(ctypes.byref(kind), 2, Address(ctypes.addressof(base))) == 1
    read = (
        "import ctypes; from tests.standins.cuda_memory import allocate; a = allocate(9); "
        "ctypes.string_at(a[0], 1)"
    )
    assert subprocess.run([sys.executable, "-c", read], cwd=build.ROOT).returncode == -11


@program
def full_device_refuses_memory_until_some_is_freed():
    put("total_nbytes", 1 << 20)
    first = allocate(900_000)
    address = Address()
    assert cuda.cuMemAlloc_v2(ctypes.byref(address), 200_000) == 2
    n_free, n_total = Address(), Address()
    check(cuda.cuMemGetInfo_v2(ctypes.byref(n_free), ctypes.byref(n_total)))
    assert n_total.value == 1 << 20 and 0 < n_free.value < 200_000
    del first
    check(cuda.cuMemAlloc_v2(ctypes.byref(address), 1 << 20))
    assert [cuda.cuMemFree_v2(address.value), cuda.cuMemFree_v2(address.value)] == [0, 1]
    assert get("used_nbytes") == 0


@program
def memory_keeps_its_bytes_while_others_free():
    changed = []

    def use(value: int) -> None:
        for n_pages in [1, 2, 3] * 100:
            _, data = allocate(4096 * n_pages)
            data[:] = value
            changed.append((data != value).sum())

    threads = [threading.Thread(target=use, args=(value,)) for value in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(changed) == 1800 and not any(changed)


@program
def copies_outside_an_allocation_are_refused():
    use_device()
    address, _ = filled(1)
    freed = Address()
    check(cuda.cuMemAlloc_v2(ctypes.byref(freed), NBYTES))
    check(cuda.cuMemFree_v2(freed.value))
    assert cuda.cuMemcpy(address, address, 1 << 20) == 1
    assert copy(address, freed.value) == 1


@program
def stream_works_in_order_and_beside_others():
    put("hold_copies", 1)
    target, data = filled(0)
    sources = [filled(value) for value in (1, 2, 3)]
    held, other = stream(), stream()
    for address, _ in sources:
        check(copy(target, address, held))
    # Nothing of the one is done, and the other has done all.
    assert is_done(recorded(other)) or cuda.cuEventSynchronize(recorded(other)) == 0
    last = recorded(held)
    assert not is_done(last) and cuda.cuStreamQuery(held) == 600 and (data == 0).all()
    put("hold_copies", 0)
    check(cuda.cuStreamSynchronize(held))
    assert is_done(last) and (data == 3).all()


@program
def stream_waits_for_an_event_of_another():
    put("hold_copies", 1)
    (one, _), (two, data), (three, result) = filled(1), filled(2), filled(3)
    first, second = stream(), stream()
    check(copy(two, one, first))
    check(cuda.cuStreamWaitEvent(second, recorded(first), 0))
    seen: list[int] = []
    look = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: seen.append(int(data[0])))
    check(cuda.cuLaunchHostFunc(second, look, None))
    check(copy(three, two, second))
    assert cuda.cuStreamQuery(second) == 600 and seen == []
    put("hold_copies", 0)
    check(cuda.cuStreamSynchronize(second))
    assert seen == [1] and (result == 1).all()
    # One that was never recorded is no reason to wait.
    check(cuda.cuStreamWaitEvent(second, made(cuda.cuEventCreate, 0), 0))
    check(cuda.cuStreamSynchronize(second))


@program
def legacy_stream_and_blocking_streams_wait_for_each_other():
    put("hold_copies", 1)
    address, _ = filled(1)
    blocking, non_blocking = stream(flags=0), stream()
    check(copy(address, address, blocking))
    default = recorded(None)
    check(cuda.cuEventSynchronize(recorded(non_blocking)))
    assert not is_done(default)
    later = recorded(blocking)
    put("hold_copies", 0)
    check(cuda.cuEventSynchronize(later))
    assert is_done(default)
    put("hold_copies", 1)
    check(copy(address, address, None))
    check(cuda.cuEventSynchronize(recorded(non_blocking)))
    waits = recorded(blocking)
    assert not is_done(waits)
    put("hold_copies", 0)
    check(cuda.cuEventSynchronize(waits))


@program
def streams_have_priorities_and_handles():
    use_device()
    least, greatest, priority = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    check(cuda.cuCtxGetStreamPriorityRange(ctypes.byref(least), ctypes.byref(greatest)))
    for wanted, found in ((0, 0), (-3, -3), (9, least.value), (-99, greatest.value)):
        check(cuda.cuStreamGetPriority(stream(priority=wanted), ctypes.byref(priority)))
        assert priority.value == found
    one = stream()
    check(cuda.cuStreamDestroy_v2(one))
    assert cuda.cuStreamQuery(one) == cuda.cuStreamDestroy_v2(one) == 400


@program
def events_tell_the_time_between_them():
    address, _ = filled(1)
    on, ms = stream(), ctypes.c_float()
    put("hold_copies", 1)
    put("delay_us", 20_000)
    first = recorded(on)
    check(copy(address, address, on))
    second = recorded(on)
    assert cuda.cuEventElapsedTime(ctypes.byref(ms), first, second) == 600
    put("hold_copies", 0)
    check(cuda.cuEventSynchronize(second))
    check(cuda.cuEventElapsedTime(ctypes.byref(ms), first, second))
    assert ms.value >= 20
    untimed = recorded(on, NO_TIMING)
    check(cuda.cuEventSynchronize(untimed))
    assert cuda.cuEventElapsedTime(ctypes.byref(ms), first, untimed) == 400


@program
def handles_of_memory_open_in_another_process():
    address, data = filled(7)
    handle, opened = Handle(), Address()
    check(cuda.cuIpcGetMemHandle(ctypes.byref(handle), Address(address + 5)))
    assert cuda.cuIpcOpenMemHandle_v2(ctypes.byref(opened), handle, 1) == 201  # in this process
    command = [sys.executable, "-m", __spec__.name, "open", bytes(handle).hex()]
    subprocess.run(command, cwd=build.ROOT, check=True)
    assert (data == 8).all()


def open_handle(text: str) -> None:
    """Open a handle of another process, which must hold sevens, and write eights."""
    handle = Handle.from_buffer_copy(bytes.fromhex(text))
    opened, again = Address(), Address()
    use_device()
    check(cuda.cuIpcOpenMemHandle_v2(ctypes.byref(opened), handle, 1))
    check(cuda.cuIpcOpenMemHandle_v2(ctypes.byref(again), handle, 1))
    assert opened.value == again.value
    here = np.zeros(NBYTES, np.uint8)
    check(cuda.cuMemcpy(here.ctypes.data, opened.value, NBYTES))
    assert (here == 7).all()
    here[:] = 8
    check(cuda.cuMemcpy(opened.value, here.ctypes.data, NBYTES))
    closed = [cuda.cuIpcCloseMemHandle(opened) for _ in range(3)]
    assert closed == [0, 0, 1]
    put("refuse_ipc", 2)
    assert cuda.cuIpcOpenMemHandle_v2(ctypes.byref(opened), handle, 1) == 205


if __name__ == "__main__":
    if sys.argv[1] == "open":
        open_handle(sys.argv[2])
    else:
        PROGRAMS[sys.argv[1]]()
