"""Run a coverage-guided fuzzer over decoders, and keep the inputs that reach new code.

    python -m pip install atheris
    python -m tests.fuzz --seconds 600                  # every target, one after the other
    python -m tests.fuzz --seconds 60 message-header    # one target

A fault stops the target: its input is written to `tests/fuzz/faults/` and its name is printed. The
kept inputs go to `tests/fuzz/corpus/TARGET.zip`, the smallest set with the same coverage.
"""

from __future__ import annotations

import argparse
import hashlib
import pathlib
import shlex
import subprocess
import sys
import tempfile
import zipfile

HERE = pathlib.Path(__file__).parent
#: Most memory that the process may use for one input.
MOST_RSS_MB = 1500
#: Seconds that one input may take.
MOST_S = 20
LONGEST_NBYTES = 4096


def _fuzz(program: str, name: str, arguments: list[str]) -> None:
    """Start the fuzzer in this process; the fuzzer ends the process."""
    import atheris

    with atheris.instrument_imports(include=["dask_gpurt"]):
        from tests.fuzz.decoders import TARGETS
    atheris.Setup([program, *arguments], TARGETS[name].look)
    atheris.Fuzz()


def _program(folder: pathlib.Path, name: str) -> pathlib.Path:
    """Write a program that fuzzes one target; a merge of inputs starts it again by its path."""
    program = folder / "fuzz-target"
    command = shlex.join([sys.executable, "-m", "tests.fuzz", "--in-process", str(program), name])
    program.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    program.chmod(0o700)
    return program


def archive_of(name: str) -> pathlib.Path:
    return HERE / "corpus" / f"{name}.zip"


def kept_inputs(name: str) -> dict[str, bytes]:
    """Return the inputs that earlier runs kept, by their names."""
    if not archive_of(name).exists():
        return {}
    with zipfile.ZipFile(archive_of(name)) as archive:
        return {entry: archive.read(entry) for entry in archive.namelist()}


def _keep(name: str, folder: pathlib.Path) -> int:
    archive_of(name).parent.mkdir(exist_ok=True)
    files = sorted(path for path in folder.iterdir() if path.is_file())
    with zipfile.ZipFile(archive_of(name), "w", zipfile.ZIP_DEFLATED) as archive:
        for path in files:
            # With a fixed date, the same inputs make the same archive.
            entry = zipfile.ZipInfo(path.name)
            archive.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED)
    return len(files)


def fuzz(name: str, seconds: int) -> bool:
    """Fuzz one target, then keep the smallest corpus with the same coverage.

    Returns
    -------
    bool
        Whether every input was handled as documented.
    """
    from tests.fuzz.decoders import TARGETS

    faults = HERE / "faults"
    with tempfile.TemporaryDirectory() as scratch:
        program = _program(pathlib.Path(scratch), name)
        found, smallest = pathlib.Path(scratch, "found"), pathlib.Path(scratch, "smallest")
        found.mkdir()
        smallest.mkdir()
        for content in [*TARGETS[name].seeds(), *kept_inputs(name).values()]:
            (found / hashlib.sha1(content).hexdigest()).write_bytes(content)
        faults.mkdir(exist_ok=True)
        fuzzing = subprocess.run(
            [
                program,
                f"-max_total_time={seconds}",
                f"-max_len={LONGEST_NBYTES}",
                f"-rss_limit_mb={MOST_RSS_MB}",
                f"-timeout={MOST_S}",
                f"-artifact_prefix={faults}/{name}-",
                "-print_final_stats=1",
                "-verbosity=0",
                found,
            ],
            check=False,
        )
        subprocess.run([program, "-merge=1", "-verbosity=0", smallest, found], check=False)
        is_fine = fuzzing.returncode == 0
        print(f"{name}: {'no fault' if is_fine else 'FAULT'}, {_keep(name, smallest)} inputs kept")
    return is_fine


def main() -> int:
    from tests.fuzz.decoders import TARGETS

    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=int, default=600, help="for each target")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    arguments = parser.parse_args()
    unknown = set(arguments.targets) - set(TARGETS)
    if unknown:
        parser.error(f"no target {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")
    fine = [fuzz(name, arguments.seconds) for name in arguments.targets or TARGETS]
    return 0 if all(fine) else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--in-process"]:
        _fuzz(sys.argv[2], sys.argv[3], sys.argv[4:])
    sys.exit(main())
