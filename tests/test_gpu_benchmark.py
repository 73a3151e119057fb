"""The GPU benchmark works on emulated devices, and keeps its rows even if a section fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from typing import ClassVar

import numpy as np
import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import copies, pipeline, shaping, tiers
from benchmarks.gpu.kernels import SOURCES
from benchmarks.gpu.report import Row, parse_row
from dask_gpurt.devices.cuda.driver import why_no_cuda
from dask_gpurt.devices.device import Priority
from dask_gpurt.devices.emulated.emulated_device import EmulatedDevice
from dask_gpurt.devices.host_memory.pinned import PinnedPool, plain
from dask_gpurt.devices.occupancy.architectures import SM90
from dask_gpurt.devices.occupancy.resident_blocks import Launch
from dask_gpurt.devices.occupancy.shaping import LaunchHook, Planner, shaped
from tests.devices.occupancy.fake_driver import FakeDriver


def add(array, rounds):
    for _ in range(rounds):
        array += 1


# ------------------------------------------------------------------ sections, emulated


def test_copy_rates_have_their_reference():
    device = EmulatedDevice(1 << 20)
    rows = []
    copies.measure(device, plain, 1 << 16, 3, rows.append)
    device.close()
    inward, outward, pool = rows
    assert inward.ratio == pytest.approx(
        inward.details["took_s"]["pinned"] / inward.details["took_s"]["pageable"]
    )
    assert outward.value > 0
    assert pool.value == 0


def test_pipeline_computes_the_right_result():
    device = EmulatedDevice(1 << 20)
    rows = []
    sources, targets = ([np.ones(4096, np.uint8) for _ in range(3)] for _ in range(2))
    pipeline.measure(device, sources, targets, add, 7, 1, rows.append)
    device.close()
    (row,) = rows
    assert row.details["wrong_targets"] == []
    rounds = row.details["rounds"]
    assert all((target == (1 + rounds) % 256).all() for target in targets)
    assert row.ratio == row.details["took_s"]["overlapped"] / row.details["took_s"]["serial"]


def test_wrong_pipeline_result_is_reported():
    device = EmulatedDevice(1 << 20)
    rows = []
    sources, targets = ([np.ones(4096, np.uint8) for _ in range(2)] for _ in range(2))
    pipeline.measure(device, sources, targets, lambda array, rounds: None, 4, 1, rows.append)
    device.close()
    assert rows[0].details["wrong_targets"] == [0, 1]


def test_tiers_hold_the_budget_and_every_value():
    device = EmulatedDevice(4 * 8192)
    pool = PinnedPool(1 << 20, 8192)
    back = np.empty(8192, np.uint8)
    found = tiers.measure(device, pool, 16, back, 2)
    device.close()
    assert found["wrong"] == []
    assert found["cold_at_the_end"] >= 12
    assert found["most_used_nbytes"] <= found["capacity_nbytes"]
    assert found["read_nbytes"] == 2 * 16 * 8192
    row = tiers.compare(found, found, 1)
    assert row.ratio == 1.0
    assert len(found["load_s"]) >= 24
    row = tiers.load_row(found, 2.0)
    assert row.ratio == row.value / 2.0


# ------------------------------------------------------------------ the command


@pytest.fixture
def broken(monkeypatch, tmp_path):
    """Replace the sections by ones that fail in every possible way."""
    ways = {
        "fine": "report(Row('one', 1.0, 'GB/s', 0.5, 'this / that', '<= 0.6'))",
        "raises": "report(Row('before', 2.0)); raise OSError('no such device')",
        "dies": "report(Row('before', 3.0)); os._exit(7)",
        "chatters": "print('not a row'); print('[1]'); report(Row('after', 4.0))",
        "hangs": (
            "report(Row('before', 5.0)); open(os.environ['SAID'], 'w'); threading.Event().wait()"
        ),
    }
    package = tmp_path / "benchmarks" / "gpu"
    package.mkdir(parents=True)
    for name, does in ways.items():
        (package / f"{name}.py").write_text(
            "import os, threading\n"
            "from benchmarks.gpu.report import Row\n"
            "def skip_reason(): return ''\n"
            f"def run(report):\n    {does}\n"
        )
    (package / "absent.py").write_text("def skip_reason(): return 'nothing to run on'\n")
    starts = tmp_path / "start.py"
    starts.write_text(
        "import sys, benchmarks.gpu\n"
        f"benchmarks.gpu.__path__.append({str(package)!r})\n"
        "from benchmarks.gpu.__main__ import run_here\n"
        "run_here(sys.argv[-1])\n"
    )
    sections = dict.fromkeys([*ways, "absent"], 60.0) | {"hangs": 3.0}
    monkeypatch.setattr(command, "SECTIONS", sections)
    start = command.subprocess.Popen

    said = tmp_path / "said"
    os.mkfifo(said)
    monkeypatch.setenv("SAID", str(said))

    def popen(arguments, **options):
        process = start([sys.executable, str(starts), arguments[-1]], **options)
        if arguments[-1] == "hangs":
            communicate = process.communicate

            def at_its_limit(timeout=None):
                if timeout is None:
                    return communicate()
                said.read_bytes()  # until it has reported its row
                raise subprocess.TimeoutExpired(arguments, timeout)

            process.communicate = at_its_limit
        return process

    monkeypatch.setattr(command, "subprocess", types.SimpleNamespace(**vars(command.subprocess)))
    monkeypatch.setattr(command.subprocess, "Popen", popen)
    monkeypatch.setenv("PYTHONPATH", ".")
    return tmp_path / "results.json"


def test_failing_section_loses_no_rows(broken, capsys):
    assert command.main(["--json", str(broken)]) == 0
    results = json.loads(broken.read_text())
    said = {
        name: [(row["name"], row["value"], row["skipped"]) for row in section["rows"]]
        for name, section in results["sections"].items()
    }
    assert said["fine"] == [("one", 1.0, "")]
    assert said["raises"][0] == ("before", 2.0, "")
    assert said["raises"][1][2] == "ended with 1: OSError: no such device"
    assert said["dies"] == [("before", 3.0, ""), ("dies", None, "ended with 7")]
    assert said["chatters"] == [("after", 4.0, "")]
    assert said["hangs"] == [("before", 5.0, ""), ("hangs", None, "took longer than 3 s")]
    assert said["absent"] == [("absent", None, "nothing to run on")]
    out = capsys.readouterr().out
    assert "0.500 = this / that (wanted: <= 0.6)" in out


def test_result_file_is_complete_after_each_section(broken, monkeypatch):
    seen = []
    stock = command.write

    def write(path, results):
        stock(path, results)
        seen.append(list(json.loads(broken.read_text())["sections"]))

    monkeypatch.setattr(command, "write", write)
    command.main(["--json", str(broken), "--only", "raises", "fine"])
    assert seen == [[], ["raises"], ["raises", "fine"]]


def test_rows_survive_json():
    row = Row("copy", 1.5, "GB/s", 0.5, "this / that", "<= 1", details={"n": [1, 2]})
    assert parse_row(row.to_json()) == row
    assert parse_row(Row("x", np.float32(0.5)).to_json()) == Row("x", 0.5)
    assert parse_row("anything else") is None
    assert parse_row('{"name": "x", "another": 1}') is None


def test_benchmark_takes_less_than_ten_minutes():
    assert sum(command.SECTIONS.values()) < 600


@pytest.mark.skipif(why_no_cuda() is None, reason="there is a GPU")
@pytest.mark.parametrize("name", command.SECTIONS)
def test_sections_say_why_they_are_skipped_without_a_gpu(name, capsys):
    command.run_here(name)
    row = parse_row(capsys.readouterr().out)
    assert row.name == name
    assert "CuPy" in row.skipped or "CUDA" in row.skipped


# ------------------------------------------------------------------ kernels


@pytest.mark.parametrize("name", SOURCES)
def test_kernels_compile_for_a_gpu(name):
    """Kernels compile into machine code; the compiler needs no GPU."""
    core = pytest.importorskip("cuda.core", reason="cuda-core is not installed")
    try:
        program = core.Program(
            SOURCES[name], code_type="c++", options=core.ProgramOptions(arch="sm_90")
        )
    except Exception as error:
        pytest.skip(f"CUDA's compiler cannot be loaded: {type(error).__name__}")
    code = program.compile("cubin").code
    assert code[:4] == b"\x7fELF"
    assert name.encode() in code


# ------------------------------------------------------------------ the experiment of shaping


class StubStream:
    """A stand-in for a CuPy stream, which knows whether it is the current one."""

    current: ClassVar[list] = []

    def __init__(self, name):
        self.name = name

    def __enter__(self):
        self.current.append(self)

    def __exit__(self, *exception):
        self.current.pop()

    def synchronize(self):
        assert self.current == [], "nothing is waited for while a stream is current"


class StubSides:
    """Records the stream of each side's launches, and whether the launch would be shaped."""

    def __init__(self, hook):
        self.rounds, self.n_units = 100, 100
        self.launched = []
        self.began = types.SimpleNamespace(get=lambda: np.array([1_000, 3_000]))
        self.out = np.zeros(4)
        self._hook = hook

    def reset(self):
        assert StubStream.current == []

    def _note(self, side):
        (stream,) = StubStream.current
        is_shaped = self._hook.dynamic_nbytes("k", (256, 1, 1), 0) > 0
        self.launched.append((side, stream.name, is_shaped))

    def compute(self):
        self._note("compute")

    def communicate(self):
        self._note("communicate")


@pytest.fixture
def experiment(monkeypatch):
    driver = FakeDriver()
    hook = LaunchHook(driver, enabled=True)
    names = iter(["compute", "even", "urgent"])
    streams = types.SimpleNamespace(
        open_stream=lambda priority: StubStream(
            "urgent" if priority is Priority.HIGH else next(names)
        )
    )
    beside = shaping.Beside(SM90, Launch(512, 32, 0, 24 << 10))
    return shaping.Experiment(streams, StubSides(hook), beside, hook)


def test_modes_of_the_experiment_match_their_names(experiment):
    row = experiment.row("balanced", 1.0)
    launched = experiment._sides.launched
    seen = set()
    for start in range(0, len(launched), 2 * shaping.N_KERNELS):
        seen.add(frozenset(launched[start : start + 2 * shaping.N_KERNELS]))
    quiet, loud = ("compute", "compute", False), ("compute", "compute", True)
    modes = {
        "serial": {quiet, ("communicate", "compute", False)},
        "naive": {quiet, ("communicate", "even", False)},
        "priority": {quiet, ("communicate", "urgent", False)},
        "shaped": {loud, ("communicate", "even", False)},
        "both": {loud, ("communicate", "urgent", False)},
    }
    for mode, launches in modes.items():
        assert frozenset(launches) in seen, mode
    assert set(row.details["start_delay_s"].values()) == {2e-6}
    took_s = row.details["took_s"]
    assert took_s["ideal"] == max(took_s["compute alone"], took_s["communication alone"])
    assert row.ratio == row.value / took_s["serial"]


def test_shaping_cost_is_measured_with_and_without_a_shape(experiment):
    experiment._sides.out = np.zeros(4)
    row = experiment.cost()
    shapes = [is_shaped for _, _, is_shaped in experiment._sides.launched]
    assert set(shapes) == {False, True}
    assert row.details["is_same"]
    assert row.ratio == row.details["took_s"]["shaped"] / row.details["took_s"]["plain"]


class RawKernel:
    """A stand-in for CuPy's kernel that refuses more shared memory than allowed."""

    num_regs, shared_size_bytes, max_threads_per_block = 32, 0, 1024
    max_dynamic_shared_size_bytes = 48 << 10
    preferred_shared_memory_carveout = -1

    def __init__(self):
        self.carried = []

    def __call__(self, grid, block, args, *, shared_mem=0):
        assert shared_mem <= self.max_dynamic_shared_size_bytes
        self.carried.append(shared_mem)


def test_unhooked_compute_kernel_shapes_itself(monkeypatch):
    kernel = RawKernel()
    monkeypatch.setattr(shaping, "kernel", lambda name: kernel)
    hook = LaunchHook(shaping.RawLaunches(), enabled=True)
    nothing = np.zeros(2)
    sides = shaping.Sides(1, 1, nothing, nothing, nothing, nothing, 100, hook)
    sides.compute()
    with shaped(Planner(SM90, 2), lambda: True, hook):
        sides.compute()
    sides.hook = None
    sides.compute()
    assert kernel.carried == [0, 76928, 0]
    assert kernel.preferred_shared_memory_carveout == 100


def test_launch_cost_is_measured_with_and_without_the_hook(monkeypatch):
    launched = []
    cupy = types.ModuleType("cupy")
    cupy.uint32, cupy.zeros = np.uint32, np.zeros
    current = types.SimpleNamespace(synchronize=lambda: None)
    cupy.cuda = types.SimpleNamespace(get_current_stream=lambda: current)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(shaping, "N_LAUNCHES", 2)
    monkeypatch.setattr(shaping, "REPEATS", 1)
    hook = LaunchHook(FakeDriver(), enabled=True)
    launches = types.SimpleNamespace(hook=hook)

    def launch(*arguments):
        nbytes = hook.dynamic_nbytes("k", (256, 1, 1), 0)
        launched.append((launches.hook is hook, nbytes > 0))

    monkeypatch.setattr(shaping, "kernel", lambda name: launch)
    beside = shaping.Beside(SM90, Launch(512, 32, 0, 24 << 10))
    row = shaping.launch_cost(launches, beside)
    assert set(launched) == {(False, False), (True, False), (True, True)}
    assert launches.hook is hook
    assert row.value == row.details["more_s"]["shaped"] * 1e6


def test_sides_are_calibrated_to_the_wanted_duration(experiment, monkeypatch):
    times = iter([0.0, 1.0, 2.0, 2.5, 3.0, 4.0])
    monkeypatch.setattr(shaping.time, "perf_counter", lambda: next(times))
    assert experiment.calibrate(lambda: None, "rounds", 0.25) == 50
