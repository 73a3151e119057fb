"""Failed allocations call the callback, also with the real libraries if they are installed."""

from __future__ import annotations

import sys
import types

import pytest

from dask_gpurt.devices.cuda.out_of_memory import CallWhenFull, cudf_spills


class Pool:
    """A pool of 1000 bytes. `free` returns some. It fails as CuPy and RMM do."""

    def __init__(self):
        self.used_nbytes = self.free_nbytes = 0

    def malloc(self, nbytes):
        if self.used_nbytes + nbytes > 1000:
            raise MemoryError(f"{nbytes} bytes")
        self.used_nbytes += nbytes
        return nbytes

    def free(self, nbytes):
        self.used_nbytes -= nbytes

    def free_bytes(self):
        return self.free_nbytes

    def total_bytes(self):
        return self.used_nbytes + self.free_nbytes

    def free_all_blocks(self):
        self.free_nbytes = 0


class FakeCupy(types.ModuleType):
    """A fake `cupy` with allocators only."""

    def __init__(self, pool):
        super().__init__("cupy")
        self.allocator = pool.malloc
        self.current = 0
        self.cuda = types.SimpleNamespace(
            get_allocator=lambda: self.allocator,
            set_allocator=lambda allocator: setattr(self, "allocator", allocator),
            get_device_id=lambda: self.current,
            MemoryPool=Pool,
        )
        self.kept = Pool()

    def get_default_memory_pool(self):
        return self.kept


@pytest.fixture
def pool():
    return Pool()


@pytest.fixture
def cupy(pool, monkeypatch):
    fake = FakeCupy(pool)
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setitem(sys.modules, "rmm", None)
    return fake


def test_a_failed_allocation_calls_back_and_retries(cupy, pool):
    asked = []

    def make_room(nbytes):
        asked.append(nbytes)
        pool.free(300)
        return True

    hooks = CallWhenFull(make_room)
    assert hooks.installed == ["cupy"]
    assert cupy.allocator(900) == 900
    assert asked == []
    assert cupy.allocator(600) == 600
    assert asked == [600, 600]


def test_a_callback_without_success_keeps_the_error(cupy):
    CallWhenFull(lambda nbytes: False)
    with pytest.raises(MemoryError, match="1001 bytes"):
        cupy.allocator(1001)


def test_an_error_of_the_callback_is_raised(cupy):
    def fail(nbytes):
        raise OSError("no disk")

    CallWhenFull(fail)
    with pytest.raises(OSError, match="no disk"):
        cupy.allocator(1001)
    with pytest.raises(OSError, match="no disk"):
        cupy.allocator(1001)


def test_allocations_of_the_callback_do_not_call_it_again(cupy):
    asked = []

    def make_room(nbytes):
        asked.append(nbytes)
        cupy.allocator(2000)
        return True

    CallWhenFull(make_room)
    with pytest.raises(MemoryError, match="2000"):
        cupy.allocator(1001)
    assert asked == [1001]


@pytest.mark.parametrize("which", ["default", "ours"])
def test_memory_that_a_pool_keeps_comes_before_values(cupy, pool, which):
    asked = []
    hooks = CallWhenFull(lambda nbytes: asked.append(nbytes))
    kept = cupy.kept if which == "default" else pool
    kept.free_nbytes = 300
    with pytest.raises(MemoryError):
        cupy.allocator(1001)
    assert kept.free_nbytes == 0
    assert asked == [1001], "only after the second failure"
    hooks.uninstall()


def test_the_hook_ignores_other_devices(cupy):
    cupy.current = 1
    CallWhenFull(lambda nbytes: pytest.fail("asked"))
    with pytest.raises(MemoryError):
        cupy.allocator(1001)


def test_allocator_hooks_can_be_removed(cupy, pool):
    before = cupy.allocator
    hooks = CallWhenFull(lambda nbytes: True)
    assert cupy.allocator != before
    hooks.uninstall()
    hooks.uninstall()
    assert cupy.allocator == before
    assert hooks.installed == []


def test_hooks_installed_later_stay(cupy):
    hooks = CallWhenFull(lambda nbytes: True)
    cupy.allocator = theirs = lambda nbytes: nbytes
    hooks.uninstall()
    assert cupy.allocator is theirs


def test_missing_libraries_are_listed(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "rmm", None)
    hooks = CallWhenFull(lambda nbytes: True)
    assert hooks.installed == []
    assert sorted(hooks.left) == ["cupy", "rmm"]


# ------------------------------------------------------------------ RMM and cuDF


def spilling_cudf(spills):
    cudf = types.ModuleType("cudf")
    cudf.get_option = {"spill": spills}.__getitem__
    return cudf


def test_cudf_that_spills_by_itself_is_not_hooked(cupy, monkeypatch):
    monkeypatch.setitem(sys.modules, "cudf", spilling_cudf(spills=True))
    assert cudf_spills()
    hooks = CallWhenFull(lambda nbytes: True)
    assert hooks.left == {"rmm": "cuDF spills by itself"}
    assert hooks.installed == ["cupy"]


def test_cudf_without_spilling_is_hooked(monkeypatch):
    monkeypatch.setitem(sys.modules, "cudf", spilling_cudf(spills=False))
    assert not cudf_spills()
    monkeypatch.delitem(sys.modules, "cudf")
    assert not cudf_spills()


@pytest.fixture
def rmm_pool():
    """An RMM pool on host memory, as the resource of the first device."""
    rmm = pytest.importorskip("rmm", reason="RMM is not installed")
    kept = {}

    def allocate(nbytes, stream):
        memory = bytearray(nbytes)
        address = id(memory)
        kept[address] = memory
        return address

    def free(address, nbytes, stream):
        del kept[address]

    before = rmm.mr.get_per_device_resource(0)
    limited = rmm.mr.LimitingResourceAdaptor(rmm.mr.CallbackMemoryResource(allocate, free), 1024)
    rmm.mr.set_per_device_resource(0, limited)
    yield rmm, limited
    rmm.mr.set_per_device_resource(0, before)


def test_rmm_calls_back_for_room(rmm_pool, monkeypatch):
    rmm, pool = rmm_pool
    monkeypatch.setitem(sys.modules, "cupy", None)
    asked = []
    held = [pool.allocate(512)]

    def make_room(nbytes):
        asked.append(nbytes)
        if not held:
            return False
        pool.deallocate(held.pop(), 512)
        return True

    hooks = CallWhenFull(make_room)
    assert hooks.installed == ["rmm"]
    resource = rmm.mr.get_per_device_resource(0)
    resource.deallocate(resource.allocate(1024), 1024)
    assert asked == [1024]
    with pytest.raises(MemoryError):
        resource.allocate(2048)
    assert asked == [1024, 2048]
    hooks.uninstall()
    assert rmm.mr.get_per_device_resource(0) is pool


def test_cupy_over_rmm_is_hooked_once(rmm_pool, cupy, monkeypatch):
    monkeypatch.setitem(sys.modules, "rmm", rmm_pool[0])

    def rmm_cupy_allocator(nbytes):
        raise AssertionError("not called here")

    cupy.allocator = rmm_cupy_allocator
    hooks = CallWhenFull(lambda nbytes: True)
    try:
        assert hooks.installed == ["rmm"]
        assert hooks.left == {"cupy": "allocates from RMM"}
    finally:
        hooks.uninstall()
