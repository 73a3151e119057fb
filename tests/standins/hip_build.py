"""The build of the stand-in for HIP, and the environment in which CuPy for ROCm runs on it.

The build goes to a folder of the Python environment, named by the contents of everything that it
is made of. The libraries that CuPy is linked against and that the stand-in lacks are generated from
CuPy's own files: each of their functions fails with "not supported".
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping

from tests.standins.build import IN_ENVIRONMENT, once
from tests.standins.hip_kernels import OPTIONS

HERE = pathlib.Path(__file__).parent
SOURCES = HERE / "hip"
PACKAGE = "cupy-rocm-7-0"

_HIP = "libamdhip64.so.7"
_COMPILER = "libhiprtc.so.7"
#: Names of AMD's libraries, and of functions that only they define.
_LIBRARY = re.compile(r"Shared library: \[(lib(?:amd|hip|roc|rccl)[^\]]+)\]")
_FUNCTION = re.compile(r"(hip|roc|nccl|rsmi|__hip|amd)\w+$")


def why_no_standin() -> str | None:
    """Return why the stand-in cannot be built here, or None."""
    for tool in ("g++", "gcc", "readelf", "nm"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed (Debian: g++, binutils)"
    try:
        importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return f"{PACKAGE} is not installed (make .venv-hip/installed)"
    return None


@functools.cache
def built(parent: pathlib.Path = IN_ENVIRONMENT / "standin-hip") -> pathlib.Path:
    """Build the stand-in unless that was done before. Return its folder."""
    folder = parent / _key()
    return once(folder, lambda made: _build(made, folder))


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a process that runs CuPy on the stand-in."""
    folder = built()
    variables = {
        **os.environ,
        "LD_LIBRARY_PATH": str(folder / "lib"),
        "LD_PRELOAD": str(folder / "lib" / "device_file.so"),
        "PATH": f"{folder / 'bin'}:{os.environ.get('PATH', os.defpath)}",
        "CUPY_CACHE_DIR": str(folder / "kernels"),
    }
    return {**variables, **(more or {})}


def _inputs() -> Iterable[pathlib.Path]:
    yield from (HERE / "hip_build.py", HERE / "hip_kernels.py")
    yield from sorted(path for path in SOURCES.rglob("*") if path.is_file())


def _key() -> str:
    found = hashlib.sha256(importlib.metadata.version(PACKAGE).encode())
    for tool in ("gcc", "g++"):
        found.update(subprocess.check_output([tool, "--version"]))
    for path in _inputs():
        found.update(path.name.encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:16]


def _build(made: pathlib.Path, final: pathlib.Path) -> None:
    """Build into one folder what will run in another."""
    for name in ("lib", "bin", "kernels"):
        (made / name).mkdir()
    shutil.copytree(SOURCES / "include", made / "include")
    shutil.copy(HERE / "hip_kernels.py", made)
    _make_hipcc(made / "bin" / "hipcc")
    parts = sorted(set(SOURCES.glob("*.c")) - {SOURCES / "compiler.c", SOURCES / "device_file.c"})
    bare = made / "bare.so"
    _link(bare, _HIP, parts)
    libraries, functions = _needs(extension_modules())
    stubs = made / "stubs.c"
    missing = sorted(functions - _symbols(bare, "--defined-only"))
    # Noted, because libraries ask for the last error after they launched a kernel of their own.
    lines = [f"int {name}() {{ return noted(801); }}\n" for name in missing]
    stubs.write_text("".join(["int noted(int);\n", *lines]))
    _link(made / "lib" / _HIP, _HIP, [*parts, stubs])
    script = [
        f'-DSTANDIN_PYTHON="{sys.executable}"',
        f'-DSTANDIN_SCRIPT="{final / "hip_kernels.py"}"',
    ]
    _link(made / "lib" / _COMPILER, _COMPILER, [SOURCES / "compiler.c"], script)
    _link(made / "lib" / "device_file.so", "device_file.so", [SOURCES / "device_file.c"])
    empty = made / "empty.c"
    empty.write_text("")
    for name in libraries - {_HIP, _COMPILER}:
        _link(made / "lib" / name, name, [empty])
    header = made / "include" / "kernel.h"
    _call("g++", *OPTIONS, "-x", "c++-header", "-o", f"{header}.gch", str(header))


def _make_hipcc(path: pathlib.Path) -> None:
    """Write a program that says, as AMD's compiler does, where headers are."""
    path.write_text("#!/bin/sh\nexec g++ -x c++ -E -v /dev/null\n")
    path.chmod(0o755)


def _link(
    out: pathlib.Path, name: str, sources: Iterable[pathlib.Path], options: Iterable[str] = ()
) -> None:
    fixed = ("-std=gnu11", "-O2", "-g", "-Wall", "-Werror", "-fPIC", "-shared", "-pthread")
    loose = ("-Wno-builtin-declaration-mismatch", f"-Wl,-soname,{name}")
    _call("gcc", *fixed, *loose, *options, "-o", str(out), *map(str, sources), "-ldl")


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")


def extension_modules() -> list[pathlib.Path]:
    """Return CuPy's compiled modules."""
    found = importlib.metadata.files(PACKAGE) or []
    return [pathlib.Path(str(one.locate())) for one in found if one.suffix == ".so"]


def _needs(modules: Iterable[pathlib.Path]) -> tuple[set[str], set[str]]:
    """Return the libraries of AMD that modules are linked against, and the functions they call."""
    libraries: set[str] = set()
    functions: set[str] = set()
    for path in modules:
        head = subprocess.check_output(["readelf", "-d", str(path)], text=True)
        libraries.update(_LIBRARY.findall(head))
        functions.update(filter(_FUNCTION.match, _symbols(path, "--undefined-only")))
    return libraries, functions


def _symbols(path: pathlib.Path, which: str) -> set[str]:
    lines = subprocess.check_output(["nm", "-D", which, str(path)], text=True).splitlines()
    return {line.split()[-1].partition("@")[0] for line in lines}
