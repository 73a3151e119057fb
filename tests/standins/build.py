"""Stand-ins for drivers, compiled from the C files of a folder here, once for each content."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
#: Builds are kept in the environment, where no other user can put a library in their place.
IN_ENVIRONMENT = Path(sys.prefix)

#: Without optimization, or functions would not begin as `HOOKABLE` of `cuda/parts.h` has it.
FLAGS = ["-O0", "-g", "-mno-red-zone", "-fcf-protection=none", "-fvisibility=hidden", "-shared"]
FLAGS += ["-fPIC", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-pthread"]

#: Libraries of the CUDA stand-in, each with its files.
CUDA = {
    "libcuda.so.1": (
        "contexts.c", "copies.c", "events.c", "faults.c",
        "lookup.c", "memory.c", "sharing.c", "streams.c",
    ),
    "libnvidia-ml.so.1": ("management.c",),
}  # fmt: skip


def why_not() -> str | None:
    """Return why nothing can be compiled here."""
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        return "the stand-in for a driver runs on Linux on x86-64"
    if shutil.which("gcc") is None:
        return "gcc is not installed, which compiles the stand-in for a driver"
    return None


def build(folder: Path, libraries: Mapping[str, Sequence[str]], parent: Path | None = None) -> Path:
    """Return the folder with compiled libraries; compile them if no process has done so yet.

    Parameters
    ----------
    folder
        With the C files and headers.
    libraries
        File name of each library, and the files that it is made of.
    parent
        Where builds are kept; by default in the environment.
    """
    digest = hashlib.sha256(repr((FLAGS, sorted(libraries.items()))).encode())
    for path in sorted(folder.glob("*.[ch]")):
        digest.update(path.name.encode() + path.read_bytes())

    def compiled(out: Path) -> None:
        for library, files in libraries.items():
            command = ["gcc", *FLAGS, f"-Wl,-soname,{library}", "-o", out / library, *files, "-ldl"]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr

    parent = parent or IN_ENVIRONMENT / f"standin-{folder.name}"
    return once(parent / digest.hexdigest()[:16], compiled)


def once(folder: Path, make: Callable[[Path], None]) -> Path:
    """Return a folder, which `make` fills in another place unless it is there already.

    Two processes may make it at the same time: the first one to rename its folder wins.
    """
    if not folder.exists():
        folder.parent.mkdir(exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=folder.parent))
        make(made)
        try:
            made.rename(folder)
        except OSError:
            assert folder.exists()
            shutil.rmtree(made)
    return folder


def environment(**settings: object) -> dict[str, str]:
    """Return the environment of a process that runs over the CUDA stand-in.

    Parameters
    ----------
    settings
        As in `cuda/parts.h`, such as ``total_nbytes=1 << 20``.
    """
    libraries = [str(build(HERE / "cuda", CUDA)), os.environ.get("LD_LIBRARY_PATH", "")]
    ours = {f"STANDIN_CUDA_{name.upper()}": str(value) for name, value in settings.items()}
    ours |= {"LD_LIBRARY_PATH": ":".join(filter(None, libraries)), "PYTHONPATH": str(ROOT)}
    # Where UCX reports errors; its own default is the standard output.
    return os.environ | ours | {"UCX_LOG_FILE": "stderr"}
