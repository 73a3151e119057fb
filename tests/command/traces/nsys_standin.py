"""A stand-in for nsys: it runs the command after its flags, and writes what it saw as its report.

As nsys does, it stays as the parent of the command, ends with its status, replaces %h and %p in
the name of the report, and still writes the report after SIGTERM.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path


def install(folder: Path) -> Path:
    """Put the stand-in into a folder for PATH, under the name of nsys."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "nsys"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} "$@"\n')
    program.chmod(0o755)
    return program


def main() -> None:
    verb, *words = sys.argv[1:]
    n_flags = next(i for i, word in enumerate(words) if not word.startswith("-"))
    flags, command = words[:n_flags], words[n_flags:]
    process = subprocess.Popen(command, close_fds=False)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    output = next(flag.partition("=")[2] for flag in flags if flag.startswith("--output="))
    output = output.replace("%h", socket.gethostname()).replace("%p", str(process.pid))
    seen = {"verb": verb, "flags": flags, "pid": process.pid}
    Path(f"{output}.begun").write_text(json.dumps(seen))
    status = process.wait()
    part = Path(f"{output}.part")
    part.write_text(json.dumps({**seen, "status": status}))
    part.rename(f"{output}.nsys-rep")
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


if __name__ == "__main__":
    main()
