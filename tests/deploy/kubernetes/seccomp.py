"""Refuses the system calls that a profile names, then becomes another program.

    python seccomp.py PROFILE.json PROGRAM ...

The profile has the format that container engines read. Of that format, this program takes what
refuses calls by their names: `SCMP_ACT_ERRNO`, without conditions on arguments.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import struct
import sys
from collections.abc import Iterable

#: Number of each system call that a profile may name, by machine.
_NUMBERS = {
    "x86_64": {"memfd_create": 319, "ptrace": 101},
    "aarch64": {"memfd_create": 279, "ptrace": 117},
}
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
#: Instructions of a filter: load a word, jump if equal, return.
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06


def instructions(numbers: Iterable[int]) -> bytes:
    """Return a filter that refuses these calls and allows all others."""
    made = [(_LOAD, 0, 0, 0)]  # the number of the call
    for number in numbers:
        made += [(_JUMP_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | errno.EPERM)]
    made.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("<HBBI", *one) for one in made)


def refuse(numbers: Iterable[int]) -> None:
    """Refuse these calls in this process and in all that it starts, from now on."""
    code = instructions(numbers)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, program, 0, 0):
        raise OSError(ctypes.get_errno(), "the system takes no filter of system calls")


def main(path: str, *command: str) -> None:
    with open(path, encoding="utf-8") as file:
        rules = json.load(file)["syscalls"]
    names = [name for rule in rules if rule["action"] == "SCMP_ACT_ERRNO" for name in rule["names"]]
    refuse(_NUMBERS[platform.machine()][name] for name in names)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(*sys.argv[1:])
