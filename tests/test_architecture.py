"""All modules and tests follow the rules for imports, sizes, assertions and names."""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys
from collections import Counter

import pytest

from tests.asserting import Suite

TESTS = pathlib.Path(__file__).parent
ROOT = pathlib.Path(__file__).parents[1] / "dask_gpurt"
MODULES = sorted(ROOT.rglob("*.py"))
SUITE = Suite(TESTS)

#: Modules that touch a clock, a loop, a thread, the system or a log.
IMPURE = {
    "asyncio",
    "logging",
    "os",
    "random",
    "socket",
    "subprocess",
    "threading",
    "time",
}

DASK = {"dask", "distributed"}
FRAMES = {"msgpack", "numpy", "pandas", "pyarrow"}

#: Room: rooms it may import besides itself, third-party packages, impure standard library.
RULES: dict[str, tuple[set[str], set[str], set[str]]] = {
    "__init__": ({"command", "plugins"}, set(), set()),
    "errors": (set(), set(), set()),
    "metrics": (set(), set(), {"threading"}),
    "process_patch": (set(), set(), {"threading"}),
    "system_calls": (set(), set(), {"os"}),
    "setting_values": ({"errors"}, {"dask"}, set()),
    "config": ({"errors", "setting_values"}, {"dask", "yaml"}, {"logging"}),
    # The clock is for the ledger, and for the rates of the emulated device.
    "devices": (
        {"system_calls"},
        {"cupy", "cupy_backends", "numpy", "nvtx", "rmm"},
        {"os", "threading", "time"},
    ),
    # Libraries for devices and geometries are optional.
    "frames": (
        set(),
        FRAMES | {"cudf", "cupy", "geopandas", "pylibcudf", "pyproj", "rmm", "shapely"},
        set(),
    ),
    # The clock times codecs on samples; the lock guards the measurements.
    "codecs": ({"errors"}, {"libcudf", "numpy", "nvidia", "pyarrow"}, {"threading", "time"}),
    # Sockets: to ask the kernel about sockets that UCX made, and to restrict who may connect.
    "transport": (
        {"errors", "system_calls"},
        # psutil tells which network device has which address.
        {"cuda", "numpy", "psutil", "ucxx"},
        {"asyncio", "os", "socket", "threading", "time"},
    ),
    "shuffle": (
        {"codecs", "errors", "frames", "metrics", "system_calls", "transport"},
        {"numpy"},
        {"logging", "os", "threading"},
    ),
    # The room is pure: it gets descriptions as text, measurements as numbers, `/sys` as a folder.
    "topology": ({"errors"}, {"yaml"}, set()),
    "placement": ({"topology"}, set(), set()),
    # Perfetto is optional, and google.protobuf comes with it. Foreign traces are SQLite files.
    # Devices: names of lanes, and the formula of the overlap, which `status` and reports share.
    "tracing": ({"devices", "errors"}, {"google", "numpy", "perfetto"}, {"os"}),
    # `Communicator` is loaded from there when a program first uses it (inside a function).
    "collectives": ({"plugins"}, {"numpy"}, set()),
    # Public parts of Dask make the graphs for workloads; distributed is never imported.
    "simulate": ({"errors", "topology"}, {"dask", "pandas"}, set()),
    # The subprocess removes files that a killed worker leaves.
    # Draws of durations come from a generator with a fixed seed.
    "predict": (
        {"errors", "simulate", "topology", "tracing"},
        {"dask", "numpy", "yaml"},
        {"random"},
    ),
    "memory": (
        {"codecs", "devices", "errors", "frames", "metrics", "system_calls"},
        {"msgpack", "numpy"},
        {"logging", "os", "subprocess", "threading", "time"},
    ),
    "plugins": (
        {
            "",
            "codecs",
            "collectives",
            "config",
            "devices",
            "errors",
            "frames",
            "memory",
            "metrics",
            "placement",
            "shuffle",
            "simulate",
            "process_patch",
            "system_calls",
            "topology",
            "tracing",
            "transport",
        },
        # Tornado: distributed's callbacks need a loop of Tornado's in a simulation, too.
        # Bokeh: the page on the dashboard, where there is a dashboard.
        # Torch and CuPy: their groups, started on the ranks of ours.
        # CUPTI: what a GPU did, in a trace.
        DASK
        | {
            "bokeh",
            "cupti",
            "cupy",
            "msgpack",
            "numpy",
            "packaging",
            "prometheus_client",
            "psutil",
            "pynvml",
            "torch",
            "tornado",
        },
        IMPURE,
    ),
    "local_cluster": ({"errors", "plugins"}, DASK, {"logging"}),
    "preload": ({"config", "errors", "plugins"}, {"dask"}, {"logging"}),
    "quiet": (set(), set(), {"logging"}),
    "cli": ({"", "command", "demo", "errors", "setting_values"}, {"click"}, IMPURE),
    "command": (
        {
            "",
            "config",
            "demo",
            "devices",
            "errors",
            "local_cluster",
            "metrics",
            "placement",
            "plugins",
            "predict",
            "setting_values",
            "topology",
            "tracing",
        },
        # IPython: the output of a notebook, in a kernel. psutil: the mounted file systems.
        DASK | {"IPython", "click", "cloudpickle", "psutil", "rich", "yaml"},
        IMPURE,
    ),
    "demo": (
        {"", "errors", "local_cluster", "metrics"},
        DASK | {"duckdb", "numpy", "pandas", "psutil", "pyarrow", "rich"},
        IMPURE,
    ),
}

#: Packages and functions that only one module may name.
ONLY_IN = {
    "distributed.shuffle": {
        "plugins/patches/graphs/foreign_shuffles.py",
        "plugins/patches/graphs/transfer_tasks.py",
        "plugins/patches/p2p_owners.py",
        "plugins/patches/p2p_restart.py",
        "plugins/patches/p2p.py",
    },
    "dask._task_spec": {
        "plugins/patches/graphs/foreign_shuffles.py",
        "plugins/patches/graphs/blockwise_layers.py",
        "plugins/patches/graphs/graph_swap.py",
        "plugins/patches/graphs/transfer_tasks.py",
        "plugins/patches/p2p.py",
        "plugins/patches/simulator.py",
    },
    "pandas._libs": {"frames/gather.py"},
    "IPython": {"command/live/live_view.py"},
    "bokeh": {"plugins/dashboard/drawing.py"},
    "ctypes": {
        "devices/occupancy/launches.py",
        "devices/host_memory/malloc.py",
        "devices/host_memory/pages.py",
        "system_calls.py",
    },
    "cupy": {
        "devices/cuda/driver.py",
        "devices/occupancy/launches.py",
        "devices/cuda/out_of_memory.py",
        "frames/device/cudf_.py",
        "frames/device/cupy_.py",
        "plugins/collectives/groups/torch_start.py",
    },
    "cupy_backends": {"devices/occupancy/launches.py"},
    "cupti": {"plugins/tracing/cupti_recorder.py"},
    "geopandas": {"frames/geo/geo_frames.py", "frames/geo/geometry.py"},
    "google": {"tracing/formats/protobuf.py"},
    "perfetto": {"tracing/formats/protobuf.py"},
    "nvtx": {"devices/cuda/ranges.py"},
    # Only one module may import each device library; others import that module.
    "cudf": {"frames/device/cudf_.py"},
    "libcudf": {"codecs/nvcomp.py"},
    "nvidia": {"codecs/nvcomp.py"},
    "prometheus_client": {"plugins/patches/shown/prometheus.py"},
    "pylibcudf": {"frames/device/cudf_.py"},
    "pynvml": {"plugins/topology/host_report.py"},
    "pyproj": {"frames/geo/geometry.py"},
    "rmm": {"devices/cuda/driver.py", "devices/cuda/out_of_memory.py", "frames/device/cudf_.py"},
    "shapely": {"frames/geo/geometry.py"},
    "torch": {"plugins/collectives/groups/torch_start.py"},
    "ucxx": {"transport/ucx/context.py"},
}

#: Names of variables, or of attributes of `self`, that hold an object of distributed's.
OBJECTS = {"client", "scheduler", "state", "task", "ts", "worker", "ws"}

#: Outside of `plugins/patches`, by module: uses of private names of dask and distributed, and
#: assignments to attributes of their objects, with the reason why they stay.
PATCHES_ELSEWHERE = {
    # Its workers are `SimulatedWorker`, of this package.
    "plugins/simulation/simulated_run.py": {"worker.alive ="},
}


def name_of(path: pathlib.Path) -> str:
    return str(path.relative_to(ROOT))


def room_of(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path: pathlib.Path, *, typing_only: bool = False) -> list[str]:
    tree = ast.parse(path.read_text())
    hidden: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            hidden.update(child for statement in node.body for child in ast.walk(statement))
    found = []
    for node in ast.walk(tree):
        if node in hidden and not typing_only:
            continue
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_modules_import_only_allowed_modules(path):
    room = room_of(path)
    assert room in RULES, f"{room} has no rule: add one, with a reason to be"
    rooms, third_party, impure = RULES[room]
    names = {p.name.removesuffix(".py") for p in ROOT.iterdir()}
    for imported in imports(path):
        first, *rest = imported.split(".")
        if first == "dask_gpurt":
            target = rest[0] if rest and rest[0] in names else ""
            assert target in rooms | {room}, f"{room} may not import {imported}"
        elif first in IMPURE:
            assert first in impure, f"{room} decides only: no {first}"
        elif first not in sys.stdlib_module_names:
            assert first in third_party, f"{room} may not import {first}"


def test_collectives_load_plugins_for_their_name_alone():
    room = [path for path in MODULES if room_of(path) == "collectives"]
    importers = [
        name_of(path)
        for path in room
        if any(one.startswith("dask_gpurt.plugins") for one in imports(path))
    ]
    assert importers == ["collectives/__init__.py"]
    code = "import sys, dask_gpurt.collectives as c; assert 'distributed' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_restricted_packages_have_one_importer(path):
    for imported in imports(path):
        for private, allowed in ONLY_IN.items():
            if imported == private or imported.startswith(private + "."):
                assert name_of(path) in allowed, f"{imported} belongs into {allowed}"


def patches_in(source: str) -> list[str]:
    """List uses of private names of dask and distributed, and assignments to their objects."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found += [alias.name for alias in names if is_private_of_dask(alias.name)]
            case ast.ImportFrom(module=str(module), names=names):
                imported = [f"{module}.{alias.name}" for alias in names]
                found += [name for name in imported if is_private_of_dask(name)]
            case ast.Attribute(value=owner, attr=name, ctx=use) if is_of_distributed(owner):
                if not isinstance(use, ast.Load):
                    found.append(f"{ast.unparse(node)} =")
                elif is_private(name):
                    found.append(ast.unparse(node))
            case ast.Call(func=ast.Name(id="setattr" | "delattr"), args=[owner, *_]):
                if is_of_distributed(owner):
                    found.append(ast.unparse(node))
    return found


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def is_private_of_dask(imported: str) -> bool:
    first, *rest = imported.split(".")
    return first in DASK and any(map(is_private, rest))


def is_of_distributed(node: ast.expr) -> bool:
    match node:
        case ast.Name(id=name):
            return name in OBJECTS
        case ast.Attribute(value=ast.Name(id="self"), attr=name):
            return name.removeprefix("_") in OBJECTS
    return False


@pytest.mark.parametrize(
    "path", [p for p in MODULES if not name_of(p).startswith("plugins/patches/")], ids=name_of
)
def test_private_names_of_dask_are_in_patches_alone(path):
    allowed = PATCHES_ELSEWHERE.get(name_of(path), set())
    assert set(patches_in(path.read_text())) == allowed, "belongs into plugins/patches"


@pytest.mark.parametrize(
    "source, expected",
    [
        ("import dask._task_spec", ["dask._task_spec"]),
        ("from distributed.shuffle import _core", ["distributed.shuffle._core"]),
        ("from distributed.http import prometheus", []),
        ("from dask_gpurt import _private", []),
        ("self._scheduler._transitions(1)", ["self._scheduler._transitions"]),
        ("ts.annotations['a'] = ws.__dict__", []),
        ("worker.execute = mine", ["worker.execute ="]),
        ("del self.client.get", ["self.client.get ="]),
        ("setattr(ws, name, 1)", ["setattr(ws, name, 1)"]),
        ("self._state = self._workers", []),
    ],
)
def test_a_private_name_is_noticed(source, expected):
    assert patches_in(source) == expected


def test_gpurt_settings_are_read_in_config_only():
    """`gpurt.*` settings are read in config.py only; Dask's own settings, where they are used."""
    readers = {name_of(p) for p in MODULES if 'config.get("gpurt.' in p.read_text()}
    # Two exceptions: the preload reads the flag itself, so that a program without the flag imports
    # nothing else. The doctor reports where the flag was set.
    assert readers == {"preload.py", "command/checks/local.py"}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_modules_are_small_and_have_a_docstring(path):
    source = path.read_text()
    assert source.count("\n") <= 500
    assert path.name not in ("utils.py", "helpers.py", "common.py")
    if source.strip():
        assert ast.get_docstring(ast.parse(source)), "no module docstring"


def test_every_test_asserts_something():
    assert list(SUITE.without_assertion()) == []


def test_suites_are_small():
    suites = {path: path.read_text().count("\n") for path in TESTS.rglob("test_*.py")}
    assert [path.name for path, n_lines in suites.items() if n_lines > 500] == []


def test_names_of_tests_are_short():
    names = {function.name for _, function in SUITE.tests}
    assert [name for name in names if len(name) > 60] == []


def test_no_test_is_hidden_in_a_function():
    """pytest finds tests in modules and classes alone."""
    assert SUITE.hidden == []


def test_folders_have_at_most_fifteen_modules():
    in_folder = Counter(path.parent for path in MODULES if path.name != "__init__.py")
    assert {str(folder): n for folder, n in in_folder.items() if n > 15} == {}


def test_names_of_modules_and_classes_are_unique():
    modules = Counter(path.name for path in MODULES if path.name != "__init__.py")
    classes = Counter(
        node.name
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, n in (modules + classes).items() if n > 1] == []
    assert not classes.keys() & {"WorkerState", "TaskState", "Scheduler", "Worker", "Client"}
