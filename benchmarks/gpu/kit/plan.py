"""The plan: which call carries which files to the machine, runs what, and for how long."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.gpu.kit.archives import MANIFEST, Archive, Part
from benchmarks.gpu.kit.step import DELIVER
from benchmarks.gpu.kit.steps import CALL_S, START_S, UNPACKED_NBYTES_PER_S, Step

#: What a call can carry, the files of the repository included.
CARRIED_NBYTES = 64 << 20
CARRIED_PATHS = 8
COMMAND_LENGTH = 2000
MIB = 1 << 20


class PlanError(ValueError):
    """A step that does not fit into one call."""


@dataclass
class Call:
    """One command on the machine.

    Attributes
    ----------
    parts
        Parts of archives that it carries.
    most_s
        The time limit to give it.
    """

    name: str
    title: str
    command: str
    writes: tuple[str, ...]
    most_s: float
    parts: list[Part] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Size of the archives that it carries."""
        return sum(part.nbytes for part in self.parts)

    def carried(self, folder: str) -> list[str]:
        """Return the paths to carry, relative to the root of the repository."""
        return [f"{folder}/{name}" for name in (MANIFEST, *(part.file for part in self.parts))]


def room_nbytes(repository_nbytes: int) -> int:
    """Return the size that archives may have in one call, beside the repository."""
    room = CARRIED_NBYTES - repository_nbytes - MIB  # a MiB for names, and for the manifest
    if room < MIB:
        raise PlanError(
            f"the repository has {repository_nbytes / MIB:.1f} MiB in files that git does not"
            f" ignore, and a call carries {CARRIED_NBYTES // MIB} MiB: remove large files"
        )
    return room


def plan(
    steps: Sequence[Step], archives: Mapping[str, Archive], folder: str, room_nbytes: int
) -> list[Call]:
    """Spread the archives over calls, each before the step that needs it.

    A call carries archives of its own step first, the largest before others. Those that find no
    room travel with the call before, and at last with calls of their own.

    Raises
    ------
    PlanError
        A part is larger than a call can carry, or a step takes too long.
    """
    carried_before: set[str] = set()
    wanted = []
    for step in steps:
        new = [name for name in step.archives if name not in carried_before]
        carried_before.update(new)
        wanted.append([part for name in new for part in archives[name].parts])
    calls: list[Call] = []
    late: list[Part] = []
    for step, parts in zip(reversed(steps), reversed(wanted), strict=True):
        call = _call_of(step, archives, folder)
        late = _load(call, [*sorted(parts, key=lambda part: -part.nbytes), *late], room_nbytes)
        calls.append(call)
    while late:
        call = Call(DELIVER, "archives of later steps", "", (f"{DELIVER}.json",), 60.0)
        call.command = _command(DELIVER, folder)
        left = _load(call, late, room_nbytes)
        if len(left) == len(late):
            raise PlanError(f"{left[0].file} has {left[0].nbytes} bytes, too many for a call")
        late = left
        calls.append(call)
    return calls[::-1]


def _load(call: Call, parts: Sequence[Part], room_nbytes: int) -> list[Part]:
    """Give parts to a call, and return those that find no room."""
    late = []
    for part in parts:
        fits = call.nbytes + part.nbytes <= room_nbytes
        if fits and len(call.parts) + 1 < CARRIED_PATHS:
            call.parts.append(part)
        else:
            late.append(part)
    return late


def _call_of(step: Step, archives: Mapping[str, Archive], folder: str) -> Call:
    # As on a machine that has unpacked nothing yet: calls can be repeated on a new one.
    unpacked_nbytes = sum(archives[name].unpacked_nbytes for name in step.archives)
    most_s = step.most_s(unpacked_nbytes)
    if most_s > CALL_S:
        raise PlanError(
            f"step {step.name} may take {most_s:.0f} s, and a call {CALL_S:.0f} s:"
            f" {START_S:.0f} s to start, {unpacked_nbytes / UNPACKED_NBYTES_PER_S:.0f} s to"
            " unpack, and the limits of its tests and sections"
        )
    writes = (f"{step.name}.json", f"{step.name}.log")
    return Call(step.name, step.title, _command(step.name, folder), writes, most_s)


def _command(name: str, folder: str) -> str:
    runner = "python3 -m benchmarks.gpu.kit.step"
    command = f'{runner} {name} --kit {shlex.quote(folder)} --out "${{OUT:?}}"'
    if len(command) > COMMAND_LENGTH:
        raise PlanError(f"the command of {name} has {len(command)} characters: shorten {folder}")
    return command


def describe(calls: Sequence[Call], folder: str) -> str:
    """Return the plan as text."""
    lines = [
        f"{len(calls)} calls. Make them one after the other on one machine, each in the root of a",
        "copy of the repository: later calls use archives that earlier calls carried.",
    ]
    for number, call in enumerate(calls, 1):
        sizes = {f"{folder}/{part.file}": f"{part.nbytes / MIB:.1f} MiB" for part in call.parts}
        lines += [
            "",
            f"call {number}: {call.name}: {call.title}",
            f"  carries  {call.nbytes / MIB:.1f} MiB",
            *(f"           {path} {sizes.get(path, '')}".rstrip() for path in call.carried(folder)),
            f"  command  {call.command}",
            f"  writes   {', '.join(f'$OUT/{name}' for name in call.writes)}",
            f"  limit    {call.most_s:.0f} s",
        ]
    return "\n".join(lines)
