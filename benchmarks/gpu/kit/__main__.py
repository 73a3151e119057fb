"""Makes everything that an offline GPU machine needs for our tests, and prints the calls to make.

The folder OUT is below the repository, and git ignores it: `build/kit`, for example.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.kit.fat_binaries import FatBinaryError
from benchmarks.gpu.kit.making import make
from benchmarks.gpu.kit.packages import PACKAGES
from benchmarks.gpu.kit.plan import PlanError, describe, plan, room_nbytes
from benchmarks.gpu.kit.rehearsal import RehearsalError, rehearse, repository_files
from benchmarks.gpu.kit.steps import STEPS
from benchmarks.gpu.kit.wheels import DownloadError

ROOT = Path(__file__).parents[3]


def relative(folder: Path) -> str:
    """Return a folder relative to the repository, if the machine would get it there.

    Raises
    ------
    PlanError
        The folder is outside, or git does not ignore it.
    """
    try:
        name = folder.resolve().relative_to(ROOT.resolve()).as_posix()
    except ValueError:
        name = ""
    ignored = ["git", "check-ignore", "--quiet", f"{name}/manifest.json"]
    if not name or subprocess.run(ignored, cwd=ROOT, check=False).returncode:
        raise PlanError(
            f"{folder} must be a folder of this repository that git ignores, such as build/kit"
        )
    return name


def architecture(text: str) -> int | None:
    """Return the number of an architecture; None for all of them."""
    return None if text == "all" else int(text)


def log(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu.kit", description=__doc__)
    parser.add_argument("out", type=Path, help="the folder for archives")
    parser.add_argument(
        "--arch",
        type=architecture,
        default=90,
        help="keep GPU code of cuDF for this compute capability only, such as 90 for 9.0 (the"
        " default); 'all' keeps cuDF whole, in parts",
    )
    parser.add_argument("--rehearse", action="store_true", help="make the calls here, without GPU")
    parser.add_argument(
        "--library-path",
        default="",
        metavar="DIRS",
        help="rehearse with the libraries of these folders, which stand in for a GPU's driver",
    )
    asked = parser.parse_args(arguments)
    try:
        name = relative(asked.out)
        room = room_nbytes(sum((ROOT / one).stat().st_size for one in repository_files(ROOT)))
        archives = make(asked.out, PACKAGES, asked.arch, room, log)
        calls = plan(STEPS, archives, name, room)
        log(describe(calls, name))
        problems = []
        if asked.rehearse:
            log("\nrehearsal")
            problems = rehearse(ROOT, name, calls, asked.library_path, log)
    except (DownloadError, FatBinaryError, PlanError, RehearsalError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for problem in problems:
        print(f"problem: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
