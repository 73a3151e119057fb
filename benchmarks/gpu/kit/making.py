"""Makes the archives of the kit, unless they are there already."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.gpu.kit.archives import (
    Archive,
    ArchiveError,
    check,
    pack,
    read_manifest,
    write_manifest,
)
from benchmarks.gpu.kit.fat_binaries import prune
from benchmarks.gpu.kit.packages import PRUNED
from benchmarks.gpu.kit.wheels import download, unpack_wheels

MIB = 1 << 20


def make(
    folder: Path,
    packages: Mapping[str, Sequence[str]],
    architecture: int | None,
    part_nbytes: int,
    log: Callable[[str], None],
) -> dict[str, Archive]:
    """Make the archives that the folder lacks, and return all of them.

    Parameters
    ----------
    architecture
        Keep GPU code of this architecture alone; None keeps all.
    """
    archives = _present(folder)
    for name, requirements in packages.items():
        recipe = _recipe(name, requirements, architecture)
        if name in archives and _is_usable(archives[name], recipe, part_nbytes):
            continue
        began = time.perf_counter()
        wheels = download(requirements, folder / "wheels")
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            unpack_wheels(wheels, Path(scratch))
            if architecture is not None and name == PRUNED[0]:
                pruned = prune(Path(scratch, PRUNED[1]), architecture)
                log(
                    f"{PRUNED[1]}: kept {pruned.kept_nbytes / MIB:.0f} MiB of GPU code, removed"
                    f" {pruned.zeroed_nbytes / MIB:.0f} MiB"
                )
            archives[name] = pack(Path(scratch), folder / f"{name}.tar.xz", part_nbytes, recipe)
        nbytes = sum(part.nbytes for part in archives[name].parts)
        took_s = time.perf_counter() - began
        log(f"{name}: {nbytes / MIB:.1f} MiB, {len(wheels)} wheels, made in {took_s:.0f} s")
        write_manifest(folder, archives)
    return archives


def _recipe(name: str, requirements: Sequence[str], architecture: int | None) -> str:
    pruning = f", architecture {architecture or 'all'}" if name == PRUNED[0] else ""
    return " ".join(requirements) + pruning


def _is_usable(archive: Archive, recipe: str, part_nbytes: int) -> bool:
    return archive.recipe == recipe and all(part.nbytes <= part_nbytes for part in archive.parts)


def _present(folder: Path) -> dict[str, Archive]:
    """Archives that are there and undamaged."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        archives = read_manifest(folder)
    except ArchiveError:
        return {}
    found = {}
    for name, archive in archives.items():
        try:
            for part in archive.parts:
                check(folder, part)
            found[name] = archive
        except ArchiveError:
            continue
    return found
