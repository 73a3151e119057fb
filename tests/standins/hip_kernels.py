"""The kernel compiler of the stand-in for HIP: makes a shared object of a program, with g++.

`compiler.c` runs this file as a script, for a folder with the program. It imports the standard
library alone, and lies beside the headers in the folder of the build.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

HERE = pathlib.Path(__file__).parent
#: The header is compiled once, and used only if these options are the same each time.
OPTIONS = (
    *("-std=c++17", "-O1", "-w", "-fPIC"),
    *("-D__HIPCC__", "-D__HIPCC_RTC__", "-D__HIP_DEVICE_COMPILE__", "-D__HIP_PLATFORM_AMD__"),
)

_DYNAMIC_SHARED = re.compile(r"extern\s+__shared__\s+([^;\[]*?)(\w+)\s*\[\s*\]\s*;")
_KERNEL = re.compile(
    r"__global__\s+(?:void\s+)?(?:__launch_bounds__\s*\([^)]*\)\s*)?(?:void\s+)?(\w+)\s*\("
)


def rewritten(source: str) -> str:
    """Return a program as C++ of the host, with a function `pack_NAME` for each kernel."""
    names = dict.fromkeys(_KERNEL.findall(source))
    source = _DYNAMIC_SHARED.sub(r"\1 *\2 = (\1 *)standin_place.shared;", source)
    packers = [
        f'extern "C" standin::packed *pack_{name}(void **given) '
        f"{{ return standin::pack(&{name}, given); }}"
        for name in names
    ]
    return "\n".join(['#line 1 "kernel.hip"', source, *packers, ""])


def compile_in(folder: pathlib.Path, options: list[str]) -> int:
    """Compile `kernel.hip` to `kernel.so`; messages go to `log`. Return the exit status."""
    (folder / "kernel.cpp").write_text(rewritten((folder / "kernel.hip").read_text()))
    kept = [one for one in options if one.startswith(("-I", "-D"))]
    command = ["g++", *OPTIONS, "-include", str(HERE / "include" / "kernel.h")]
    command += [f"-I{HERE / 'include'}", *kept, "-shared", "-s", "-Wl,--build-id=none"]
    command += ["-o", "kernel.so", "kernel.cpp", str(HERE / "lib" / "libamdhip64.so.7")]
    with open(folder / "log", "wb") as log:
        return subprocess.run(command, cwd=folder, stdout=log, stderr=log, check=False).returncode


if __name__ == "__main__":
    sys.exit(compile_in(pathlib.Path(sys.argv[1]), sys.argv[2:]))
